"""Compares averaging between processes on loopback: Shoal's two engines, Hivemind's own averager, and plain gloo.

    python bench/averaging.py --mb 50 500 --peers 2 4 --repeats 3

Needs the extras `hivemind` and `torchft`. Every engine runs in its own processes, one engine after another; Shoal's
engines include comparing digests and the commit. Seconds are those of the slowest peer, the median over the repeats after
one warm-up round; every result is checked against the exact mean. CPU seconds per round are given for all peers with
their daemons, and for the peers' own processes alone: on a busy machine they are more reliable than wall time.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

ENGINES = tuple(
    ["gloo"]
    + [f"{name} {codec}" for name in ("torchft", "ours", "hivemind") for codec in ("fp32", "fp16", "int8")]
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[50])
    parser.add_argument("--peers", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1, help="repeat the sequence of all engines")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="timeout for one engine at one size")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        run_peer(json.loads(options.peer))
        return
    print(
        f"{'MB':>5}{'peers':>6}  {'engine':<15}{'median s':>9}{'CPU s':>8}{'own CPU s':>12}{'wrong':>7}{'same bits':>11}",
        flush=True,
    )
    for mb in options.mb:
        for num in options.peers:
            for engine in options.turns * options.engines:
                show(mb, num, engine, options)


def show(mb: int, num: int, engine: str, options: argparse.Namespace) -> None:
    task = {
        "engine": engine,
        "mb": mb,
        "num": num,
        "repeats": options.repeats + 1,
        "port": 20_000 + os.getpid() % 20_000,
    }
    first = start({**task, "rank": 0, "join": []})
    assert first.stdout is not None
    address = json.loads(first.stdout.readline())["addresses"]
    others = [start({**task, "rank": rank, "join": address}) for rank in range(1, num)]
    reports = []
    for process in (first, *others):
        try:
            out, _ = process.communicate(timeout=options.timeout_s)
            reports.append([json.loads(line) for line in out.splitlines() if "took_s" in line])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if len(reports) < num or any(len(lines) != options.repeats + 1 for lines in reports):
        print(f"{mb:>5}{num:>6}  {engine:<15}{'failed':>9}", flush=True)
        return
    took = [max(lines[at]["took_s"] for lines in reports) for at in range(1, options.repeats + 1)]
    wrong = sum(not line["right"] for lines in reports for line in lines)
    cpu_s = statistics.median(
        sum(lines[at]["cpu_s"] for lines in reports) for at in range(1, options.repeats + 1)
    )
    own_s = statistics.median(
        sum(lines[at]["own_cpu_s"] for lines in reports) for at in range(1, options.repeats + 1)
    )
    same = all(len({lines[at]["digest"] for lines in reports}) == 1 for at in range(options.repeats + 1))
    print(
        f"{mb:>5}{num:>6}  {engine:<15}{statistics.median(took):>9.3f}{cpu_s:>8.2f}{own_s:>12.2f}{wrong:>7}{'yes' if same else 'no':>11}",
        flush=True,
    )


def start(task: dict[str, Any]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, "--peer", json.dumps(task)], stdout=subprocess.PIPE, text=True
    )


def run_peer(task: dict[str, Any]) -> None:
    values = np.random.default_rng(task["rank"]).standard_normal(task["mb"] * 250_000, np.float32)
    # Every 997th value is checked against the exact mean.
    exact = np.mean(
        [
            np.random.default_rng(rank).standard_normal(len(values), np.float32)[::997]
            for rank in range(task["num"])
        ],
        axis=0,
    )
    kind = task["engine"].split()[0]
    {"gloo": run_gloo, "ours": run_ours, "torchft": run_torchft, "hivemind": run_hivemind}[kind](
        task, values, exact
    )


class Clock:
    """Measures wall and CPU seconds from its creation to `report`."""

    def __init__(self) -> None:
        self.cpu_s = tree_cpu_s()
        self.own_s, self.started_s = time.process_time(), time.monotonic()

    def report(self, result: Any, exact: Any) -> None:
        own_s = time.process_time() - self.own_s
        took_s, cpu_s = time.monotonic() - self.started_s, tree_cpu_s() - self.cpu_s
        result = np.ascontiguousarray(result)
        right = bool(np.abs(result[::997] - exact).max() < 0.1)
        digest = blake3(result.view(np.uint8).data).hexdigest()
        figures = {"took_s": took_s, "cpu_s": cpu_s, "own_cpu_s": own_s, "right": right, "digest": digest}
        print(json.dumps(figures), flush=True)


def tree_cpu_s() -> float:
    """Returns the CPU seconds of this process and its descendants."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(path.parent.name)] = int(words[1])
        ticks[int(path.parent.name)] = int(words[11]) + int(words[12])
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(ticks.get(pid, 0) for pid in below) / os.sysconf("SC_CLK_TCK")


