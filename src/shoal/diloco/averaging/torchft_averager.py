"""The engine for clusters and fast links: torchft's lighthouse decides who takes part, gloo moves the bytes.

The lighthouse gives all ready peers the same list, and each applies the same rule to it (leader.choose_group), so no
leader is needed. The exchange is the same as in the peer-to-peer engine: parts go to their owners, sums are coded once and
sent to all, digests are compared by all. A peer that dies breaks gloo's connections: the round fails at once, and the next
list does not contain it.
"""

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from blake3 import blake3
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllToAllOptions,
    ProcessGroupGloo,
)

from shoal.background import BackgroundTask
from shoal.diloco.averaging.averager import AveragingGroup, Behind, FetchedState, Ready, Reduced, RoundFailed
from shoal.diloco.averaging.leader import choose_group, refused_peers
from shoal.diloco.averaging.peer_messages import Card, PeerRequest, ReadyRequest, StateRequest, StateVersion
from shoal.diloco.averaging.state_transfer import ServedState, receive_state
from shoal.diloco.codec import CodecName, Coded, coded_bytes, decode, encode
from shoal.diloco.outer import OuterState, Vector
from shoal.diloco.robust import BadChunk, PartAverager, RobustSettings
from shoal.diloco.transport.stream import Stream, StreamBroken
from shoal.net.waiting import Stopped
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

HEARTBEAT_S = 0.5
"""Seconds between two heartbeats to the lighthouse."""
CONNECT_S = 5.0
"""Timeout of connecting a group: a member, and with it the store, may have died since the list was made."""


