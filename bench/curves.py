"""Compares loss curves of DiLoCo, data parallel and one worker, in one batched model. See `bench/diloco.py curves`.

A run is `dp` (synchronous data parallel, the same tokens), `one` (one worker, its share of the tokens) or
`[Kx]H:codec[:fragments:overlap][~method][@outer_lr,momentum[,inner_lr_scale]]` with K workers (4 unless said; also `8xdp`). Codecs, sums and outer steps give the same
values as shoal.diloco (a test compares them), on the device of the workers.
"""

import argparse
import json
import lzma
import re
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stacked import Llama, Stack, validation_losses
from torch import Tensor

from shoal.diloco.codec import BLOCK, LARGEST, CodecName, coded_bytes
from shoal.diloco.outer import Outer
from shoal.diloco.site.language import Samples
from shoal.diloco.site.site import learning_rate

# hidden, layers, heads, ffn: about 0.12M, 1M, 10M and 135M parameters with a vocabulary of 256.
PRESETS = {
    "0.1m": (64, 2, 2, 192),
    "1m": (160, 4, 5, 384),
    "10m": (320, 8, 5, 896),
    "135m": (768, 18, 12, 2304),
}
TIMED = 20
"""Steps that are timed to compute how many fit a budget."""
MIX = 0.5
"""Share of a fragment's own values that is kept when an overlapped round completes."""


# -- text -------------------------------------------------------------------------------------------------


def collect_text(max_bytes: int) -> bytes:
    """Returns Python's standard library, then the documentation of the system's packages, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    roots = [library, Path("/usr/share/doc"), Path("/usr/share/perl"), Path("/usr/share/common-licenses")]
    parts, total = [], 0
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else []:
            wanted = path.suffix in (".py", ".rst", ".txt", ".md", ".pod", ".pm", "")
            skipped = {"site-packages", "__pycache__", "dist-packages", "test", "tests"} & set(path.parts)
            if not wanted or skipped or not path.is_file() or path.stat().st_size > 1 << 20:
                continue
            content = path.read_bytes()
            if b"\0" in content[:4096]:
                continue
            parts.append(content + b"\0")
            total += len(content)
            if total >= max_bytes:
                return b"".join(parts)
    return b"".join(parts)


def write_text(options: argparse.Namespace) -> None:
    text = collect_text(options.max_text)
    options.out.write_bytes(lzma.compress(text, preset=9))
    print(
        f"{len(text) / 1e6:.1f} MB of text, {options.out.stat().st_size / 1e6:.1f} MB compressed, at {options.out}"
    )


def read_text(options: argparse.Namespace) -> bytes:
    if options.text is None:
        return collect_text(options.max_text)
    return lzma.decompress(options.text.read_bytes())[: options.max_text]


# -- one run ----------------------------------------------------------------------------------------------


def as_received(codec: CodecName, values_KN: Tensor) -> Tensor:
    """Returns the values after encoding and decoding, row by row, as shoal.diloco.codec does."""
    if codec == "fp32":
        return values_KN
    if codec == "fp16":
        return values_KN.clamp(-65504.0, 65504.0).half().float()
    num, block = values_KN.shape[1], BLOCK[codec]
    blocks = torch.nn.functional.pad(values_KN, (0, -num % block)).view(len(values_KN), -1, block)
    largest = blocks.abs().amax(-1, keepdim=True)
    if codec == "fp16-scaled":
        scales = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), largest.frexp()[1] - 15), 1.0)
        return ((blocks / scales).half().float() * scales).view(len(values_KN), -1)[:, :num]
    scales = largest / LARGEST[codec]
    coded = (blocks / torch.where(scales > 0, scales, 1.0)).round()
    return (coded * scales).view(len(values_KN), -1)[:, :num]


def mean_received(codec: CodecName, deltas_KN: Tensor) -> Tensor:
    """Returns what every peer has after an exchange: each row encoded, summed in order, the sum encoded once."""
    share = torch.tensor(1 / len(deltas_KN), dtype=torch.float32)
    received = as_received(codec, deltas_KN)
    total_N = received[0] * share
    for row_N in received[1:]:
        total_N += row_N * share
    return as_received(codec, total_N[None])[0]


OUTER_METHODS = {
    "nesterov": Outer(),
    "heavy": Outer(lr=0.3, momentum=0.9, nesterov=False),
    "average": Outer(lr=1.0, momentum=0.0, nesterov=False),
    "adam": Outer(lr=0.3, momentum=0.9, nesterov=False),
}
"""The outer optimizers that the DiLoCo paper compares, with its rates."""
ADAM_SECOND, ADAM_EPS = 0.95, 0.1
"""Outer Adam's second-moment decay and epsilon; the DiLoCo paper found that it needs a large epsilon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run, parsed from its name."""

    name: str
    every: int = 0
    """H; 0 for `dp` and `one`."""
    codec: CodecName = "fp32"
    fragments: int = 1
    overlap: int = 0
    outer: Outer = field(default_factory=Outer)
    method: str = "nesterov"
    """The outer optimizer: nesterov, heavy (heavy-ball momentum), average (plain averaging) or adam."""
    scale: float = 1.0
    rows: int = 4
    """Workers of the run."""

    @classmethod
    def read(cls, name: str) -> "Plan":
        """Parses a run's name; raises ValueError with the name and the grammar if it does not fit."""
        match = re.fullmatch(r"(?:(\d+)x)?([^~@]+)(?:~(\w+))?(?:@([\d.,e-]+))?", name)
        if match is None or (match[3] or "nesterov") not in OUTER_METHODS:
            raise ValueError(
                f"run {name!r}: write dp, one or [WORKERSx]H:CODEC[~METHOD][@LR,MOMENTUM[,SCALE]]"
            )
        rows, word, method = int(match[1] or 4), match[2], match[3] or "nesterov"
        numbers = [float(each) for each in match[4].split(",")] if match[4] else []
        if word in ("dp", "one"):
            return cls(name=name, rows=1 if word == "one" else rows, scale=numbers[0] if numbers else 1.0)
        parts = word.split(":")
        return cls(
            name=name,
            rows=rows,
            method=method,
            every=int(parts[0]),
            codec=parts[1],  # type: ignore[arg-type]
            fragments=int(parts[2]) if len(parts) > 2 else 1,
            overlap=int(parts[3]) if len(parts) > 2 else 0,
            outer=Outer(lr=numbers[0], momentum=numbers[1]) if numbers else OUTER_METHODS[method],
            scale=numbers[2] if len(numbers) > 2 else 1.0,
        )