def run_gloo(task: dict[str, Any], values: Any, exact: Any) -> None:
    import torch
    import torch.distributed as dist

    if task["rank"] == 0:
        print(json.dumps({"addresses": []}), flush=True)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{task['port']}", rank=task["rank"], world_size=task["num"]
    )
    for _ in range(task["repeats"]):
        tensor = torch.from_numpy(values.copy())
        dist.barrier()
        clock = Clock()
        dist.all_reduce(tensor)
        tensor /= task["num"]
        clock.report(tensor.numpy(), exact)
    dist.destroy_process_group()


def run_ours(task: dict[str, Any], values: Any, exact: Any) -> None:
    from shoal.diloco.averaging.averager import AveragerSettings
    from shoal.diloco.averaging.peers import PeerAverager
    from shoal.diloco.transport.hivemind_mesh import HivemindMesh, PeerAddress
    from shoal.telemetry import Log

    mesh = HivemindMesh("bench", PeerAddress(join=task["join"], host="127.0.0.1"))
    terms = AveragerSettings(min_peers=task["num"], announce_s=1.0, stall_s=120.0)
    averager = PeerAverager(mesh, log=Log("bench"), codec=task["engine"].split()[1], settings=terms)
    averager.join(deadline_s=60)
    if task["rank"] == 0:
        print(json.dumps({"addresses": mesh.addresses}), flush=True)
    while len(averager.peers()) < task["num"] - 1:
        time.sleep(0.1)
    take_rounds(averager, task, values, exact)


def run_torchft(task: dict[str, Any], values: Any, exact: Any) -> None:
    from torchft.coordination import LighthouseServer

    from shoal.diloco.averaging.torchft_averager import TorchftAverager
    from shoal.telemetry import Log

    if task["rank"] == 0:
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=task["num"], join_timeout_ms=60_000)
        task["join"] = [f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"]
        print(json.dumps({"addresses": task["join"]}), flush=True)
    codec = task["engine"].split()[1]
    averager = TorchftAverager(task["join"][0], log=Log("bench"), codec=codec, min_peers=task["num"])
    averager.join(deadline_s=60)
    take_rounds(averager, task, values, exact)
    time.sleep(2)  # rank 0 runs the lighthouse, which the others still need


def take_rounds(averager: Any, task: dict[str, Any], values: Any, exact: Any) -> None:
    from shoal.diloco.averaging.averager import Ready
    from shoal.diloco.outer import Outer, first_state, outer_step
    from shoal.diloco.rounds import RoundOutcome, take_round
    from shoal.telemetry import Log

    nothing = np.zeros(8, np.float32)
    state = first_state((nothing,))
    digest = averager.serve(state, step=0)
    for _ in range(task["repeats"]):
        ready = Ready(round=state.round, work=state.work, digest=digest, weight=1.0)
        # A small round first, so that all peers start the clock together.
        take_round(averager, ready, nothing, deadline_s=60, log=Log("bench"), stop=threading.Event())
        clock = Clock()
        result = take_round(averager, ready, values, deadline_s=300, log=Log("bench"), stop=threading.Event())
        assert result.outcome is RoundOutcome.COMMITTED, result.reasons
        clock.report(result.average_N, exact)
        state = outer_step(state, nothing, Outer(), work=1.0)
        digest = averager.serve(state, step=0)
    averager.leave()


def run_hivemind(task: dict[str, Any], values: Any, exact: Any) -> None:
    multiprocessing.set_start_method("fork")  # its averager needs this start method
    import hivemind
    import torch
    from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization
    from hivemind.utils import get_dht_time

    codecs = {"fp32": NoCompression, "fp16": Float16Compression, "int8": Uniform8BitQuantization}
    dht = hivemind.DHT(initial_peers=task["join"], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    if task["rank"] == 0:
        print(json.dumps({"addresses": [str(address) for address in dht.get_visible_maddrs()]}), flush=True)
    averager = hivemind.DecentralizedAverager(
        [torch.from_numpy(values)],
        dht=dht,
        prefix="bench",
        start=True,
        target_group_size=task["num"],
        min_group_size=task["num"],
        min_matchmaking_time=3.0,
        request_timeout=2.0,
        compression=codecs[task["engine"].split()[1]](),
    )
    for _ in range(task["repeats"]):
        with averager.get_tensors() as tensors:
            tensors[0][:] = torch.from_numpy(values)
        control = averager.step(wait=False, timeout=240, scheduled_time=get_dht_time() + 4)
        # Matchmaking is not measured: the clock starts when the group is known.
        while control.stage.name in ("IDLE", "LOOKING_FOR_GROUP", "AWAITING_TRIGGER") and not control.done():
            time.sleep(0.001)
        clock = Clock()
        control.result()
        with averager.get_tensors() as tensors:
            clock.report(tensors[0].numpy(), exact)
    time.sleep(2)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
