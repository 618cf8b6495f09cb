"""Averaging between processes on loopback: our exchange over Hivemind's streams, Hivemind's own averager, plain gloo.

    python bench/averaging.py --mb 50 500 --peers 2 4 --repeats 3

Needs the extra `hivemind`. Every engine runs as real processes, one engine after the other in one run; ours includes
the digests' comparison and the commit. Seconds are the slowest peer's, the median over the repeats after one round to
warm up; for ours and gloo the result is checked against the mean that it should be.
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
from typing import Any

import numpy as np

ENGINES = ("gloo", "ours fp32", "ours fp16", "ours int8", "hivemind fp32", "hivemind fp16", "hivemind int8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[50])
    parser.add_argument("--peers", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one engine at one size")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        run_peer(json.loads(options.peer))
        return
    print(f"{'MB':>5}{'peers':>6}  {'engine':<15}{'median s':>9}{'wrong':>7}", flush=True)
    for mb in options.mb:
        for num in options.peers:
            for engine in options.engines:
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
    said = []
    for process in (first, *others):
        try:
            out, _ = process.communicate(timeout=options.timeout_s)
            said.append([json.loads(line) for line in out.splitlines() if "took_s" in line])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if len(said) < num or any(len(lines) != options.repeats + 1 for lines in said):
        print(f"{mb:>5}{num:>6}  {engine:<15}{'failed':>9}", flush=True)
        return
    took = [max(lines[at]["took_s"] for lines in said) for at in range(1, options.repeats + 1)]
    wrong = sum(not line["right"] for lines in said for line in lines)
    print(f"{mb:>5}{num:>6}  {engine:<15}{statistics.median(took):>9.3f}{wrong:>7}", flush=True)


def start(task: dict[str, Any]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, "--peer", json.dumps(task)], stdout=subprocess.PIPE, text=True
    )


def run_peer(task: dict[str, Any]) -> None:
    values = np.random.default_rng(task["rank"]).standard_normal(task["mb"] * 250_000, np.float32)
    # Every 997th value is checked against the mean of what all contributed.
    exact = np.mean(
        [
            np.random.default_rng(rank).standard_normal(len(values), np.float32)[::997]
            for rank in range(task["num"])
        ],
        axis=0,
    )
    kind = task["engine"].split()[0]
    {"gloo": run_gloo, "ours": run_ours, "hivemind": run_hivemind}[kind](task, values, exact)


def say(took_s: float, result: Any, exact: Any) -> None:
    right = bool(np.abs(np.asarray(result)[::997] - exact).max() < 0.1)
    print(json.dumps({"took_s": took_s, "right": right}), flush=True)


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
        started_s = time.monotonic()
        dist.all_reduce(tensor)
        tensor /= task["num"]
        say(time.monotonic() - started_s, tensor.numpy(), exact)
    dist.destroy_process_group()


def run_ours(task: dict[str, Any], values: Any, exact: Any) -> None:
    from shoal.diloco.averager import Ready
    from shoal.diloco.hivemind_mesh import Address, HivemindMesh
    from shoal.diloco.outer import Outer, first_state, outer_step
    from shoal.diloco.peers import PeerAverager, Terms
    from shoal.diloco.rounds import Outcome, take_round
    from shoal.telemetry import Log

    mesh = HivemindMesh("bench", Address(join=task["join"], host="127.0.0.1"))
    terms = Terms(min_peers=task["num"], announce_s=1.0, stall_s=120.0)
    averager = PeerAverager(mesh, log=Log("bench"), codec=task["engine"].split()[1], terms=terms)
    averager.join(deadline_s=60)
    if task["rank"] == 0:
        print(json.dumps({"addresses": mesh.addresses}), flush=True)
    nothing = np.zeros(8, np.float32)
    state = first_state((nothing,))
    digest = averager.serve(state, step=0)
    while len(averager.peers()) < task["num"] - 1:
        time.sleep(0.1)
    for _ in range(task["repeats"]):
        ready = Ready(round=state.round, work=state.work, digest=digest, weight=1.0)
        # An empty round first, so that all start the clock together.
        take_round(averager, ready, nothing, deadline_s=60, log=Log("bench"), stop=threading.Event())
        started_s = time.monotonic()
        result = take_round(averager, ready, values, deadline_s=300, log=Log("bench"), stop=threading.Event())
        took_s = time.monotonic() - started_s
        assert result.outcome is Outcome.COMMITTED, result.reasons
        say(took_s, result.average_N, exact)
        state = outer_step(state, nothing, Outer(), work=1.0)
        digest = averager.serve(state, step=0)
    averager.leave()


def run_hivemind(task: dict[str, Any], values: Any, exact: Any) -> None:
    multiprocessing.set_start_method("fork")  # its averager starts under no other
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
        matched: list[float] = []
        control = averager.step(wait=False, timeout=240, scheduled_time=get_dht_time() + 4)
        # Matchmaking is left out: the clock runs from the moment the group is known.
        while control.stage.name in ("IDLE", "LOOKING_FOR_GROUP", "AWAITING_TRIGGER") and not control.done():
            time.sleep(0.001)
        matched.append(time.monotonic())
        control.result()
        took_s = time.monotonic() - matched[0]
        with averager.get_tensors() as tensors:
            say(took_s, tensors[0].numpy(), exact)
    time.sleep(2)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
