"""DiLoCo: what it costs in loss and saves in bytes, how links fill, how it takes churn. Seeded; CPU or CUDA.

    python bench/diloco.py curves --preset 0.1m --steps 2000 --runs dp one 20:fp32 100:int8      (minutes, CPU)
    python bench/diloco.py curves --preset 10m --steps 10000 --warm-steps 500 --device cuda \\
        --runs dp one 20:fp32 100:fp32 100:fp16 100:int8 125:int8 500:fp32 100:int8:4:5 --plot docs/img/diloco-10m.png
    python bench/diloco.py links                          utilisation against H at 10, 100, 1000 Mbit/s
    python bench/diloco.py rounds --num 2000 --peers 3    fault-free rounds of real Hivemind peers: wrong ones
    python bench/diloco.py churn --peers 6                kill -9 two in mid-round, two join

A run is `dp` (synchronous data parallel, the same tokens), `one` (one worker, a share of the tokens) or
`H:codec[:fragments:overlap]`. Workers are simulated in turn, with the real outer step, codecs and sums. The text is that of the running
Python's own library and of the documentation on the machine, as bytes: 256 tokens, no tokenizer.
"""

import argparse
import asyncio
import copy
import functools
import json
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.diloco.averager import Ready
from shoal.diloco.codec import CodecName, coded_bytes, decode, encode, reduce_chunk
from shoal.diloco.data import Samples
from shoal.diloco.flat import Fragment, fragments_of
from shoal.diloco.language import next_token_loss, validation_loss
from shoal.diloco.mesh import LocalHub, LocalMesh, Stream
from shoal.diloco.outer import Outer, OuterState, Vector, first_state, outer_step
from shoal.diloco.part import chunk_bounds
from shoal.diloco.peers import PeerAverager, Terms
from shoal.diloco.rounds import take_round
from shoal.diloco.site import learning_rate
from shoal.model.builtin import _draw_weights
from shoal.model.load import empty_decoder
from shoal.model.shape import Shape
from shoal.telemetry import Log

PEER = Path(__file__).parents[1] / "tests" / "diloco" / "hivemind_peer.py"

# hidden, layers, heads, ffn: about 0.12M, 1M, 10M and 135M parameters with 256 tokens.
PRESETS = {
    "0.1m": (64, 2, 2, 192),
    "1m": (160, 4, 4, 384),
    "10m": (320, 8, 5, 896),
    "135m": (768, 18, 12, 2304),
}


