"""Compares loss curves of DiLoCo, data parallel and one worker, in one batched model. See `bench/diloco.py curves`.

A run is `dp` (synchronous data parallel, the same tokens), `one` (one worker, its share of the tokens) or
`[Kx]H:codec[:fragments:overlap[:mix]][~method][@outer_lr,momentum[,inner_lr_scale]][!condition]...` with K workers (4 unless said;
also `8xdp`). Codecs, sums and outer steps give the same values as shoal.diloco (a test compares them), on the device of the
workers. Conditions: `!drop0.3` (each worker misses a round with probability 0.3 and continues from its own weights),
`!from4` and `!to4` (4 workers in the first or the second half of the run), `!uneven` (each worker reads its own part of the text;
with a file of `text --domains` and 4 workers that is one domain each).
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
from shoal.files import write_bytes_atomically

# hidden, layers, heads, ffn: about 0.12M, 1M, 10M and 135M parameters with a vocabulary of 256.
PRESETS = {
    "0.1m": (64, 2, 2, 192),
    "0.1m-deep": (48, 4, 2, 128),  # four layers, so that there can be four fragments
    "1m": (160, 4, 5, 384),
    "10m": (320, 8, 5, 896),
    "135m": (768, 18, 12, 2304),
}
TIMED = 20
"""Steps that are timed to compute how many fit a budget."""
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t with 1, 2, ... degrees of freedom."""
MIX = 0.5
"""Share of a fragment's own values that is kept when an overlapped round completes, unless the run's name says another."""
DOMAINS = {
    "C": ("/usr/include", ".h"),
    "documents": ("/usr/share/doc", ".md"),
    "Perl": ("/usr/share/perl", ".pm"),
    "Python": (sysconfig.get_paths()["stdlib"], ".py"),
}
"""Folder and suffix of the files of each domain of `text --domains`."""
HELD_OUT_SHARE = 50
"""One part in this many of the text, at its end, is held out."""


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


def collect_domains(max_bytes: int) -> bytes:
    """Returns equal amounts of every domain, files in a seeded random order: the domains, then the held-out end of each."""
    num_bytes = max_bytes // len(DOMAINS)
    parts, held_out = [], []
    for name, (root, suffix) in DOMAINS.items():
        paths = sorted(path for path in Path(root).rglob(f"*{suffix}") if path.is_file())
        np.random.default_rng(0).shuffle(paths)
        content, total = [], 0
        for path in paths:
            if total < num_bytes and path.stat().st_size < 1 << 18:
                content.append(path.read_bytes() + b"\0")
                total += len(content[-1])
        if total < num_bytes:
            raise SystemExit(
                f"{name}: {root} has {total} bytes of {suffix} files, lower --max-text to {4 * total}"
            )
        domain = b"".join(content)[:num_bytes]
        cut = num_bytes - num_bytes // HELD_OUT_SHARE
        parts.append(domain[:cut])
        held_out.append(domain[cut:])
    return b"".join(parts + held_out)


def write_text(options: argparse.Namespace) -> None:
    text = (collect_domains if options.domains else collect_text)(options.max_text)
    options.out.write_bytes(lzma.compress(text, preset=options.level))
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
"""The kinds of outer optimizers that the DiLoCo paper compares. Nesterov has its rate; the rates of the others are ours."""
ADAM_SECOND, ADAM_EPS = 0.95, 0.1
"""Outer Adam's second-moment decay and epsilon. With a small epsilon every value would move by the whole rate in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run, parsed from its name."""

    name: str
    every: int = 0
    """H; 0 for `dp` and `one`."""
    codec: CodecName = "fp32"
    fragments: int = 1
    overlap: int = 0
    mix: float = MIX
    outer: Outer = field(default_factory=Outer)
    method: str = "nesterov"
    """The outer optimizer: nesterov, heavy (heavy-ball momentum), average (plain averaging) or adam."""
    scale: float = 1.0
    rows: int = 4
    """Workers of the run."""
    drop: float = 0.0
    """Probability that a worker misses a round."""
    first_half: int = 0
    """Workers that take part in the first half of the run; 0 for all."""
    second_half: int = 0
    uneven: bool = False
    """Whether each worker reads its own contiguous part of the text."""

    @classmethod
    def read(cls, name: str) -> "Plan":
        """Parses a run's name; raises ValueError with the name and the grammar if it does not fit."""
        word, *conditions = name.split("!")
        match = re.fullmatch(r"(?:(\d+)x)?([^~@]+)(?:~(\w+))?(?:@([\d.,e-]+))?", word)
        known = all(re.fullmatch(r"drop0?\.\d+|from\d+|to\d+|uneven", each) for each in conditions)
        if match is None or not known or (match[3] or "nesterov") not in OUTER_METHODS:
            raise ValueError(
                f"run {name!r}: write dp, one or [WORKERSx]H:CODEC[~METHOD][@LR,MOMENTUM[,SCALE]]"
                "[!dropP][!fromK][!toK][!uneven]"
            )
        rows, word, method = int(match[1] or 4), match[2], match[3] or "nesterov"
        numbers = [float(each) for each in match[4].split(",")] if match[4] else []
        if word in ("dp", "one"):
            return cls(name=name, rows=1 if word == "one" else rows, scale=numbers[0] if numbers else 1.0)
        parts = word.split(":")
        given = {key: text for each in conditions for key, text in re.findall(r"([a-z]+)(.*)", each)}
        return cls(
            name=name,
            rows=rows,
            method=method,
            drop=float(given.get("drop", 0)),
            first_half=int(given.get("from", 0)),
            second_half=int(given.get("to", 0)),
            uneven="uneven" in given,
            every=int(parts[0]),
            codec=parts[1],  # type: ignore[arg-type]
            fragments=int(parts[2]) if len(parts) > 2 else 1,
            overlap=int(parts[3]) if len(parts) > 2 else 0,
            mix=float(parts[4]) if len(parts) > 4 else MIX,
            outer=Outer(lr=numbers[0], momentum=numbers[1]) if numbers else OUTER_METHODS[method],
            scale=numbers[2] if len(numbers) > 2 else 1.0,
        )


