"""Runs one Hivemind or torchft peer as a process: takes rounds on known vectors and prints how each ended.

python hivemind_peer.py '{"join": [...], "rounds": 10, "seed": 1, "peers": 3, "engine": "hivemind", ...}'
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from shoal.diloco.averaging.averager import Averager, AveragerSettings, Ready
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.outer import Outer, OuterState, Vector, first_state, outer_step
from shoal.diloco.robust import RobustSettings
from shoal.diloco.rounds import RoundOutcome, take_round
from shoal.diloco.transport.hivemind_mesh import HivemindMesh, PeerAddress
from shoal.telemetry import Log


def contribution(round: int, seed: int, num_values: int) -> Vector:
    return np.random.default_rng((round, seed)).standard_normal(num_values, np.float32)


def report(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    task = json.loads(sys.argv[1])
    averager, mesh = make_averager(task)
    num_values = task.get("num_values", 1000)
    fetched = averager.join(deadline_s=60)
    state = fetched.state if fetched else first_state((np.zeros(num_values, np.float32),))
    digest = averager.serve(state, step=0)
    report(event="joined", peer=averager.peer, addresses=averager.addresses, round=state.round)
    while isinstance(averager, PeerAverager) and len(averager.peers()) < task["peers"] - 1:
        time.sleep(0.1)
    if task.get("break_links"):
        mesh._links.close()  # it still offers links to a port that is closed
    while state.round < last_round(task):
        if task.get("kill_daemon_in_round") == state.round:
            os.kill(mesh._p2p._child.pid, 9)
        state, digest = one_round(averager, task, state, digest, num_values)
    report(event="done", state=digest, direct=0 if mesh is None else mesh.num_direct)
    averager.leave()


def make_averager(task: dict[str, Any]) -> tuple[Averager, Any]:
    codec, min_peers = task.get("codec", "fp32"), task.get("min_peers", task["peers"])
    if task.get("engine") == "torchft":
        from shoal.diloco.averaging.torchft_averager import TorchftAverager

        return TorchftAverager(task["join"][0], log=Log("peer"), codec=codec, min_peers=min_peers), None
    address = PeerAddress(
        join=tuple(task["join"]),
        host="127.0.0.1",
        reachable=task.get("reachable", True),
        identity=Path(task["identity"]) if "identity" in task else None,
    )
    mesh = HivemindMesh("test", address)
    terms = AveragerSettings(
        gather_s=task.get("gather_s", 60.0),
        min_peers=min_peers,
        stall_s=10.0,
        announce_s=1.0,
        # Weights of 2 ** seed are far from their median, so the bound must not apply to them.
        robust=RobustSettings(max_norm_ratio=1e6),
    )
    return PeerAverager(mesh, log=Log("peer"), codec=codec, settings=terms), mesh


def last_round(task: dict[str, object]) -> int:
    """Returns the number in the file `end` if it exists, else `rounds`: a test may not know beforehand how many it needs."""
    end = Path(str(task.get("end", "")))
    return int(end.read_text()) if end.is_file() else int(str(task["rounds"]))


def one_round(
    averager: Averager, task: dict[str, object], state: OuterState, digest: str, num_values: int
) -> tuple[OuterState, str]:
    seed = int(str(task["seed"]))
    delta_N = contribution(state.round, seed, num_values)
    if task.get("liar") == seed:
        delta_N[num_values // 2] = np.nan
    if task.get("die_in_round") == state.round:
        # Kills the process 0.05 s after the round began, in its exchange.
        threading.Timer(0.05, lambda: os.kill(os.getpid(), 9)).start()
    result = take_round(
        averager,
        # The weight 2 ** seed identifies the peer in the group's total work.
        Ready(round=state.round, work=state.work, digest=digest, weight=float(2**seed)),
        delta_N,
        deadline_s=float(str(task.get("deadline_s", 60.0))),
        log=Log("peer"),
        stop=threading.Event(),
    )
    if result.outcome is RoundOutcome.ADOPTED:
        assert result.fetched is not None
        state = result.fetched.state
    else:
        before, state = state, outer_step(state, result.average_N, Outer(), work=result.work)
        report(
            event="round",
            round=before.round,
            outcome=result.outcome.name,
            took_s=round(result.took_s, 3),
            attempts=result.attempts,
            right=is_right(before.round, result.work, result.average_N),
            peers=len(result.members),
            state=state.digest(),
        )
    if task.get("pause_s"):
        time.sleep(float(str(task["pause_s"])))
    return state, averager.serve(state, step=0)


def is_right(round: int, work: float, average_N: Vector) -> bool:
    """Returns whether the average is that of the members, which the sum of their weights identifies."""
    seeds = [seed for seed in range(20) if int(work) >> seed & 1]
    weights = [2.0**seed for seed in seeds]
    exact = np.average([contribution(round, seed, len(average_N)) for seed in seeds], axis=0, weights=weights)
    return bool(np.abs(average_N - exact).max() < 0.1)


if __name__ == "__main__":
    main()