def collect_text(max_bytes: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Python's own sources and documentation, then what the system's packages document; in a fixed order."""
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
            parts.append(np.frombuffer(content + b"\0", np.uint8))
            total += len(content)
            if total >= max_bytes:
                return np.concatenate(parts).astype(np.uint32)
    return np.concatenate(parts).astype(np.uint32)


def make_model(preset: str, sequence: int, seed: int, device: str) -> nn.Module:
    hidden, layers, heads, ffn = PRESETS[preset]
    shape = Shape(
        vocab_size=256,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=ffn,
        rope_theta=10000.0,
        norm_eps=1e-5,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        max_positions=sequence + 1,
        eos_token_ids=(0,),
    )
    decoder = empty_decoder(shape)
    _draw_weights(decoder, seed)
    return decoder.to(device)


class Worker:
    """One simulated site: a model, its AdamW and its own order of the data."""

    def __init__(self, options: argparse.Namespace, model: nn.Module, tokens: Any, peer: str) -> None:
        self.options, self.model = options, model
        self.inner = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.samples = Samples(tokens, sequence=options.sequence, peer=peer, seed=options.seed)

    def step(self, step: int, num_samples: int) -> float:
        options = self.options
        rate = learning_rate(options.lr, step, options.warmup_steps, options.warm_steps + options.steps)
        for group in self.inner.param_groups:
            group["lr"] = rate
        total = 0.0
        for at in range(0, num_samples, options.micro_batch):
            num = min(options.micro_batch, num_samples - at)
            rows = torch.from_numpy(self.samples.take(num)).to(options.device)
            with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.bf16):
                loss = next_token_loss(self.model, rows) * (num / num_samples)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner.step()
        self.inner.zero_grad()
        return float(total)


@dataclass
class Curve:
    name: str
    points: list[tuple[int, float]]
    sent_bytes: float
    wall_s: float


def average(deltas: list[Vector], codec: CodecName) -> Vector:
    """What the peers' exchange computes, chunk for chunk."""
    result = np.empty_like(deltas[0])
    for start, end in chunk_bounds(0, len(result)):
        coded = [encode(codec, delta[start:end]) for delta in deltas]
        summed = reduce_chunk(codec, coded, [1.0] * len(deltas), end - start)
        result[start:end] = decode(codec, summed, end - start)
    return result


class Simulated:
    """K workers in turn, one outer state."""

    def __init__(self, workers: list[Worker], name: str) -> None:
        words = name.split(":")
        self.every, self.codec = int(words[0]), words[1]
        self.fragments, self.overlap = (int(words[2]), int(words[3])) if len(words) > 2 else (1, 0)
        self.workers = workers
        self.parts: list[list[Fragment]] = [fragments_of(worker.model, self.fragments) for worker in workers]
        self.state: OuterState = first_state(tuple(part.read() for part in self.parts[0]))
        self.flight: tuple[int, Vector] | None = None
        self.sent_bytes = 0.0

    def after_step(self, step: int) -> None:
        if self.flight is not None and step - self.flight[0] >= self.overlap:
            self._land(self.flight[1])
        if step % (self.every // self.fragments) == 0:
            at, codec = self.state.fragment, self.codec
            base = self.state.bases[at]
            mean = average([base - parts[at].read() for parts in self.parts], codec)  # type: ignore[arg-type]
            share = 2 * (len(self.workers) - 1) / len(self.workers)
            self.sent_bytes += share * coded_bytes(codec, len(base))  # type: ignore[arg-type]
            self.flight = step, mean
            if not self.overlap:
                self._land(mean)

    def _land(self, mean: Vector) -> None:
        at = self.state.fragment
        self.state = outer_step(self.state, mean, Outer(), work=1.0)
        for parts in self.parts:
            new = self.state.bases[at]
            parts[at].write(
                parts[at].read() * np.float32(0.5) + new * np.float32(0.5) if self.overlap else new
            )
        self.flight = None

    def global_loss(self, evaluate: Callable[[nn.Module], float]) -> float:
        """Of the shared weights: what a run would publish."""
        kept = [part.read() for part in self.parts[0]]
        for part, base in zip(self.parts[0], self.state.bases, strict=True):
            part.write(base)
        loss = evaluate(self.workers[0].model)
        for part, own in zip(self.parts[0], kept, strict=True):
            part.write(own)
        return loss


def train_curve(options: argparse.Namespace, name: str, start: dict[str, Any], data: Any) -> Curve:
    tokens, held_out = data
    model = make_model(options.preset, options.sequence, options.seed, options.device)
    model.load_state_dict(start["model"])
    num = sum(p.numel() for p in model.parameters())
    evaluate = functools.partial(
        validation_loss, tokens_NT=held_out, batch=options.micro_batch, device=options.device
    )
    simulate = name not in ("dp", "one")
    workers = [
        Worker(options, copy.deepcopy(model), tokens, f"worker-{at}")
        for at in range(options.workers if simulate else 1)
    ]
    for worker in workers:
        worker.inner.load_state_dict(copy.deepcopy(start["inner"]))
    swarm = Simulated(workers, name) if simulate else None
    batch = options.batch * (options.workers if name == "dp" else 1)
    curve = Curve(name, [], 0.0, 0.0)
    started_s = time.monotonic()
    for step in range(1, options.steps + 1):
        for worker in workers:
            worker.step(options.warm_steps + step - 1, batch)
        if swarm is not None:
            swarm.after_step(step)
        if step % options.eval_every == 0 or step == options.steps:
            loss = swarm.global_loss(evaluate) if swarm else evaluate(workers[0].model)
            curve.points.append((step, loss))
            print(
                f"  {name} step {step} validation {loss:.4f} ({time.monotonic() - started_s:.0f} s)",
                flush=True,
            )
    curve.wall_s = time.monotonic() - started_s
    share = 2 * (options.workers - 1) / options.workers
    curve.sent_bytes = (
        swarm.sent_bytes if swarm else (share * 4 * num * options.steps if name == "dp" else 0.0)
    )
    return curve


def curves(options: argparse.Namespace) -> None:
    text = collect_text(options.max_text)
    cut = len(text) - max(len(text) // 50, 64 * (options.sequence + 1))
    held = Samples(text[cut:], sequence=options.sequence, peer="validation", seed=0)
    data = text[:cut], held.take(min(held.num_samples, options.eval_samples))
    model = make_model(options.preset, options.sequence, options.seed, options.device)
    num = sum(p.numel() for p in model.parameters())
    print(
        f"{num / 1e6:.2f}M parameters, {len(text) / 1e6:.1f} MB of text, {options.workers} workers, seed {options.seed}"
    )
    warm = Worker(options, model, data[0], "warm")
    for step in range(options.warm_steps):
        warm.step(step, options.batch)
    start = {"model": model.state_dict(), "inner": warm.inner.state_dict()}
    done = [train_curve(options, name, start, data) for name in options.runs]
    parallel = next((curve for curve in done if curve.name == "dp"), None)
    print(f"\n{'run':<14}{'validation':>11}{'against dp':>12}{'MB sent':>12}{'fewer bytes':>13}{'wall s':>9}")
    for curve in done:
        last = curve.points[-1][1]
        against = f"{100 * (last / parallel.points[-1][1] - 1):+.2f} %" if parallel else ""
        fewer = f"{parallel.sent_bytes / curve.sent_bytes:.0f}x" if parallel and curve.sent_bytes else ""
        print(
            f"{curve.name:<14}{last:>11.4f}{against:>12}{curve.sent_bytes / 1e6:>12.1f}{fewer:>13}{curve.wall_s:>9.0f}"
        )
    if options.plot:
        plot(done, options.plot, f"{num / 1e6:.1f}M parameters, {options.workers} workers")


def plot(done: list[Curve], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for curve in done:
        axes.plot(*zip(*curve.points, strict=True), label=curve.name)
    axes.set_xlabel("inner step")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


# -- links ------------------------------------------------------------------------------------------------


class ShapedStream(Stream):
    """Sends no faster than its peer's uplink, which all its streams share."""

    def __init__(self, stream: Stream, uplink: "Uplink") -> None:
        super().__init__(stream._reader, stream._writer)
        self._uplink = uplink

    async def send(self, payload: bytes, digest: bytes | None = None) -> None:
        await asyncio.sleep(self._uplink.reserve(len(payload) + 36))
        await super().send(payload, digest)


class Uplink:
    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at_s = bytes_per_s, 0.0

    def reserve(self, num_bytes: int) -> float:
        now_s = time.monotonic()
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
        return self._free_at_s - now_s


class ShapedMesh(LocalMesh):
    def __init__(self, hub: LocalHub, peer: str, bytes_per_s: float) -> None:
        super().__init__(hub, peer, reachable=True)
        self._uplink = Uplink(bytes_per_s)

    def _keep(self, stream: Stream) -> Stream:
        return super()._keep(ShapedStream(stream, self._uplink))


def one_site(
    averager: PeerAverager, options: argparse.Namespace, every: int, overlap: int
) -> tuple[float, float]:
    """Compute (slept) and wall seconds of a site over `options.rounds` rounds of `every` steps of `options.step_ms`."""
    delta = np.random.default_rng(1).standard_normal(options.values).astype(np.float32)
    state = first_state((delta[:8],))
    digest = averager.serve(state, step=0)
    compute_s, started_s, flight = 0.0, time.monotonic(), None
    with ThreadPoolExecutor(1) as pool:
        for _ in range(options.rounds):
            for step in range(every):
                if flight is not None and step == overlap:
                    flight.result()
                    flight = None
                time.sleep(options.step_ms / 1000)
                compute_s += options.step_ms / 1000
            ready = Ready(round=state.round, work=state.work, digest=digest, weight=1.0)
            state = outer_step(state, np.zeros(8, np.float32), Outer(), work=2.0)

            def exchange(ready: Ready = ready, state: OuterState = state) -> str:
                log, stop = Log("bench"), threading.Event()
                result = take_round(averager, ready, delta, deadline_s=600, log=log, stop=stop)
                assert result.outcome.name == "COMMITTED", result.reasons
                return averager.serve(state, step=0)

            digest = state.digest()
            flight = pool.submit(exchange)
            if not overlap:
                flight.result()
                flight = None
        if flight is not None:
            flight.result()
    return compute_s, time.monotonic() - started_s


def links(options: argparse.Namespace) -> None:
    coded = coded_bytes(options.codec, options.values)
    print(
        f"{options.values / 1e6:.1f}M values as {options.codec} ({coded / 1e6:.1f} MB), {options.peers} peers,"
    )
    print(
        f"inner steps of {options.step_ms} ms (slept), {options.rounds} rounds; utilisation = compute / wall"
    )
    print(f"{'Mbit/s':>7}{'H':>6}{'blocking':>10}{'overlapped':>12}   (tau = H - 1)")
    for mbit in options.mbit:
        for every in options.every:
            row = []
            for overlap in (0, every - 1):
                hub = LocalHub()
                peers = [
                    PeerAverager(
                        ShapedMesh(hub, f"peer-{at}", mbit * 125_000),
                        log=Log("bench"),
                        codec=options.codec,
                        terms=Terms(min_peers=options.peers, gather_s=600, stall_s=300),
                    )
                    for at in range(options.peers)
                ]
                for peer in peers:
                    peer.join(deadline_s=10)
                with ThreadPoolExecutor(options.peers) as pool:
                    jobs = [pool.submit(one_site, peer, options, every, overlap) for peer in peers]
                    times = [job.result() for job in jobs]
                for peer in peers:
                    peer.leave()
                row.append(sum(compute for compute, _ in times) / sum(wall for _, wall in times))
            print(f"{mbit:>7}{every:>6}{100 * row[0]:>9.1f}%{100 * row[1]:>11.1f}%", flush=True)


# -- real peers -------------------------------------------------------------------------------------------


def start_peer(**task: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, str(PEER), json.dumps(task)], stdout=subprocess.PIPE, text=True)


def lines_of(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def rounds(options: argparse.Namespace) -> None:
    task = {
        "rounds": options.num,
        "peers": options.peers,
        "num_values": options.values,
        "codec": options.codec,
    }
    started_s = time.monotonic()
    first = start_peer(join=[], seed=0, **task)
    address = next(lines_of(first))["addresses"]
    others = [start_peer(join=address, seed=at, **task) for at in range(1, options.peers)]
    with ThreadPoolExecutor(options.peers) as pool:
        said = list(pool.map(lambda process: list(lines_of(process)), [first, *others]))
    ended = [[line for line in each if line["event"] == "round"] for each in said]
    wrong = sum(not line["right"] for each in ended for line in each)
    retried = sum(line["attempts"] > 1 for line in ended[0])
    alone = sum(line["outcome"] != "COMMITTED" for each in ended for line in each)
    differ = sum(len({each[at]["state"] for each in ended}) > 1 for at in range(min(map(len, ended))))
    print(
        f"{len(ended[0])} rounds, {options.peers} Hivemind peers, {options.values} values as {options.codec}: "
        f"{wrong} wrong averages committed, {differ} rounds after which states differ, {retried} retried, "
        f"{alone} taken alone; {time.monotonic() - started_s:.0f} s"
    )


def churn(options: argparse.Namespace) -> None:
    end = Path(tempfile.mkdtemp()) / "end"
    task = {
        "rounds": 10_000,
        "end": str(end),
        "num_values": options.values,
        "codec": options.codec,
        "deadline_s": options.deadline_s,
        "min_peers": 2,
        "pause_s": 0.3,
    }
    first = start_peer(join=[], seed=0, peers=options.peers, **task)
    said = lines_of(first)
    address = next(said)["addresses"]
    rest = [
        start_peer(join=address, seed=at, peers=options.peers, **task) for at in range(1, options.peers - 2)
    ]
    doomed = [
        start_peer(join=address, seed=options.peers - 2 + at, peers=options.peers, die_in_round=4, **task)
        for at in range(2)
    ]
    while next(said).get("round", 0) < 5:
        pass
    joined = [start_peer(join=address, seed=10 + at, peers=2, **task) for at in range(2)]
    began = [
        next(line["round"] for line in lines_of(process) if line["event"] == "round") for process in joined
    ]
    end.with_suffix(".new").write_text(str(max(began) + options.num))
    end.with_suffix(".new").rename(end)
    with ThreadPoolExecutor(16) as pool:
        ended = list(pool.map(lambda process: list(lines_of(process)), [first, *rest, *joined]))
    for process in doomed:
        process.wait(60)
    took = [line for each in ended for line in each if line["event"] == "round"]
    print(
        f"{options.peers} peers, two killed in round 4, two joined; {len(took)} rounds seen by those that lived"
    )
    print(
        f"  wrong averages {sum(not line['right'] for line in took)}, longest round {max(line['took_s'] for line in took):.1f} s"
    )
    print(f"  states at the end: {len({each[-1].get('state') for each in ended})} different one(s)")
    for each in ended:
        print(
            "  ",
            [
                (line["round"], line["peers"], line["took_s"], line["attempts"])
                for line in each
                if line["event"] == "round"
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(required=True)
    one = actions.add_parser("curves")
    one.add_argument("--preset", choices=PRESETS, default="0.1m")
    one.add_argument("--workers", type=int, default=4)
    one.add_argument("--steps", type=int, default=2000)
    one.add_argument("--warm-steps", type=int, default=100)
    one.add_argument("--warmup-steps", type=int, default=50)
    one.add_argument("--batch", type=int, default=8, help="samples per worker and step")
    one.add_argument("--micro-batch", type=int, default=64)
    one.add_argument("--sequence", type=int, default=128)
    one.add_argument("--lr", type=float, default=2e-3)
    one.add_argument("--runs", nargs="+", default=["dp", "one", "20:fp32", "100:fp32", "100:int8"])
    one.add_argument("--eval-every", type=int, default=200)
    one.add_argument("--eval-samples", type=int, default=256)
    one.add_argument("--max-text", type=int, default=64 << 20)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--device", default="cpu")
    one.add_argument("--bf16", action="store_true", help="autocast; weights stay float32")
    one.add_argument("--plot", type=Path)
    one.set_defaults(action=curves)
    two = actions.add_parser("links")
    two.add_argument("--values", type=int, default=1_000_000)
    two.add_argument("--peers", type=int, default=2)
    two.add_argument("--codec", default="int8")
    two.add_argument("--step-ms", type=float, default=20.0)
    two.add_argument("--rounds", type=int, default=3)
    two.add_argument("--every", type=int, nargs="+", default=[20, 100, 500])
    two.add_argument("--mbit", type=int, nargs="+", default=[10, 100, 1000])
    two.set_defaults(action=links)
    three = actions.add_parser("rounds")
    four = actions.add_parser("churn")
    for action, values, num in ((three, 10_000, 2000), (four, 2_000_000, 12)):
        action.add_argument(
            "--num", type=int, default=num, help="rounds; for churn, after the newcomers' first"
        )
        action.add_argument("--values", type=int, default=values)
        action.add_argument("--codec", default="fp32")
        action.add_argument("--peers", type=int, default=3 if action is three else 6)
    four.add_argument("--deadline-s", type=float, default=30.0)
    three.set_defaults(action=rounds)
    four.set_defaults(action=churn)
    options = parser.parse_args()
    options.action(options)


if __name__ == "__main__":
    main()
