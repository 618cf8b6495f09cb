"""Tests with real Hivemind peers as processes on loopback; `make hivemind` installs what they need and runs them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hivemind", reason="the extra `hivemind` is not installed: make hivemind")
pytestmark = [pytest.mark.hivemind, pytest.mark.timeout(300)]

PEER = Path(__file__).parent / "hivemind_peer.py"
ROUNDS = int(os.environ.get("SHOAL_HIVEMIND_ROUNDS", "40"))


class Peer:
    def __init__(self, folder: Path, **task: Any) -> None:
        self._errors = (folder / f"peer-{task['seed']}.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), json.dumps(task)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def next(self) -> dict[str, Any]:
        """Returns its next message, or {"event": "gone"} when the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line else {"event": "gone"}

    def rest(self) -> list[dict[str, Any]]:
        said = []
        while (what := self.next())["event"] != "gone":
            said.append(what)
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    peers: list[Peer] = []

    def begin(num: int, **task: Any) -> list[Peer]:
        first = Peer(tmp_path, join=[], seed=len(peers), peers=num, **task)
        peers.append(first)
        address = first.next()["addresses"]
        for _ in range(num - 1):
            peers.append(Peer(tmp_path, join=address, seed=len(peers), peers=num, **task))
        begin.address = address  # type: ignore[attr-defined]
        return peers

    begin.peers, begin.folder = peers, tmp_path  # type: ignore[attr-defined]
    yield begin
    for peer in peers:
        peer.end()


def round_events(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [what for what in said if what["event"] == "round"]


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_wrong_average_is_never_committed_over_hivemind(start: Any, codec: str) -> None:
    peers = start(3, rounds=ROUNDS, codec=codec, num_values=30_000)
    said = [peer.rest() for peer in peers]
    rounds = [round_events(each) for each in said]
    assert all(what["right"] and what["outcome"] == "COMMITTED" for each in rounds for what in each)
    assert [len(each) for each in rounds] == [ROUNDS] * 3
    assert len({each[-1]["state"] for each in said}) == 1


def test_peers_killed_in_a_round_and_a_new_peer(start: Any) -> None:
    """Two of five are killed in a round and one joins: no round passes the deadline, and all end with one state."""
    end = start.folder / "end"
    task = {
        "rounds": 10_000,
        "end": str(end),
        "num_values": 500_000,
        "deadline_s": 60.0,
        "pause_s": 0.5,
        "gather_s": 20.0,
        "min_peers": 2,
    }
    peers = start(5, **task)
    while (said := peers[0].next()).get("round") != 3:
        assert said["event"] in ("round", "joined"), said
    for victim in peers[3:]:
        victim.process.kill()
    new_peer = Peer(start.folder, join=start.address, seed=7, peers=3, **task)
    start.peers.append(new_peer)
    while (said := new_peer.next())["event"] != "round":
        assert said["event"] == "joined", said
    (start.folder / "end.new").write_text(str(said["round"] + 8))
    (start.folder / "end.new").rename(end)
    survivors = [*peers[:3], new_peer]
    rest = [peer.rest() for peer in survivors]
    rounds = [round_events(each) for each in rest]
    assert all(what["right"] for each in rounds for what in each)
    assert max(what["took_s"] for each in rounds for what in each) < 60
    assert len({each[-1]["state"] for each in rest}) == 1 and rest[3][-1]["event"] == "done"
    assert {what["peers"] for what in rounds[3]} == {4}, "the new peer takes part with all live peers"


def test_outbound_only_peer_takes_part_over_hivemind(start: Any) -> None:
    (host,) = start(1, rounds=3, min_peers=2)
    outbound = Peer(start.folder, join=start.address, seed=5, peers=2, rounds=3, reachable=False)
    start.peers.append(outbound)
    said = outbound.rest()
    assert said[-1]["event"] == "done" and said[-1]["state"] == host.rest()[-1]["state"]


@pytest.mark.parametrize("broken", [False, True])
def test_vectors_take_direct_links_or_fall_back_to_the_daemon(start: Any, broken: bool) -> None:
    """One of three is outbound only. With `broken`, the offered port is closed and the daemon carries everything."""
    peers = start(2, rounds=3, num_values=2_000_000, min_peers=3, break_links=broken)[:]
    outbound = Peer(
        start.folder, join=start.address, seed=5, peers=3, rounds=3, num_values=2_000_000, reachable=False
    )
    start.peers.append(outbound)
    said = [peer.rest() for peer in (*peers, outbound)]
    assert all(
        what["right"] and what["outcome"] == "COMMITTED" for each in said for what in round_events(each)
    )
    assert len({each[-1]["state"] for each in said}) == 1
    # Each round: a link to the other owner; from the outbound-only peer to both; and one for a new peer's state.
    assert all((each[-1]["direct"] >= 3) is not broken for each in said), said


def test_dead_daemon_is_replaced_and_its_peer_stays_in_the_run(start: Any) -> None:
    (host,) = start(1, rounds=6, min_peers=2)
    task = {"rounds": 6, "kill_daemon_in_round": 2, "identity": str(start.folder / "peer.key")}
    start.peers.append(Peer(start.folder, join=start.address, seed=5, peers=2, **task))
    said = [host.rest(), start.peers[1].rest()]
    assert all(
        what["right"] and what["outcome"] == "COMMITTED" for each in said for what in round_events(each)
    )
    assert len({each[-1]["state"] for each in said}) == 1 and said[0][-1]["event"] == "done"


def test_daemon_is_killed_with_its_process(start: Any) -> None:
    (peer,) = start(1, rounds=10_000, pause_s=1.0)
    port = start.address[0].split("/")[4]
    os.kill(peer.process.pid, 9)
    for _ in range(100):
        if not _listens(int(port)):
            return
        time.sleep(0.1)
    pytest.fail(f"something still listens on port {port}")


def _listens(port: int) -> bool:
    return any(
        f":{port:04X} " in line and " 0A " in line for line in Path("/proc/net/tcp").read_text().splitlines()
    )


def test_values_that_are_not_finite_are_refused_over_hivemind(start: Any) -> None:
    """One of four peers sends a NaN in every round; the others go on without it, with the right average."""
    peers = start(4, rounds=3, num_values=30_000, min_peers=3, liar=3)
    said = [peer.rest() for peer in peers[:3]]
    rounds = [round_events(each) for each in said]
    assert all(len(each) == 3 for each in rounds)
    assert all(what["right"] and what["outcome"] == "COMMITTED" for each in rounds for what in each)
    assert all(what["peers"] == 3 for each in rounds for what in each)
    assert len({each[-1]["state"] for each in rounds}) == 1