class TorchftAverager:
    """The engine for clusters (see averager.Averager). `host`: the address at which other peers reach this one."""

    def __init__(
        self,
        lighthouse: str,
        *,
        log: Log,
        codec: CodecName = "fp16-scaled",
        host: str = "127.0.0.1",
        min_peers: int = 1,
        robust: RobustSettings | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        _check_host(host, lighthouse)
        self.peer = f"torchft-{uuid.uuid4().hex[:16]}"
        self.addresses: tuple[str, ...] = (lighthouse,)
        self._log, self._host, self._min_peers = log, host, min_peers
        self._codec: CodecName = codec
        self._robust = robust or RobustSettings()
        self._refused: set[str] = set()
        self._lighthouse = lighthouse
        self._stop = stop or threading.Event()
        self._left = threading.Event()
        self._client: Any = None
        self._store: Any = None
        self._gloo: Any = None
        self._served = ServedState()
        self._members: list[tuple[ReadyRequest | None, str]] = []
        self._holders: tuple[str, ...] = ()
        self._at_least = 0
        self._loop = asyncio.new_event_loop()
        self._server: Any = None
        self._address = ""

    def peers(self) -> dict[str, Card]:
        """Returns the other peers of the last round, as of its start, for display."""
        return {
            each.peer: Card(peer=each.peer, reachable=True, standing=each.standing, phase=0, in_round=False)
            for each, _ in self._members
            if each is not None and each.peer != self.peer
        }

    # -- joining and leaving --------------------------------------------------------------------------------

    def join(self, *, deadline_s: float, lengths: tuple[int, ...] | None = None) -> FetchedState | None:
        if self._client is None:
            self._start(deadline_s)
        members = self._quorum(None, deadline_s)[1]
        held = [(request, address) for request, address in members if request is not None]
        if not held:
            return None
        newest = max(request.standing.order() for request, _ in held)
        self._holders = tuple(address for request, address in held if request.standing.order() == newest)
        # The list shows that they are in a round, so wait for the state after it.
        self._at_least = newest[1] + 1
        return self.fetch(deadline_s=deadline_s)

    def leave(self) -> None:
        self._left.set()
        self._gloo = None
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, deadline_s: float) -> None:
        from torchft.coordination import LighthouseClient

        try:
            self._client = LighthouseClient(self._lighthouse, timedelta(seconds=min(30.0, deadline_s)))
        except (RuntimeError, OSError, TimeoutError) as error:
            raise RoundFailed(f"no lighthouse at {self._lighthouse}: {error}") from None
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        started = threading.Event()
        BackgroundTask("states", lambda: self._serve_states(started))
        if not started.wait(10):
            raise RoundFailed("the state server did not start within 10 s")
        BackgroundTask("heartbeat", self._heartbeat_loop)

    def _heartbeat_loop(self) -> None:
        """Sends heartbeats. The lighthouse waits for peers that send them, up to its join timeout."""
        while not self._left.wait(HEARTBEAT_S) and not self._stop.is_set():
            with contextlib.suppress(RuntimeError, OSError, TimeoutError):
                self._client.heartbeat(self.peer)

    # -- rounds ---------------------------------------------------------------------------------------------

    def begin(self, ready: Ready, *, deadline_s: float) -> AveragingGroup:
        version = StateVersion(work=ready.work, round=ready.round, state_digest=ready.digest)
        data = {"weight": ready.weight, "norm": ready.norm, "refused": sorted(self._refused)}
        name, members = self._quorum(version, deadline_s, data)
        ready_peers = [(request, address) for request, address in members if request is not None]
        out = refused_peers([request for request, _ in ready_peers])
        accepted = [request for request, _ in ready_peers if request.peer not in out]
        choice = choose_group(accepted or [request for request, _ in ready_peers], [])
        chosen = tuple(request.peer for request in choice.members)
        if self.peer not in chosen:
            self._holders = tuple(address for request, address in ready_peers if request.peer in chosen)
            self._at_least = choice.members[0].standing.round + 1
            raise Behind("the group holds a newer state")
        if len(chosen) < self._min_peers:
            raise RoundFailed(f"{len(chosen)} peers are ready, {self._min_peers} are needed")
        self._gloo = None
        self._store_of = dict(self._stores)[chosen[0]]
        return AveragingGroup(
            id=name,
            round=ready.round,
            members=chosen,
            weights=self._robust.bounded_weights([request.weight for request in choice.members]),
            norms=tuple(request.norm for request in choice.members),
            owners=chosen,
            leader=chosen[0],
        )

    def reduce(self, group: AveragingGroup, delta_N: Vector, *, deadline_s: float) -> Reduced:
        num = len(group.members)
        length = -(-len(delta_N) // num)
        padded = np.zeros(num * length, np.float32)
        padded[: len(delta_N)] = delta_N
        coded = [encode(self._codec, padded[at * length : (at + 1) * length]) for at in range(num)]
        size = coded_bytes(self._codec, length)
        theirs = self._collective(group, deadline_s, lambda pg, wait: _all_to_all(pg, coded, size, wait))
        averager = PartAverager(self._codec, group.members, group.weights, group.norms, self._robust)
        try:
            total = averager.average(theirs, length)
        except BadChunk as bad:
            self._refused.add(bad.peer)
            raise RoundFailed(str(bad)) from None
        totals = self._collective(group, deadline_s, lambda pg, wait: _all_gather(pg, total, num, wait))
        average_N = np.concatenate([decode(self._codec, each, length) for each in totals])[: len(delta_N)]
        digest = blake3(b"".join(totals)).hexdigest()
        return Reduced(average_N=average_N, digest=digest, num_bytes=2 * (num - 1) * size)

    def commit(self, group: AveragingGroup, digest: str, *, deadline_s: float) -> bool:
        if not digest:
            self._gloo = None  # closes the connections, which the others count as a vote against the round
            return False
        own = bytes.fromhex(digest)
        try:
            votes = self._collective(
                group, deadline_s, lambda pg, wait: _all_gather(pg, own, len(group.members), wait)
            )
        except RoundFailed as failed:
            self._log.warning("no result of the vote", reason=failed)
            return False
        finally:
            self._gloo = None
        return all(vote == own for vote in votes)

    def _collective(
        self, group: AveragingGroup, deadline_s: float, work: Callable[[Any, timedelta], list[bytes]]
    ) -> list[bytes]:
        try:
            if self._gloo is None:
                host, port = self._store_of.rsplit(":", 1)
                wait = timedelta(seconds=max(1.0, min(CONNECT_S, deadline_s)))
                store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=wait)
                rank = group.members.index(self.peer)
                self._gloo = ProcessGroupGloo(
                    PrefixStore(group.id, store), rank, len(group.members), timeout=wait
                )
            return work(self._gloo, timedelta(seconds=max(1.0, deadline_s)))
        except (RuntimeError, OSError) as error:
            self._gloo = None
            raise RoundFailed(f"gloo: {str(error).splitlines()[0][:200]}") from None

    def _quorum(
        self, version: StateVersion | None, deadline_s: float, data: dict[str, Any] | None = None
    ) -> tuple[str, list[tuple[ReadyRequest | None, str]]]:
        """Waits for the lighthouse's list of ready peers; returns its name, and each peer's request and state address."""
        if self._stop.is_set():
            raise Stopped("stopped before a round")
        data = {**(data or {}), "standing": version.canonical().decode() if version else ""}
        try:
            quorum = self._client.quorum(
                replica_id=self.peer,
                timeout=timedelta(seconds=deadline_s),
                address=self._address,
                store_address=f"{self._host}:{self._store.port}",
                step=0 if version is None else version.round,
                world_size=1,
                shrink_only=False,
                data=data,
            )
        except (RuntimeError, OSError, TimeoutError) as error:
            raise RoundFailed(f"no quorum: {error}") from None
        self._stores = [(each.replica_id, each.store_address) for each in quorum.participants]
        name = f"{quorum.quorum_id}-{quorum.created.seconds}-{quorum.created.nanos}"
        self._members = [(_request_of(each, deadline_s), each.address) for each in quorum.participants]
        return name, self._members

    # -- states -----------------------------------------------------------------------------------------------

    def serve(self, state: OuterState, *, step: int, phase: int = 0) -> str:
        digest = state.digest()
        version = StateVersion(work=state.work, round=state.round, state_digest=digest)
        self._served.replace(state, version, phase=phase, step=step)
        return digest

    def progress(self, *, phase: int, step: int) -> None:
        self._served.set_progress(phase=phase, step=step)

    def fetch(self, *, deadline_s: float) -> FetchedState:
        until_s, reason = time.monotonic() + deadline_s, "no peer offers one"
        while time.monotonic() < until_s:
            for address in self._holders:
                try:
                    fetched = asyncio.run(_fetch(address, self.peer, until_s - time.monotonic()))
                except (StreamBroken, RoundFailed, Rejected, OSError, TimeoutError) as error:
                    reason = f"{address}: {error}"
                    continue
                if fetched.state.round >= self._at_least:
                    return fetched
                reason = f"{address} is still in round {fetched.state.round}"
            if self._stop.wait(0.2):
                raise Stopped("stopped while fetching a state")
        raise RoundFailed(f"no newer state after {deadline_s:.0f} s: {reason}")

    def _serve_states(self, started: threading.Event) -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(Stream(reader, writer)) as stream:
                try:
                    PeerRequest.parse(bytes(await stream.receive()))
                    await self._served.send(stream)
                    await stream.wait_closed_by_peer(30.0)
                except (StreamBroken, Rejected) as error:
                    self._log.warning("request failed", reason=error)

        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(handle, self._host, 0))
        self._address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])
        started.set()
        self._loop.run_forever()
        self._server.close()
        self._loop.close()