@dataclass
class Run:
    """The rows of the stack that belong to one run, and its outer state."""

    plan: Plan
    rows: slice
    stack: Stack
    points: list[tuple[int, float]] = field(default_factory=list)
    sent_bytes: float = 0.0
    rounds: int = 0

    def __post_init__(self) -> None:
        self.columns = self.stack.llama.fragments(self.plan.fragments)
        self.base = self.stack.weights[self.rows.start].clone()
        self.momentum = torch.zeros_like(self.base)
        self.second = torch.zeros_like(self.base) if self.plan.method == "adam" else self.base[:0]
        self._in_flight: tuple[int, Tensor] | None = None

    @property
    def published(self) -> Tensor:
        """The weights that the run would publish."""
        return self.base if self.plan.every else self.stack.weights[self.rows.start]

    @torch.no_grad()
    def after_step(self, step: int) -> bool:
        """Starts or completes a round if one is due; returns whether it wrote weights."""
        plan, wrote = self.plan, False
        if not plan.every:
            self.sent_bytes += 1.5 * 4 * len(self.base) if plan.rows > 1 else 0
            return False
        if self._in_flight is not None and step - self._in_flight[0] >= plan.overlap:
            self._complete_round(self._in_flight[1])
            wrote = True
        if step % (plan.every // plan.fragments) == 0:
            columns = self.columns[self.rounds % plan.fragments]
            own = self._read(self.stack.weights[self.rows], columns)
            mean = mean_received(plan.codec, self._read(self.base[None], columns) - own)
            self.sent_bytes += 2 * (plan.rows - 1) / plan.rows * coded_bytes(plan.codec, len(mean))
            self._in_flight = step, mean
            if not plan.overlap:
                self._complete_round(mean)
                wrote = True
        return wrote

    def _read(self, rows_KN: Tensor, columns: list[slice]) -> Tensor:
        return rows_KN if self.plan.fragments == 1 else torch.cat([rows_KN[:, part] for part in columns], 1)

    def _complete_round(self, mean_N: Tensor) -> None:
        rate, mu = np.float32(self.plan.outer.lr).item(), np.float32(self.plan.outer.momentum).item()
        at = 0
        for part in self.columns[self.rounds % self.plan.fragments]:
            mean = mean_N[at : at + part.stop - part.start]
            at += len(mean)
            self._outer_step(part, mean, rate, mu)
            own = self.stack.weights[self.rows, part]
            own.copy_(
                own * MIX + self.base[part] * (1 - MIX)
                if self.plan.overlap
                else self.base[part].expand_as(own)
            )
        self.rounds += 1
        self._in_flight = None

    def _outer_step(self, part: slice, mean: Tensor, rate: float, mu: float) -> None:
        momentum = self.momentum[part]
        if self.plan.method == "adam":
            momentum.mul_(mu).add_(mean * (1 - mu))
            self.second[part] = self.second[part] * ADAM_SECOND + mean * mean * (1 - ADAM_SECOND)
            first = momentum / (1 - mu ** (self.rounds + 1))
            second = self.second[part] / (1 - ADAM_SECOND ** (self.rounds + 1))
            self.base[part] -= rate * first / (second.sqrt() + ADAM_EPS)
            return
        momentum.mul_(mu).add_(mean)
        self.base[part] -= (momentum * mu + mean if self.plan.method == "nesterov" else momentum) * rate


# -- all of them --------------------------------------------------------------------------------------------


class Comparison:
    """Trains all runs of a comparison together, on the same text and from the same weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.plans = [Plan.read(name) for name in options.runs]
        hidden, layers, heads, ffn = PRESETS[options.preset]
        self.llama = Llama(hidden=hidden, layers=layers, heads=heads, ffn=ffn, sequence=options.sequence)
        self.dtype = torch.bfloat16 if options.bf16 else torch.float32
        text = np.frombuffer(read_text(options), np.uint8)
        cut = len(text) - max(len(text) // 50, 64 * (options.sequence + 1))
        held = Samples(text[cut:].astype(np.uint32), sequence=options.sequence, peer="validation", seed=0)
        held_out = held.take(min(held.num_samples, options.eval_samples))
        self.held_out = torch.from_numpy(held_out.astype(np.uint8)).to(options.device)
        self.num_text, self._cut = len(text), cut
        self.text = torch.from_numpy(text[:cut].copy()).to(options.device)

    def _num_rows(self) -> int:
        """Returns the length of the tables that a step reads from, which must also cover the timed steps."""
        return max(TIMED + 2, int(self.options.steps + self.options.warm_steps))

    def _starts(self) -> Tensor:
        """Returns where each worker's samples begin at each step."""
        options = self.options
        count, starts = self._num_rows(), []
        for worker in range(max(plan.rows for plan in self.plans)):
            nothing = np.broadcast_to(
                np.uint32(0), self._cut
            )  # only the samples' positions are used, not their tokens
            samples = Samples(nothing, sequence=options.sequence, peer=f"worker-{worker}", seed=options.seed)
            starts.append(np.asarray(samples.starts(count * options.batch)).reshape(count, options.batch))
        return torch.from_numpy(np.stack(starts, 1)).to(options.device)

    def _write_rates(self, steps: int) -> None:
        options, count = self.options, steps + self.options.warm_steps
        rates = [learning_rate(options.lr, step, options.warmup_steps, count) for step in range(count)]
        self.rates[:count] = torch.tensor(rates, device=options.device)

    def _stack(self, weights_N: Tensor, plans: list[Plan], *, compiled: bool) -> Stack:
        rows, mean_of, scales = 0, [], []
        workers: list[int] = []
        for plan in plans:
            if "dp" in plan.name:
                mean_of.append(slice(rows, rows + plan.rows))
            workers += range(plan.rows)
            scales += [plan.scale] * plan.rows
            rows += plan.rows
        return Stack(
            self.llama,
            weights_N.expand(rows, -1).clone(),
            text=self.text,
            starts_SWB=self.starts,
            worker_K=workers,
            rates_S=self.rates,
            scale_K=scales,
            mean_of=mean_of,
            dtype=self.dtype,
            compiled=compiled,
            graph=not self.options.no_graph,
        )

    def prepare(self) -> tuple[Stack, int]:
        """Returns the stack of all rows after the warm-up steps, and the number of steps that fit the budget."""
        options, steps = self.options, self.options.steps
        self.starts = self._starts()
        self.rates = torch.zeros(self._num_rows(), device=options.device)
        first_N = self.llama.first_weights(options.seed).to(options.device)
        stack = self._stack(first_N, self.plans, compiled=options.compile)
        if options.budget_s:
            seconds = _time_steps(stack)
            fit = int(options.budget_s / seconds)
            steps = max(options.round_to, min(steps, fit) // options.round_to * options.round_to)
            print(f"{1000 * seconds:.1f} ms a step, {steps} steps", flush=True)
        self._write_rates(steps)
        # One worker takes the warm-up steps; all runs start from its weights.
        warm = self._stack(first_N, [Plan(name="one", rows=1)], compiled=False)
        self.alone_s = _time_steps(warm)
        warm.restart(first_N[None])
        for _ in range(options.warm_steps):
            warm.step()
        stack.restart(warm.weights)
        stack.first.copy_(warm.first.expand_as(stack.first))
        stack.second.copy_(warm.second.expand_as(stack.second))
        stack.at.copy_(warm.at)
        return stack, steps

    def train(self) -> list[Run]:
        options = self.options
        stack, steps = self.prepare()
        runs, at = [], 0
        for plan in self.plans:
            runs.append(Run(plan, slice(at, at + plan.rows), stack))
            at += plan.rows
        started_s = time.monotonic()
        for step in range(1, steps + 1):
            stack.step()
            wrote = [run.after_step(step) for run in runs]
            if any(wrote):
                stack.refresh()
            if step % max(1, steps // options.points) == 0 or step == steps:
                self._validate(runs, step, started_s)
        self.wall_s, self.steps = time.monotonic() - started_s, steps
        return runs

    def _validate(self, runs: list[Run], step: int, started_s: float) -> None:
        rows = torch.stack([run.published for run in runs])
        batch = max(1, 1_300_000 // self.llama.hidden // len(rows))
        for run, loss in zip(
            runs, validation_losses(self.llama, rows, self.held_out, batch, self.dtype), strict=True
        ):
            run.points.append((step, loss))
        summary = " ".join(f"{run.plan.name} {run.points[-1][1]:.4f}" for run in runs)
        print(f"step {step} ({time.monotonic() - started_s:.0f} s): {summary}", flush=True)
        if self.options.json:
            self.options.json.write_text(json.dumps([record(self.options, run) for run in runs]))


def record(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    return {
        "preset": options.preset,
        "seed": options.seed,
        "run": run.plan.name,
        "rounds": run.rounds,
        "sent_bytes": run.sent_bytes,
        "points": run.points,
    }


def _time_steps(stack: Stack) -> float:
    stack.step()
    stack.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started_s = time.monotonic()
    for _ in range(TIMED):
        stack.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.monotonic() - started_s) / TIMED


def curves(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    comparison = Comparison(options)
    million = comparison.llama.num_values / 1e6
    print(
        f"{million:.2f}M parameters, {comparison.num_text / 1e6:.1f} MB of text, {sum(plan.rows for plan in comparison.plans)} "
        f"workers, {options.batch} x {options.sequence} bytes each a step, seed {options.seed}",
        flush=True,
    )
    runs = comparison.train()
    table(runs, comparison.steps, comparison.alone_s)
    print(
        f"{comparison.wall_s:.0f} s for all workers together; {1000 * comparison.alone_s:.2f} ms a step for one alone"
    )
    if options.plot:
        plot([record(options, run) for run in runs], options.plot, f"{million:.1f}M parameters")


def table(runs: list[Run], steps: int, alone_s: float) -> None:
    """Prints the results. Wall time is computed: one worker's steps alone on this device, plus its bytes over the link."""
    parallel = next((run for run in runs if "dp" in run.plan.name), None)
    print(
        f"\n{'run':<24}{'rounds':>7}{'validation':>11}{'against dp':>12}{'MB sent':>12}{'fewer bytes':>13}"
        f"{'s at 1 Gbit/s':>15}{'at 100 Mbit/s':>15}"
    )
    for run in runs:
        last = run.points[-1][1]
        against = f"{100 * (last / parallel.points[-1][1] - 1):+.2f} %" if parallel else ""
        fewer = f"{parallel.sent_bytes / run.sent_bytes:.0f}x" if parallel and run.sent_bytes else ""
        wall_s = [steps * alone_s + 8 * run.sent_bytes / rate for rate in (1e9, 1e8)]
        print(
            f"{run.plan.name:<24}{run.rounds if run.plan.every else steps:>7}{last:>11.4f}{against:>12}{run.sent_bytes / 1e6:>12.1f}{fewer:>13}"
            f"{wall_s[0]:>15.0f}{wall_s[1]:>15.0f}"
        )


def draw(options: argparse.Namespace) -> None:
    """Plots the curves of one preset from files written with `--json`."""
    records = [each for path in options.files for each in json.loads(path.read_text())]
    wanted = [each for each in records if each["preset"] == options.preset and each["seed"] == options.seed]
    plot(wanted, options.out, f"{options.preset[:-1]}M parameters")


def plot(records: list[dict[str, Any]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for each in records:
        axes.plot(*zip(*each["points"], strict=True), label=each["run"])
    axes.set_xlabel("inner step")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