@dataclass
class Run:
    """The rows of the stack that belong to one run, and its outer state."""

    plan: Plan
    rows: slice
    stack: Stack
    num_steps: int = 0
    """Steps of the whole run, for plans whose number of workers changes half-way."""
    seed: int = 0
    points: list[tuple[int, float]] = field(default_factory=list)
    sent_bytes: float = 0.0
    rounds: int = 0

    def __post_init__(self) -> None:
        self.columns = self.stack.llama.fragments(self.plan.fragments)
        self.base = self.stack.weights[self.rows.start].clone()
        self.momentum = torch.zeros_like(self.base)
        self.second = torch.zeros_like(self.base) if self.plan.method == "adam" else self.base[:0]
        self._in_flight: tuple[int, Tensor] | None = None
        self._draw = np.random.default_rng([self.seed, 77])
        self._missed = torch.zeros(self.plan.rows, dtype=torch.bool)

    def _choose_workers(self, step: int) -> Tensor:
        """Returns which workers take part in the round that starts now, and notes which members of the pool miss it."""
        plan = self.plan
        size = (plan.first_half if 2 * step <= self.num_steps else plan.second_half) or plan.rows
        dropped = self._draw.random(size) < plan.drop
        dropped[0] &= not dropped.all()
        missed = np.zeros(plan.rows, bool)
        missed[:size] = dropped
        self._missed = torch.from_numpy(missed).to(self.base.device)
        return ~self._missed & (torch.arange(plan.rows, device=self.base.device) < size)

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
            own = self._read(self.stack.weights[self.rows][self._choose_workers(step)], columns)
            mean = mean_received(plan.codec, self._read(self.base[None], columns) - own)
            self.sent_bytes += 2 * (len(own) - 1) / plan.rows * coded_bytes(plan.codec, len(mean))
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
            new = (
                own * self.plan.mix + self.base[part] * (1 - self.plan.mix)
                if self.plan.overlap
                else self.base[part].expand_as(own)
            )
            # A worker that missed the round keeps its own weights. One outside the pool takes the shared ones, so that it has
            # them when it joins.
            own.copy_(torch.where(self._missed[:, None], own, new))
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
        cut = len(text) - max(len(text) // HELD_OUT_SHARE, 64 * (options.sequence + 1))
        held = Samples(text[cut:].astype(np.uint32), sequence=options.sequence, peer="validation", seed=0)
        held_out = held.take(min(held.num_samples, options.eval_samples))
        self.held_out = torch.from_numpy(held_out.astype(np.uint8)).to(options.device)
        self.num_text, self._cut = len(text), cut
        self.text = torch.from_numpy(text[:cut].copy()).to(options.device)

    def _num_rows(self) -> int:
        """Returns the length of the tables that a step reads from, which must also cover the timed steps."""
        return max(TIMED + 2, int(self.options.steps + self.options.warm_steps))

    @property
    def _max_workers(self) -> int:
        return max(plan.rows for plan in self.plans)

    def _starts(self) -> Tensor:
        """Returns where each worker's samples begin at each step: all workers of even runs, then those of uneven ones."""
        options = self.options
        workers, count = self._max_workers, self._num_rows()
        parts = [(0, self._cut)] * workers
        if uneven := [plan.rows for plan in self.plans if plan.uneven]:
            if len(set(uneven)) > 1:
                raise SystemExit(
                    f"uneven runs of {sorted(set(uneven))} workers: compare them one number at a time"
                )
            share = self._cut // uneven[0]
            parts += [(share * worker, share) for worker in range(uneven[0])]
        starts = []
        for worker, (first, length) in enumerate(parts):
            nothing = np.broadcast_to(np.uint32(0), length)  # only positions are used, not tokens
            samples = Samples(nothing, sequence=options.sequence, peer=f"worker-{worker}", seed=options.seed)
            table = np.asarray(samples.starts(count * options.batch)).reshape(count, options.batch)
            starts.append(first + table)
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
            first = self._max_workers if plan.uneven else 0
            workers += range(first, first + plan.rows)
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
            runs.append(Run(plan, slice(at, at + plan.rows), stack, num_steps=steps, seed=options.seed))
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
            write_records(self.options, runs)


def read_records(path: Path | None) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path is not None and path.exists() else []


def write_records(options: argparse.Namespace, runs: list[Run]) -> None:
    """Replaces the records of these runs and this seed in the file of `--json` and keeps the others."""
    new = [record(options, run) for run in runs]
    names = {(one["run"], one["seed"]) for one in new}
    kept = [one for one in read_records(options.json) if (one["run"], one["seed"]) not in names]
    write_bytes_atomically(options.json, json.dumps(kept + new).encode())


def runs_left(options: argparse.Namespace) -> list[str]:
    """Returns the runs that the file of `--json` does not have to their end, so that a killed command can be repeated."""
    ended = {
        one["run"]
        for one in read_records(options.json)
        if one["seed"] == options.seed and one["points"][-1][0] == options.steps
    }
    return [name for name in options.runs if name not in ended]


def record(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    return {
        "preset": options.preset,
        "seed": options.seed,
        "run": run.plan.name,
        "rounds": run.rounds,
        "sent_bytes": run.sent_bytes,
        "points": [(step, round(loss, 6)) for step, loss in run.points],
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
    options.runs = runs_left(options)
    if not options.runs:
        print(f"{options.json} has every run of seed {options.seed}")
        return
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The last losses of a run against those of another, paired by seed."""

    losses_S: np.ndarray[tuple[int], np.dtype[np.float64]]
    percent_S: np.ndarray[tuple[int], np.dtype[np.float64]]
    half: float
    """Half of the 95 % interval of the mean difference, by Student's t; NaN for one seed."""


def difference(records: list[dict[str, Any]], name: str, against: str) -> Difference:
    last = {(each["run"], each["seed"]): each["points"][-1] for each in records}
    seeds = sorted(seed for run, seed in last if run == name and (against, seed) in last)
    steps = {last[run, seed][0] for run in (name, against) for seed in seeds}
    if len(steps) > 1:
        raise SystemExit(f"{name} and {against} ended at different steps: {sorted(steps)}")
    losses_S = np.array([last[name, seed][1] for seed in seeds])
    percent_S = 100 * (losses_S / np.array([last[against, seed][1] for seed in seeds]) - 1)
    half = np.nan
    if 2 <= len(seeds) <= len(STUDENT_95) + 1:
        half = STUDENT_95[len(seeds) - 2] * percent_S.std(ddof=1) / len(seeds) ** 0.5
    return Difference(losses_S=losses_S, percent_S=percent_S, half=float(half))


def compare(options: argparse.Namespace) -> None:
    """Prints the last losses of runs against one of them, paired by seed, with 95 % intervals of the mean difference."""
    records = [each for path in options.files for each in json.loads(path.read_text())]
    names = list(dict.fromkeys(each["run"] for each in records))
    if options.against not in names:
        raise SystemExit(f"--against {options.against}: no such run; the files have {', '.join(names)}")
    print(f"{'run':<32}{'seeds':>6}{'loss':>9}{f'against {options.against}':>24}{'95 % interval':>22}")
    for name in names:
        found = difference(records, name, options.against)
        mean, interval = found.percent_S.mean(), ""
        if np.isfinite(found.half) and name != options.against:
            interval = f"{mean - found.half:+.2f} to {mean + found.half:+.2f} %"
        print(
            f"{name:<32}{len(found.losses_S):>6}{found.losses_S.mean():>9.4f}{f'{mean:+.2f} %':>24}{interval:>22}"
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
