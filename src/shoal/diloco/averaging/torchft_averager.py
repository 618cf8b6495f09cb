"""The engine for clusters and fast links: torchft's lighthouse says who takes part, gloo moves the bytes.

The lighthouse answers all who are ready with one list; each peer applies the same rule to it (gather.choose), so no
leader is needed. The exchange is ours: parts to their owners, sums coded once and given to all, digests compared by
all. A peer that dies breaks gloo's connections, the round fails at once, and the next list does not name it.
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
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from shoal.diloco.averaging.averager import Behind, Fetched, Group, Ready, Reduced, RoundFailed
from shoal.diloco.averaging.gather import choose
from shoal.diloco.averaging.peer_messages import Asked, Card, ReadyAsk, Standing, StateAsk, StateHead
from shoal.diloco.averaging.state_transfer import receive_state, send_state
from shoal.diloco.codec import CodecName, Coded, coded_bytes, decode, encode, reduce_chunk
from shoal.diloco.outer import OuterState, Vector
from shoal.diloco.transport.mesh import Broken, Stream
from shoal.net.waiting import Stopped
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

HEARTBEAT_S = 0.5
CONNECT_S = 5.0
"""How long a group may take to connect: one of its members may have died since it was named, and with it the store."""


class TorchftAverager:
    """See averager.Averager. `host`: the address under which other peers reach this one."""

    def __init__(
        self,
        lighthouse: str,
        *,
        log: Log,
        codec: CodecName = "fp16",
        host: str = "127.0.0.1",
        min_peers: int = 1,
        stop: threading.Event | None = None,
    ) -> None:
        _check_host(host, lighthouse)
        self.peer = f"torchft-{uuid.uuid4().hex[:16]}"
        self.addresses: tuple[str, ...] = (lighthouse,)
        self._log, self._host, self._min_peers = log, host, min_peers
        self._codec: CodecName = codec
        self._lighthouse = lighthouse
        self._stop = stop or threading.Event()
        self._left = threading.Event()
        self._client: Any = None
        self._store: Any = None
        self._gloo: Any = None
        self._state: tuple[OuterState, Standing] | None = None
        self._step = self._phase = 0
        self._members: list[tuple[ReadyAsk | None, str]] = []
        self._holders: tuple[str, ...] = ()
        self._at_least = 0
        self._loop = asyncio.new_event_loop()
        self._server: Any = None
        self._address = ""

    def peers(self) -> dict[str, Card]:
        """The others of the last round, as they were when it began, for whoever wants to show it."""
        return {
            ask.peer: Card(peer=ask.peer, reachable=True, standing=ask.standing, phase=0, in_round=False)
            for ask, _ in self._members
            if ask is not None and ask.peer != self.peer
        }

    # -- coming and going -----------------------------------------------------------------------------------

    def join(self, *, deadline_s: float) -> Fetched | None:
        if self._client is None:
            self._start(deadline_s)
        members = self._quorum(None, 0.0, deadline_s)[1]
        held = [(ask, address) for ask, address in members if ask is not None]
        if not held:
            return None
        newest = max(ask.standing.order() for ask, _ in held)
        self._holders = tuple(address for ask, address in held if ask.standing.order() == newest)
        # They are in a round, or this list would not have been made: what comes out of it is what to take.
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
        threading.Thread(target=self._serve_states, args=(started,), daemon=True).start()
        if not started.wait(10):
            raise RoundFailed("the server for states does not start")
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Who beats is waited for, as long as the lighthouse's join timeout."""
        while not self._left.wait(HEARTBEAT_S) and not self._stop.is_set():
            with contextlib.suppress(RuntimeError, OSError, TimeoutError):
                self._client.heartbeat(self.peer)

    # -- rounds ---------------------------------------------------------------------------------------------

    def begin(self, ready: Ready, *, deadline_s: float) -> Group:
        standing = Standing(work=ready.work, round=ready.round, state_digest=ready.digest)
        name, members = self._quorum(standing, ready.weight, deadline_s)
        asks = [(ask, address) for ask, address in members if ask is not None]
        choice = choose([ask for ask, _ in asks], [])
        chosen = tuple(ask.peer for ask in choice.members)
        if self.peer not in chosen:
            self._holders = tuple(address for ask, address in asks if ask.peer in chosen)
            self._at_least = choice.members[0].standing.round + 1
            raise Behind("the group holds a newer state")
        if len(chosen) < self._min_peers:
            raise RoundFailed(f"{len(chosen)} peers are ready, {self._min_peers} are needed")
        self._gloo = None
        self._store_of = dict(self._stores)[chosen[0]]
        return Group(
            id=name,
            round=ready.round,
            members=chosen,
            weights=tuple(ask.weight for ask in choice.members),
            owners=chosen,
            leader=chosen[0],
        )

    def reduce(self, group: Group, delta_N: Vector, *, deadline_s: float) -> Reduced:
        num = len(group.members)
        length = -(-len(delta_N) // num)
        padded = np.zeros(num * length, np.float32)
        padded[: len(delta_N)] = delta_N
        coded = [encode(self._codec, padded[at * length : (at + 1) * length]) for at in range(num)]
        size = coded_bytes(self._codec, length)
        theirs = self._collective(group, deadline_s, lambda pg, wait: _all_to_all(pg, coded, size, wait))
        total = reduce_chunk(self._codec, theirs, group.weights, length)
        totals = self._collective(group, deadline_s, lambda pg, wait: _all_gather(pg, total, num, wait))
        average_N = np.concatenate([decode(self._codec, each, length) for each in totals])[: len(delta_N)]
        digest = blake3(b"".join(totals)).hexdigest()
        return Reduced(average_N=average_N, digest=digest, num_bytes=2 * (num - 1) * size)

    def commit(self, group: Group, digest: str, *, deadline_s: float) -> bool:
        if not digest:
            self._gloo = None  # the others see the connections break, which is the same as a vote against
            return False
        own = bytes.fromhex(digest)
        try:
            votes = self._collective(
                group, deadline_s, lambda pg, wait: _all_gather(pg, own, len(group.members), wait)
            )
        except RoundFailed as failed:
            self._log.warning("no word on the vote", reason=failed)
            return False
        finally:
            self._gloo = None
        return all(vote == own for vote in votes)

    def _collective(
        self, group: Group, deadline_s: float, work: Callable[[Any, timedelta], list[bytes]]
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
        self, standing: Standing | None, weight: float, deadline_s: float
    ) -> tuple[str, list[tuple[ReadyAsk | None, str]]]:
        """One list for all who are ready: a name for it, and each peer's readiness and address for states."""
        if self._stop.is_set():
            raise Stopped("stopped before a round")
        data = {"weight": weight, "standing": standing.canonical().decode() if standing else ""}
        try:
            quorum = self._client.quorum(
                replica_id=self.peer,
                timeout=timedelta(seconds=deadline_s),
                address=self._address,
                store_address=f"{self._host}:{self._store.port}",
                step=0 if standing is None else standing.round,
                world_size=1,
                shrink_only=False,
                data=data,
            )
        except (RuntimeError, OSError, TimeoutError) as error:
            raise RoundFailed(f"no quorum: {error}") from None
        self._stores = [(each.replica_id, each.store_address) for each in quorum.participants]
        name = f"{quorum.quorum_id}-{quorum.created.seconds}-{quorum.created.nanos}"
        self._members = [(_ask_of(each, deadline_s), each.address) for each in quorum.participants]
        return name, self._members

    # -- states -----------------------------------------------------------------------------------------------

    def serve(self, state: OuterState, *, step: int) -> str:
        digest = state.digest()
        self._state = state, Standing(work=state.work, round=state.round, state_digest=digest)
        self._step, self._phase = step, 0
        return digest

    def progress(self, *, phase: int, step: int) -> None:
        self._phase, self._step = phase, step

    def fetch(self, *, deadline_s: float) -> Fetched:
        until_s, reason = time.monotonic() + deadline_s, "nobody holds a state"
        while time.monotonic() < until_s:
            for address in self._holders:
                try:
                    fetched = asyncio.run(_fetch(address, self.peer, until_s - time.monotonic()))
                except (Broken, RoundFailed, Rejected, OSError, TimeoutError) as error:
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
            stream = Stream(reader, writer)
            try:
                payload = await stream.receive()
                Asked.parse(bytes(payload))
                await self._send_state(stream)
                await stream.closed_by_peer(30.0)
            except (Broken, Rejected) as error:
                self._log.warning("a stream came to nothing", reason=error)
            finally:
                stream.close()

        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(handle, self._host, 0))
        self._address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])
        started.set()
        self._loop.run_forever()
        self._server.close()
        self._loop.close()

    async def _send_state(self, stream: Stream) -> None:
        if self._state is None:
            await stream.send(StateHead(standing=None).canonical())
            return
        state, standing = self._state
        lengths = tuple(len(base) for base in state.bases)
        head = StateHead(standing=standing, lengths=lengths, phase=self._phase, step=self._step)
        await send_state(stream, head, state)


