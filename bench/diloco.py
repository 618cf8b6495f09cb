"""Measures DiLoCo: loss against bytes sent, utilisation of slow links, churn. Seeded; CPU or CUDA.

    python bench/diloco.py curves --preset 0.1m --steps 2000 --runs dp one 20:fp32 100:int8      (minutes, CPU)
    python bench/diloco.py text --out text.xz             the text, compressed, for a machine without it
    python bench/diloco.py curves --preset 10m --steps 13000 --warm-steps 500 --lr 1e-3 --device cuda --bf16 --compile \\
        --runs dp one 20:fp32 100:fp32 100:fp16 100:int8 127:int8 67:int4 500:fp32 --plot docs/img/diloco-10m.png
    python bench/diloco.py compare seed0.json seed1.json --against 100:fp32       paired differences with intervals
    python bench/diloco.py links                          utilisation against H at 10, 100, 1000 Mbit/s
    python bench/diloco.py wan --json wan.json            four unequal links with latency and losses, scaled from OpenDiLoCo's
    python bench/diloco.py rounds --num 2000 --peers 3    counts wrong averages in fault-free rounds of real Hivemind peers
    python bench/diloco.py churn --peers 6 [--engine torchft]   kill -9 two peers in a round, two join
    python bench/diloco.py processes --size 1.1b --device cuda --micro 2   whole sites in processes: bytes, seconds, memory, digests

A run is `dp` (synchronous data parallel, the same tokens), `one` (one worker, a share of the tokens) or
`H:codec[:fragments:overlap][@outer_lr,momentum]`; bench/curves.py has the whole grammar, with other outer optimizers, missed rounds,
changing pools and uneven data. All workers are one batched model, with the real outer step, codecs and
sums. The text is the running Python's standard library and the machine's documentation, as bytes: 256 tokens, no tokenizer.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from child import Child, children, obey
from curves import PRESETS, collect_text, compare, curves, draw, read_records, write_text
from throttle import LOSS_S, PIECE_BYTES

from shoal.diloco.averaging.averager import AveragerSettings, FetchedState, Ready
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.codec import coded_bytes
from shoal.diloco.optimizer import DiLoCo, RoundReport, Schedule
from shoal.diloco.outer import Outer, OuterState, first_state, outer_step
from shoal.diloco.rounds import take_round
from shoal.diloco.site.language import Samples, next_token_loss
from shoal.diloco.transport.hivemind_mesh import HivemindMesh, PeerAddress
from shoal.diloco.transport.mesh import Handler, LocalHub, LocalMesh, Mesh
from shoal.diloco.transport.stream import Stream, StreamBroken
from shoal.files import write_bytes_atomically
from shoal.model.decoder import Decoder
from shoal.model.load_model import empty_decoder
from shoal.telemetry import Log

PEER = Path(__file__).parents[1] / "tests" / "diloco" / "hivemind_peer.py"

# -- links ------------------------------------------------------------------------------------------------


class ShapedStream(Stream):
    """A stream with the bandwidth, latency and losses of its peer's uplink, which all of the peer's streams share."""

    def __init__(self, stream: Stream, uplink: "Uplink") -> None:
        # `stream` has already taken over the connection: share its protocol, and only delay sending.
        self._writer, self._frames, self.num_sent = stream._writer, stream._frames, 0
        self.peer = stream.peer
        self._uplink = uplink
        self._underway: asyncio.Future[None] | None = None

    async def send(self, payload: bytes | memoryview | bytearray, digest: bytes | None = None) -> None:
        await asyncio.sleep(self._uplink.reserve(len(payload) + 36))
        delay_s = self._uplink.delay_s(len(payload))
        if not delay_s and self._underway is None:
            await super().send(payload, digest)
            return
        # The sender continues while its frames are under way; they arrive in order.
        self._underway = asyncio.ensure_future(self._deliver(self._underway, delay_s, bytes(payload), digest))

    async def _deliver(
        self, previous: "asyncio.Future[None] | None", delay_s: float, payload: bytes, digest: bytes | None
    ) -> None:
        due_s = time.monotonic() + delay_s
        if previous is not None:
            await previous
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        # If the receiver is gone, the error reaches the peer that waits for its answer.
        with contextlib.suppress(StreamBroken):
            await super().send(payload, digest)

    def close(self) -> None:
        if self._underway is None or self._underway.done():
            super().close()
        else:  # what was sent still arrives, as with TCP
            self._underway.add_done_callback(lambda _: super(ShapedStream, self).close())


class Uplink:
    """A link of limited bandwidth. Lost pieces are sent again after the same time as in throttle.Link."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        self._bytes_per_s, self._free_at_s = bytes_per_s, 0.0
        self._latency_s, self._loss, self._rng = latency_s, loss, np.random.default_rng(seed)

    def delay_s(self, num_bytes: int) -> float:
        """Returns the seconds from sending to arriving: the latency, and a timeout and two latencies per lost piece."""
        num_lost = self._rng.binomial(-(-num_bytes // PIECE_BYTES), self._loss)
        return self._latency_s + int(num_lost) * (LOSS_S + 2 * self._latency_s)

    def reserve(self, num_bytes: int) -> float:
        """Returns the seconds to wait before these bytes have been sent."""
        now_s = time.monotonic()
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
        return self._free_at_s - now_s


class ShapedMesh(LocalMesh):
    """A local mesh whose streams are limited to one uplink."""

    def __init__(self, hub: LocalHub, peer: str, uplink: Uplink) -> None:
        super().__init__(hub, peer, reachable=True)
        self._uplink = uplink

    def _register(self, stream: Stream) -> Stream:
        return super()._register(ShapedStream(stream, self._uplink))


def one_site(
    averager: PeerAverager, options: argparse.Namespace, every: int, overlap: int
) -> tuple[float, float]:
    """Returns compute (slept) and wall seconds of a site over `options.rounds` rounds of `every` steps of `options.step_ms`."""
    delta = np.random.default_rng(1).standard_normal(options.values).astype(np.float32)
    state = first_state((delta[:8],))
    digest = averager.serve(state, step=0)
    compute_s, started_s, pending = 0.0, time.monotonic(), None
    with ThreadPoolExecutor(1) as pool:
        for _ in range(options.rounds):
            for step in range(every):
                if pending is not None and step == overlap:
                    pending.result()
                    pending = None
                began_s = time.monotonic()
                time.sleep(options.step_ms / 1000)
                compute_s += (
                    time.monotonic() - began_s
                )  # a busy machine sleeps too long, which is not the network's
            ready = Ready(round=state.round, work=state.work, digest=digest, weight=1.0)
            state = outer_step(state, np.zeros(8, np.float32), Outer(), work=2.0)

            def exchange(ready: Ready = ready, state: OuterState = state) -> str:
                log, stop = Log("bench"), threading.Event()
                result = take_round(averager, ready, delta, deadline_s=600, log=log, stop=stop)
                assert result.outcome.name == "COMMITTED", result.reasons
                return averager.serve(state, step=0)

            digest = state.digest()
            pending = pool.submit(exchange)
            if not overlap:
                pending.result()
                pending = None
        if pending is not None:
            pending.result()
    return compute_s, time.monotonic() - started_s


def shaped_peers(options: argparse.Namespace, uplinks: list[Uplink]) -> list[PeerAverager]:
    hub = LocalHub()
    terms = AveragerSettings(min_peers=len(uplinks), gather_s=600, stall_s=300)
    peers = [
        PeerAverager(
            ShapedMesh(hub, f"peer-{at}", uplink), log=Log("bench"), codec=options.codec, settings=terms
        )
        for at, uplink in enumerate(uplinks)
    ]
    for peer in peers:
        peer.join(deadline_s=10)
    return peers


def links(options: argparse.Namespace) -> None:
    """Measures rounds and whole sites on shaped links, and computes from them what the papers' models would get."""
    sent = 2 * (options.peers - 1) / options.peers * coded_bytes(options.codec, options.values)
    print(
        f"{options.values / 1e6:.1f}M values as {options.codec}, {sent / 1e6:.2f} MB sent by each of {options.peers} peers,"
    )
    print(
        f"inner steps of {options.step_ms:g} ms (slept), {options.rounds} rounds; compute / wall, as measured"
    )
    print(
        f"{'Mbit/s':>7}{'round s':>9}{'of the link':>12}{'H':>6}{'blocking':>10}{'formula':>9}{'overlapped':>12}"
    )
    shares = {}
    for mbit in options.mbit:
        took_s = time_rounds(options, mbit, options.values)
        # A large vector, so that the fixed time of a round (forming the group, voting) does not count.
        large = int(125_000 * mbit * (1.0 if mbit <= 100 else 0.25))
        ideal_s = 2 * (options.peers - 1) / options.peers * coded_bytes(options.codec, large) / 125_000 / mbit
        shares[mbit] = min(1.0, ideal_s / time_rounds(options, mbit, large))
        for every in options.every:
            row = [
                measure_sites(options, [Uplink(mbit * 125_000) for _ in range(options.peers)], every, overlap)
                for overlap in (0, every - 1)
            ]
            inner_s = every * options.step_ms / 1000
            print(
                f"{mbit:>7}{took_s:>9.3f}{100 * shares[mbit]:>11.0f}%{every:>6}{100 * row[0]:>9.1f}%"
                f"{100 * inner_s / (inner_s + took_s):>8.1f}%{100 * row[1]:>11.1f}%",
                flush=True,
            )
    compute_links(options, shares)


def time_rounds(options: argparse.Namespace, mbit: int, num_values: int) -> float:
    """Returns the median seconds of a round without other traffic."""
    peers = shaped_peers(options, [Uplink(mbit * 125_000) for _ in range(options.peers)])
    delta = np.random.default_rng(1).standard_normal(num_values, np.float32)
    state = first_state((delta[:8],))
    took = []
    with ThreadPoolExecutor(options.peers) as pool:
        for _ in range(options.rounds):
            digests = [peer.serve(state, step=0) for peer in peers]
            ready = Ready(round=state.round, work=state.work, digest=digests[0], weight=1.0)
            jobs = [
                pool.submit(
                    take_round, peer, ready, delta, deadline_s=600, log=Log("bench"), stop=threading.Event()
                )
                for peer in peers
            ]
            took.append(max(job.result().took_s for job in jobs))
            state = outer_step(state, delta[:8], Outer(), work=2.0)
    for peer in peers:
        peer.leave()
    return float(np.median(took))


def measure_sites(options: argparse.Namespace, uplinks: list[Uplink], every: int, overlap: int) -> float:
    peers = shaped_peers(options, uplinks)
    with ThreadPoolExecutor(len(uplinks)) as pool:
        jobs = [pool.submit(one_site, peer, options, every, overlap) for peer in peers]
        times = [job.result() for job in jobs]
    for peer in peers:
        peer.leave()
    return sum(compute for compute, _ in times) / sum(wall for _, wall in times)


def wan(options: argparse.Namespace) -> None:
    """Measures the utilisation of four sites with unequal links, for every latency, loss and seed that the file lacks."""
    found = read_records(options.json)
    keys = ("latency_ms", "loss", "overlap", "rounds", "seed")
    known = {tuple(one[key] for key in keys) for one in found}
    wanted = itertools.product(
        options.latency_ms, options.loss, options.overlap, [options.rounds], options.seeds
    )
    cells = [cell for cell in wanted if cell not in known]
    lock = threading.Lock()

    def measure(cell: tuple[float, float, int, int, int]) -> None:
        latency_ms, loss, overlap, _, seed = cell
        uplinks = [
            Uplink(mbit * 125_000, latency_ms / 1000, loss, seed=100 * seed + at)
            for at, mbit in enumerate(options.uplinks)
        ]
        share = measure_sites(options, uplinks, options.every, overlap)
        with lock:
            found.append({**dict(zip(keys, cell, strict=True)), "utilisation": round(share, 5)})
            write_bytes_atomically(options.json, json.dumps(found).encode())

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(measure, cells))
    sent = 2 * (len(options.uplinks) - 1) / len(options.uplinks) * coded_bytes(options.codec, options.values)
    inner_s = options.every * options.step_ms / 1000
    ideal_s = sent / 125_000 / min(options.uplinks)
    print(
        f"{options.values / 1e6:.1f}M values as {options.codec}, {sent / 1e6:.2f} MB sent by each peer, uplinks of "
        f"{options.uplinks} Mbit/s, {inner_s:.1f} s of steps (slept) and {ideal_s:.2f} s at the slowest link per round: "
        f"{inner_s / (inner_s + ideal_s):.1%} by the formula"
    )
    print(f"{'latency ms':>10}{'loss':>8}{'overlap':>9}{'rounds':>8}{'seed':>6}{'utilisation':>13}")
    for one in sorted(found, key=lambda one: [one[key] for key in keys]):
        print(
            f"{one['latency_ms']:>10g}{one['loss']:>8g}{one['overlap']:>9}{one['rounds']:>8}{one['seed']:>6}"
            f"{one['utilisation']:>13.1%}"
        )


PAPERS = (
    # name, parameters, seconds a step, peers
    ("10M", 10e6, 0.1, 4),
    ("150M", 150e6, 1.0, 4),
    ("OpenDiLoCo's 1.1B", 1.1e9, 8.1, 4),
)
FRAGMENTS, OVERLAP = 4, 5


def compute_links(options: argparse.Namespace, shares: dict[int, float]) -> None:
    """Computes T_compute / (T_compute + T_wait) from a round's bytes and the measured share of the link's bandwidth."""
    print(
        f"\ncomputed, with {options.codec} and the share of the link measured above; blocking / streaming "
        f"({FRAGMENTS} fragments, tau {OVERLAP})"
    )
    heads = "".join(f"{f'H = {every}':>18}" for every in options.every)
    print(f"{'model':<20}{'s a step':>9}{'Mbit/s':>8}{'round s':>9}{heads}{'90 % at H':>11}{'95 %':>8}")
    for name, parameters, step_s, peers in PAPERS:
        for mbit in options.mbit:
            sent = 2 * (peers - 1) / peers * coded_bytes(options.codec, int(parameters))
            round_s = sent * 8 / 1e6 / mbit / shares[mbit]
            cells = []
            for every in options.every:
                streamed = FRAGMENTS * max(0.0, round_s / FRAGMENTS - OVERLAP * step_s)
                both = [every * step_s / (every * step_s + wait_s) for wait_s in (round_s, streamed)]
                cells.append(f"{100 * both[0]:>8.1f} / {100 * both[1]:5.1f}%".rjust(18))
            reach = [int(np.ceil(share / (1 - share) * round_s / step_s)) for share in (0.9, 0.95)]
            print(
                f"{name:<20}{step_s:>9g}{mbit:>8}{round_s:>9.1f}{''.join(cells)}{reach[0]:>11}{reach[1]:>8}"
            )
    print(
        "The papers: OpenDiLoCo 67.5 min of compute and 300 s of averaging in fp16 per 500 steps at 127 to 935 Mbit/s: "
        f"{4050 / 4350:.1%} by the same formula, 90 to 95 % reported; INTELLECT-1 95.7 % in one country, 83.0 % around the world."
    )


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
        outputs = list(pool.map(lambda process: list(lines_of(process)), [first, *others]))
    ended = [[line for line in each if line["event"] == "round"] for each in outputs]
    wrong = sum(not line["right"] for each in ended for line in each)
    retried = sum(line["attempts"] > 1 for line in ended[0])
    alone = sum(line["outcome"] != "COMMITTED" for each in ended for line in each)
    differ = sum(len({each[at]["state"] for each in ended}) > 1 for at in range(min(map(len, ended))))
    print(
        f"{len(ended[0])} rounds, {options.peers} Hivemind peers, {options.values} values as {options.codec}: "
        f"{wrong} wrong averages committed, {differ} rounds after which states differ, {retried} retried, "
        f"{alone} taken alone; {time.monotonic() - started_s:.0f} s"
    )


class Lighthouse:
    """torchft's rendezvous server in its own process."""

    def __init__(self, options: argparse.Namespace) -> None:
        words = ["diloco", "swarm", "--engine", "torchft", "--port", "0", "--dir", tempfile.mkdtemp()]
        words += ["--min-peers", "2", "--gather-s", str(options.gather_s)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.addresses = [self.process.stdout.readline().split()[1]]


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
        "engine": options.engine,
    }
    lighthouse = Lighthouse(options) if options.engine == "torchft" else None
    first = start_peer(join=lighthouse.addresses if lighthouse else [], seed=0, peers=options.peers, **task)
    said = lines_of(first)
    address = lighthouse.addresses if lighthouse else next(said)["addresses"]
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
    if lighthouse is not None:
        lighthouse.process.terminate()
        lighthouse.process.wait(60)
    took = [line for each in ended for line in each if line["event"] == "round"]
    print(
        f"{options.engine}: {options.peers} peers, two killed in round 4, two joined; {len(took)} rounds reported by the survivors"
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


# -- whole sites in processes -----------------------------------------------------------------------------

SIZES = {
    # vocabulary, hidden, layers, heads, key-value heads, ffn
    "toy": (256, 64, 2, 4, 2, 176),
    "60m": (32000, 640, 6, 10, 2, 1760),
    "0.6b": (32000, 2048, 11, 32, 4, 5632),
    "1.1b": (32000, 2048, 22, 32, 4, 5632),  # TinyLlama's
}


class LoopbackMesh:
    """A mesh over TCP between processes of one machine, for where Hivemind is not installed. The directory is a folder."""

    reachable = True

    def __init__(self, folder: Path, peer: str) -> None:
        self._folder, self.peer = folder, peer
        self.addresses: tuple[str, ...] = (str(folder),)
        self._server: asyncio.Server | None = None

    async def start(self, handler: Handler) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = (await reader.readline()).decode().strip()
            with contextlib.closing(Stream(reader, writer, peer=peer)) as stream:
                await handler(stream)

        self._server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        write_bytes_atomically(self._folder / f"{self.peer}.port", str(port).encode())

    async def open(self, peer: str, *, bulk: bool = False) -> Stream:
        try:
            port = int((self._folder / f"{peer}.port").read_text())
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            raise StreamBroken(f"{peer}: {error}") from None
        writer.write(f"{self.peer}\n".encode())
        return Stream(reader, writer, peer=peer)

    def mark_broken(self, peer: str) -> None:
        """Does nothing: there is only one route."""

    async def announce(self, card: bytes, *, for_s: float) -> None:
        write_bytes_atomically(self._folder / f"{self.peer}.card", card)

    async def cards(self) -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in self._folder.glob("*.card")}

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()


class MetAverager(PeerAverager):
    """Finds the other sites before the optimizer joins: it would download the state of one that is earlier, which is its own."""

    def begin_joining(self) -> None:
        super().join(deadline_s=60)

    def wait_for(self, num_others: int) -> None:
        while len(self.peers()) < num_others:
            time.sleep(0.1)

    def join(self, *, deadline_s: float, lengths: tuple[int, ...] | None = None) -> FetchedState | None:
        return None


def random_decoder(size: str, device: str) -> Decoder:
    """Returns a model of random weights, the same in every process on the same device."""
    from trainer import llama

    model = empty_decoder(llama(*SIZES[size], tied_embeddings=False, max_positions=2048), device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1)
    return model


class WholeSite:
    """One process: a model, its samples and its optimizer. It takes a round whenever it is told to."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        torch.set_num_threads(task["threads"])
        self._model = random_decoder(task["size"], task["device"])
        text = np.frombuffer(collect_text(1 << 22), np.uint8).astype(np.uint32)
        self._samples = Samples(text, sequence=task["sequence"], peer=f"site-{task['rank']}", seed=0)
        self.num_values = sum(one.numel() for one in self._model.parameters())
        self._reports: list[RoundReport] = []

    def act(self, line: str) -> dict[str, Any]:
        word, _, rest = line.partition(" ")
        return {"start": self._start, "meet": self._meet, "round": self._round}[word](
            *json.loads(rest or "[]")
        )

    def _start(self, *join: str) -> dict[str, Any]:
        """Opens this site's end of the network, and returns the addresses at which others join it."""
        task = self.task
        mesh: Mesh
        if task["mesh"] == "hivemind":
            mesh = HivemindMesh("bench", PeerAddress(join=join, host="127.0.0.1"))
        else:
            mesh = LoopbackMesh(Path(task["folder"]), f"site-{task['rank']}")
        terms = AveragerSettings(min_peers=task["peers"], gather_s=120.0, stall_s=60.0)
        self._averager = MetAverager(mesh, log=Log("bench"), codec=task["codec"], settings=terms)
        self._averager.begin_joining()
        return {"addresses": list(self._averager.addresses)}

    def _meet(self) -> dict[str, Any]:
        """Waits for the other sites and makes the optimizer, whose outer state is in main memory."""
        task = self.task
        self._averager.wait_for(task["peers"] - 1)
        inner = torch.optim.AdamW(
            self._model.parameters(),
            lr=4e-4,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=task["device"] != "cpu",
        )
        self._optimizer = DiLoCo(
            self._model,
            inner=inner,
            averager=self._averager,
            schedule=Schedule(inner_steps=task["every"], deadline_s=task["deadline_s"]),
        )
        self._optimizer.on_round = self._reports.append
        self._optimizer.join()
        return memory_of(task["device"])

    def _round(self) -> dict[str, Any]:
        """Takes the inner steps of one round and the round."""
        task, losses = self.task, []
        began_s = time.monotonic()
        for step in range(task["every"]):
            losses.append(self._backward())
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            if step == task["every"] - 1:
                ended_s = time.monotonic()
                host_before = memory_of(task["device"])["host_now"]
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again, at what is in use now
            self._optimizer.count_samples(task["batch"])
            self._optimizer.step()
            self._optimizer.zero_grad()
        report = self._reports[-1]
        result = report.result
        return {
            "site": task["rank"],
            "round": report.round,
            "outcome": result.outcome.name,
            "peers": len(result.members),
            "attempts": result.attempts,
            "reasons": result.reasons,
            "digest": report.state_digest,
            "sent_bytes": result.num_bytes,
            "inner_s": round(ended_s - began_s, 3),
            "exchange_s": round(result.took_s, 3),
            "still_s": round(time.monotonic() - ended_s, 3),
            "first_loss": round(losses[0], 4),
            "last_loss": round(losses[-1], 4),
            "host_before": host_before,
            **memory_of(task["device"]),
        }

    def _backward(self) -> float:
        """Returns the loss of a batch, whose gradient it adds."""
        task, loss = self.task, 0.0
        rows = torch.from_numpy(self._samples.take(task["batch"])).to(task["device"])
        for micro in rows.split(task["micro"]):
            with torch.autocast(torch.device(task["device"]).type, torch.bfloat16):
                part = next_token_loss(self._model, micro) * (len(micro) / task["batch"])
            part.backward()
            loss += float(part.detach())
        return loss


def memory_of(device: str) -> dict[str, Any]:
    """Returns what this process uses of main memory, its peak there and on a GPU, and what all processes use of the GPU now."""
    words = dict(re.findall(r"(\w+):\s+(\d+)", Path("/proc/self/status").read_text()))
    found = {"host_now": 1024 * int(words["VmRSS"]), "host_peak": 1024 * int(words["VmHWM"])}
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        found |= {"device_peak": torch.cuda.max_memory_reserved(), "device_used": total - free}
    return found


def host_used() -> tuple[int, int]:
    """Returns the bytes of main memory in use and the bytes that the machine has now."""
    words = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (1024 * int(words[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return total - free, total


def ask_all(sites: list[Child], line: str) -> list[dict[str, Any]]:
    """Gives every site the same command at once and returns their answers. If one ends, all are ended."""
    with ThreadPoolExecutor(len(sites)) as pool:
        answers: list[Future[dict[str, Any]]] = [pool.submit(site.ask, line) for site in sites]
        wait(answers, return_when=FIRST_EXCEPTION)
        if any(answer.done() and answer.exception() for answer in answers):
            for site in sites:
                site.close(kill=True)
    return [answer.result() for answer in answers]


def processes(options: argparse.Namespace) -> None:
    """Trains one model in several processes that average over the network, and prints what each round took."""
    started_s, records, most = time.monotonic(), [], [0, 0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            used, total = host_used()
            most[:] = max(most[0], used), max(most[1], total)

    threading.Thread(target=watch, daemon=True).start()
    before = host_used()[0]
    with tempfile.TemporaryDirectory() as folder, children(__file__) as start:
        given = {name: value for name, value in vars(options).items() if name not in ("action", "json")}
        sites = [
            start("site", json.dumps({**given, "folder": folder, "rank": rank}), wait=False)
            for rank in range(options.peers)
        ]
        num_values = sites[0].ready["num_values"]
        addresses = json.dumps(sites[0].ask("start")["addresses"])
        ask_all(sites[1:], f"start {addresses}")
        ask_all(sites, "meet")
        print(
            f"{num_values / 1e6:.1f}M values in {options.peers} processes over {options.mesh}, H = {options.every}, {options.codec}, "
            f"{options.batch} x {options.sequence} tokens a step; met after {time.monotonic() - started_s:.1f} s"
        )
        print(
            f"{'round':>5}{'outcome':>11}{'digests':>9}{'sent MB':>9}{'steps s':>9}{'exchange s':>12}{'still s':>9}"
            f"{'loss':>17}{'host GB':>9}{'device GB':>11}{'of all':>8}{'at s':>7}",
            flush=True,
        )
        took_s = 0.0
        for _ in range(options.rounds):
            if options.budget_s and time.monotonic() - started_s + 1.1 * took_s > options.budget_s:
                print(f"no time for another round within {options.budget_s:g} s")
                break
            began_s = time.monotonic()
            answers = ask_all(sites, "round")
            took_s = time.monotonic() - began_s
            records.append(answers)
            print_round(answers, time.monotonic() - started_s)
    ended.set()
    sent = np.mean([one["sent_bytes"] for answers in records for one in answers])
    parallel = 1.5 * 4 * num_values * options.every
    print(
        f"{sent / 1e6:.1f} MB sent by each site and round, {parallel / sent:.0f} times fewer than an fp32 all-reduce in every step; "
        f"main memory {most[0] / 1e9:.1f} GB at most, {before / 1e9:.1f} before, of {most[1] / 1e9:.1f}; "
        f"{time.monotonic() - started_s:.1f} s in all"
    )
    if options.json:
        facts = {"num_values": num_values, "host_used": most[0], "host_before": before, "host_total": most[1]}
        told = {name: value for name, value in given.items() if name != "json"}
        write_bytes_atomically(
            options.json, json.dumps({"options": told, **facts, "rounds": records}).encode()
        )
    if any(len({one["digest"] for one in answers}) > 1 for answers in records):
        sys.exit("the sites' states differ")


def print_round(answers: list[dict[str, Any]], at_s: float) -> None:
    """Prints one round: the slowest site's seconds, the largest site's bytes."""
    slowest = {
        name: max(one[name] for one in answers) for name in ("inner_s", "exchange_s", "still_s", "host_peak")
    }
    outcomes = {one["outcome"].lower() for one in answers}
    digests = {one["digest"][:7] for one in answers}
    device = [max(one.get(name, 0) for one in answers) / 1e9 for name in ("device_peak", "device_used")]
    losses = [np.mean([one[name] for one in answers]) for name in ("first_loss", "last_loss")]
    print(
        f"{answers[0]['round']:>5}{'/'.join(sorted(outcomes)):>11}{'/'.join(sorted(digests)):>9}"
        f"{max(one['sent_bytes'] for one in answers) / 1e6:>9.1f}{slowest['inner_s']:>9.2f}{slowest['exchange_s']:>12.2f}"
        f"{slowest['still_s']:>9.2f}{f'{losses[0]:.3f} to {losses[1]:.3f}':>17}{slowest['host_peak'] / 1e9:>9.2f}"
        f"{device[0]:>11.2f}{device[1]:>8.1f}{at_s:>7.1f}",
        flush=True,
    )
    for reason in sorted({reason for one in answers for reason in one["reasons"]}):
        print(f"      {reason}")


def main() -> None:
    if sys.argv[1:2] == ["--role"]:  # a site of `processes`
        site = WholeSite(json.loads(sys.argv[3]))
        obey({"num_values": site.num_values}, site.act)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(required=True)
    one = actions.add_parser("curves")
    one.add_argument("--preset", choices=PRESETS, default="0.1m")
    one.add_argument("--steps", type=int, default=2000)
    one.add_argument("--budget-s", type=float, default=0.0, help="lower --steps to fit this time")
    one.add_argument(
        "--round-to",
        type=int,
        default=500,
        help="with a budget: round the number of steps down to a multiple of this",
    )
    one.add_argument("--warm-steps", type=int, default=100, help="by one worker, before all runs")
    one.add_argument("--warmup-steps", type=int, default=50)
    one.add_argument("--batch", type=int, default=8, help="samples per worker and step")
    one.add_argument("--sequence", type=int, default=128)
    one.add_argument("--lr", type=float, default=2e-3)
    one.add_argument("--runs", nargs="+", default=["dp", "one", "20:fp32", "100:fp32", "100:int8"])
    one.add_argument("--points", type=int, default=20, help="validation losses during training")
    one.add_argument("--eval-samples", type=int, default=256)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--device", default="cpu")
    one.add_argument("--bf16", action="store_true", help="matrix products in bfloat16; weights stay float32")
    one.add_argument("--compile", action="store_true")
    one.add_argument("--no-graph", action="store_true", help="CUDA without graphs")
    one.add_argument(
        "--text", type=Path, help="a file of `text`; without it the text is collected from this machine"
    )
    one.add_argument("--max-text", type=int, default=64 << 20)
    one.add_argument(
        "--json",
        type=Path,
        help="file for the curves as numbers, updated during training; runs that it has are not repeated",
    )
    one.add_argument("--plot", type=Path)
    one.set_defaults(action=curves)
    drawn = actions.add_parser("plot")
    drawn.add_argument("files", type=Path, nargs="+")
    drawn.add_argument("--preset", choices=PRESETS, required=True)
    drawn.add_argument("--seed", type=int, default=0)
    drawn.add_argument("--out", type=Path, required=True)
    drawn.set_defaults(action=draw)
    compared = actions.add_parser("compare")
    compared.add_argument(
        "files", type=Path, nargs="+", help="written by `curves --json`, one or more seeds each"
    )
    compared.add_argument("--against", default="dp", help="the run that the others are compared with")
    compared.set_defaults(action=compare)
    packed = actions.add_parser("text")
    packed.add_argument("--out", type=Path, required=True)
    packed.add_argument("--max-text", type=int, default=64 << 20)
    packed.add_argument(
        "--domains", action="store_true", help="equal parts of C, documents, Perl and Python, in this order"
    )
    packed.add_argument("--level", type=int, default=9, help="of the compression; lower is faster")
    packed.set_defaults(action=write_text)
    two = actions.add_parser("links")
    two.add_argument("--values", type=int, default=1_000_000)
    two.add_argument("--peers", type=int, default=2)
    two.add_argument("--codec", default="int8")
    two.add_argument("--step-ms", type=float, default=20.0)
    two.add_argument("--rounds", type=int, default=3)
    two.add_argument("--every", type=int, nargs="+", default=[20, 100, 500])
    two.add_argument("--mbit", type=int, nargs="+", default=[10, 100, 1000])
    two.set_defaults(action=links)
    far = actions.add_parser("wan")
    far.add_argument("--values", type=int, default=1_100_000)
    far.add_argument(
        "--uplinks", type=float, nargs="+", default=[12.7, 24.7, 48.0, 93.5], help="Mbit/s of each peer"
    )
    far.add_argument("--codec", default="fp16-scaled")
    far.add_argument("--every", type=int, default=10)
    far.add_argument("--step-ms", type=float, default=4050.0, help="slept")
    far.add_argument("--rounds", type=int, default=2)
    far.add_argument("--latency-ms", type=float, nargs="+", default=[0.0, 20.0, 50.0, 150.0], help="one way")
    far.add_argument("--loss", type=float, nargs="+", default=[0.0, 0.01], help="share of pieces of 16 KiB")
    far.add_argument("--overlap", type=int, nargs="+", default=[0], help="steps during which a round may run")
    far.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    far.add_argument("--at-once", type=int, default=4, help="cells that are measured at the same time")
    far.add_argument(
        "--json", type=Path, required=True, help="cells that the file has are not measured again"
    )
    far.set_defaults(action=wan)
    three = actions.add_parser("rounds")
    four = actions.add_parser("churn")
    for action, values, num in ((three, 10_000, 2000), (four, 2_000_000, 12)):
        action.add_argument(
            "--num", type=int, default=num, help="rounds; for churn, after the new peers' first"
        )
        action.add_argument("--values", type=int, default=values)
        action.add_argument("--codec", default="fp32")
        action.add_argument("--peers", type=int, default=3 if action is three else 6)
    four.add_argument("--deadline-s", type=float, default=30.0)
    four.add_argument("--engine", choices=["hivemind", "torchft"], default="hivemind")
    four.add_argument(
        "--gather-s", type=float, default=5.0, help="torchft: seconds that the lighthouse waits for all peers"
    )
    three.set_defaults(action=rounds)
    four.set_defaults(action=churn)
    whole = actions.add_parser("processes")
    whole.add_argument("--size", choices=SIZES, default="toy")
    whole.add_argument("--peers", type=int, default=4)
    whole.add_argument("--every", type=int, default=5, help="H")
    whole.add_argument("--rounds", type=int, default=3)
    whole.add_argument("--budget-s", type=float, default=0.0, help="start no round that would end later")
    whole.add_argument(
        "--deadline-s", type=float, default=60.0, help="after which a site takes a round alone"
    )
    whole.add_argument("--codec", default="fp16-scaled")
    whole.add_argument("--batch", type=int, default=4, help="samples of a site and step")
    whole.add_argument("--micro", type=int, default=4, help="samples of a forward pass")
    whole.add_argument("--sequence", type=int, default=128)
    whole.add_argument("--device", default="cpu")
    whole.add_argument("--threads", type=int, default=1, help="of each process, on the CPU")
    whole.add_argument("--mesh", choices=["hivemind", "loopback"], default="hivemind")
    whole.add_argument("--json", type=Path)
    whole.set_defaults(action=processes)
    options = parser.parse_args()
    options.action(options)


if __name__ == "__main__":
    main()