def _check_host(host: str, lighthouse: str) -> None:
    there = urlsplit(lighthouse).hostname
    if there is None:
        raise ValueError(
            f"{lighthouse!r} is not the address of a lighthouse, which looks like http://10.0.0.1:8710"
        )
    on_this_machine = there == "localhost" or there.startswith("127.")
    if host in ("0.0.0.0", "::") or (host.startswith("127.") and not on_this_machine):
        raise ValueError(
            f"host {host}: with torchft the other peers must be able to connect to it; give this machine's own address"
        )


def _request_of(member: Any, wait_s: float) -> ReadyRequest | None:
    """Returns a participant's request; None for a new peer that only asks for a state."""
    data = member.data or {}
    if not data.get("standing"):
        return None
    return ReadyRequest(
        peer=member.replica_id,
        reachable=True,
        standing=StateVersion.parse(data["standing"]),
        weight=float(data["weight"]),
        norm=float(data["norm"]),
        suspects=(),
        refused=tuple(data["refused"]),
        wait_s=wait_s,
    )


async def _fetch(address: str, peer: str, deadline_s: float) -> FetchedState:
    host, port = address.rsplit(":", 1)
    async with asyncio.timeout(max(1.0, deadline_s)):
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(Stream(reader, writer)) as stream:
            await stream.send(PeerRequest(ask=StateRequest(peer=peer)).canonical())
            return await receive_state(stream, None)


def _all_to_all(pg: Any, coded: list[Coded], size: int, wait: timedelta) -> list[bytes]:
    num = len(coded)
    ours = torch.frombuffer(bytearray(b"".join(coded)), dtype=torch.uint8)
    theirs = torch.empty_like(ours)
    options = AllToAllOptions()
    options.timeout = wait
    pg.alltoall_base(theirs, ours, [], [], options).wait()
    content = theirs.numpy().tobytes()
    return [content[at * size : (at + 1) * size] for at in range(num)]


def _all_gather(pg: Any, own: Coded, num: int, wait: timedelta) -> list[bytes]:
    ours = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    outputs = [torch.empty_like(ours) for _ in range(num)]
    options = AllgatherOptions()
    options.timeout = wait
    pg.allgather([outputs], [ours], options).wait()
    return [output.numpy().tobytes() for output in outputs]