def _check_host(host: str, lighthouse: str) -> None:
    there = urlsplit(lighthouse).hostname
    if there is None:
        raise ValueError(f"{lighthouse!r} is no lighthouse's address; one looks like http://10.0.0.1:8710")
    near = there == "localhost" or there.startswith("127.")
    if host in ("0.0.0.0", "::") or (host.startswith("127.") and not near):
        raise ValueError(
            f"host {host}: with torchft the other peers connect to it, and cannot; give this machine's own address"
        )


def _ask_of(member: Any, wait_s: float) -> ReadyAsk | None:
    """A participant's readiness; None for one that came for a state."""
    data = member.data or {}
    if not data.get("standing"):
        return None
    return ReadyAsk(
        peer=member.replica_id,
        reachable=True,
        standing=Standing.parse(data["standing"]),
        weight=float(data["weight"]),
        suspects=(),
        wait_s=wait_s,
    )


async def _fetch(address: str, peer: str, deadline_s: float) -> Fetched:
    host, port = address.rsplit(":", 1)
    async with asyncio.timeout(max(1.0, deadline_s)):
        reader, writer = await asyncio.open_connection(host, int(port))
        stream = Stream(reader, writer)
        try:
            await stream.send(Asked(ask=StateAsk(peer=peer)).canonical())
            return await receive_state(stream, None)
        finally:
            stream.close()


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
