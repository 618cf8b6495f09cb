"""The open internet by Hivemind: its DHT as directory, its libp2p daemon for streams (NAT traversal, relays, TLS).

Only these two are used, and vectors go around the daemon where they can (direct.py). Hivemind's own averager is not used: it
reports success with wrong averages (docs/diloco.md), and its processes start under fork alone. The daemon's quirk stays: closing a socket right after writing may lose what was
written, so whoever sent last waits for the other side to close (mesh.Stream.closed_by_peer).
"""

import asyncio
import logging
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.diloco.transport.direct_mesh import DIAL_S, DirectLinks, dial, parse_offer
from shoal.diloco.transport.mesh import Broken, Handler, Stream
from shoal.telemetry import Log

OPEN_S = 10.0
STOP_S = 5.0
AGAIN_S = 300.0
"""How long a peer is left to the daemon whose direct link could not be made or broke off."""
PROTOCOL = "/shoal/diloco/1"
LINK_PROTOCOL = "/shoal/diloco/link/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """How a peer stands in the network."""

    join: Sequence[str] = ()
    """Multiaddresses of peers, or of a rendezvous, any one of which is enough."""
    host: str = "0.0.0.0"
    port: int = 0
    """0 takes any free one."""
    announce: Sequence[str] = ()
    """Multiaddresses that others should use, where they differ from what this machine sees of itself."""
    reachable: bool = True
    """False: this machine only reaches out, and listens nowhere."""
    relay: bool = False
    """Ask other peers to relay, for a machine behind NAT; hole punching is tried first."""
    direct_port: int | None = 0
    """Where others dial this machine for vectors; 0 takes any free one, None lets everything pass the daemon."""
    identity: Path | None = None
    """File with the key behind this peer's id; made at the first start."""


class HivemindMesh:
    """One peer of the run called `run`. Everything happens on the event loop that calls `start`."""

    def __init__(self, run: str, address: Address) -> None:
        self._key = f"shoal/diloco/{run}"
        self._protocol, self._link_protocol = f"{PROTOCOL}/{run}", f"{LINK_PROTOCOL}/{run}"
        self._address = address
        self.peer = ""
        self.reachable = address.reachable
        self._handler: Handler | None = None
        self._p2p: Any = None
        self._node: Any = None
        self._watch: Any = None
        self._log = Log("mesh")
        self._links: DirectLinks | None = None
        self._indirect_until_s: dict[str, float] = {}
        self.num_direct = 0
        """Streams that went around the daemon."""
        self.addresses: tuple[str, ...] = ()
        """What others may pass to join."""

    async def start(self, handler: Handler) -> None:
        from hivemind.dht.node import DHTNode
        from hivemind.p2p import P2P
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        logging.getLogger("hivemind").setLevel(logging.ERROR)
        self._handler = handler
        try:
            self._p2p = await P2P.create(**self._options())
            self._watch = _tie_to_this_process(self._p2p._child.pid)
            self._node = await DHTNode.create(
                p2p=self._p2p, initial_peers=list(self._address.join), client_mode=not self.reachable
            )
        except (P2PDaemonError, RuntimeError, OSError) as error:
            await self._give_up()
            raise _reason(error, self._address) from None
        self.peer = self._p2p.peer_id.to_base58()
        if self.reachable:
            self.addresses = tuple(str(address) for address in await self._node.get_visible_maddrs())

        async def accept(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = Stream(reader, writer, peer=info.peer_id.to_base58())
            try:
                await handler(stream)
            finally:
                stream.close()

        await self._p2p.add_binary_stream_handler(self._protocol, accept)
        if self.reachable and self._address.direct_port is not None:
            self._links = DirectLinks(handler, self._log)
            await self._links.listen(self._address.host, self._address.direct_port)
            await self._p2p.add_binary_stream_handler(self._link_protocol, self._offer)

    async def _start_again(self) -> None:
        """Out of memory, say, and somebody killed the daemon: without one this site would go on alone and never be told."""
        if self._address.identity is None:
            raise Broken("the network daemon has ended, and without a key nobody would know this peer again")
        self._log.warning("the network daemon has ended; starting another")
        await self._give_up()
        assert self._handler is not None
        await self.start(self._handler)

    async def _give_up(self) -> None:
        """Whatever came up goes down again: `start` may be called once more."""
        if self._watch is not None:
            await self.stop()
            self._p2p = self._node = self._watch = None
        # A daemon that has just died is heard of on the loop's next turns; a closed loop would complain.
        await asyncio.sleep(0.1)

    async def open(self, peer: str, *, bulk: bool = False) -> Stream:
        if bulk and self._address.direct_port is not None and self._may_dial(peer):
            try:
                stream = await self._open_direct(peer)
            except Broken as broken:
                self.broke(peer)
                self._log.warning("vectors go through the daemon", peer=peer, reason=broken)
            else:
                self.num_direct += 1
                return stream
        return (await self._open(peer, self._protocol))[0]

    def broke(self, peer: str) -> None:
        self._indirect_until_s[peer] = time.monotonic() + AGAIN_S

    def _may_dial(self, peer: str) -> bool:
        return time.monotonic() >= self._indirect_until_s.get(peer, 0.0)

    async def _open_direct(self, peer: str) -> Stream:
        asked, host = await self._open(peer, self._link_protocol)
        try:
            async with asyncio.timeout(DIAL_S):
                offer = parse_offer(await asked.receive())
        except TimeoutError:
            raise Broken(f"no offer of a direct link in {DIAL_S:.0f} s") from None
        finally:
            asked.close()
        if not host:
            raise Broken("reached by a relay only")
        return await dial(host, offer, peer=peer)

    async def _offer(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """To whoever opened the daemon's stream, whom the daemon has made sure of."""
        assert self._links is not None
        peer = info.peer_id.to_base58()
        stream = Stream(reader, writer, peer=peer)
        try:
            await stream.send(self._links.offer(peer).canonical())
            await stream.closed_by_peer(DIAL_S)
        except Broken as broken:
            self._log.warning("an offer of a direct link was not taken", peer=peer, reason=broken)
        finally:
            stream.close()

    async def _open(self, peer: str, protocol: str) -> tuple[Stream, str]:
        """The daemon's stream, and the host it goes to, if it goes there straight."""
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        try:
            async with asyncio.timeout(OPEN_S):
                info, reader, writer = await self._p2p.call_binary_stream_handler(
                    PeerID.from_base58(peer), protocol
                )
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise Broken(f"no stream to {peer}: {str(error) or f'{OPEN_S:.0f} s'}") from None
        return Stream(reader, writer, peer=peer), _host(str(info.addr))

    async def announce(self, card: bytes, *, for_s: float) -> None:
        from hivemind.utils import get_dht_time

        if self._p2p is None or self._p2p._child.returncode is not None:
            await self._start_again()
        await self._node.store(self._key, card, get_dht_time() + for_s, subkey=self.peer)

    async def cards(self) -> dict[str, bytes]:
        found = await self._node.get(self._key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            peer: entry.value
            for peer, entry in found.value.items()
            if isinstance(peer, str) and isinstance(entry.value, bytes)
        }

    async def stop(self) -> None:
        if self._p2p is None:
            return
        if self._links is not None:
            self._links.close()
        try:
            async with asyncio.timeout(STOP_S):
                if self._node is not None:
                    await self._node.shutdown()
                await self._p2p.shutdown()
        except TimeoutError:
            pass  # the daemon drains streams of peers that are gone; the watch ends it
        if self._watch is not None:
            self._watch.stdin.close()
            self._watch.wait(STOP_S)
        self._links = None

    def _options(self) -> dict[str, Any]:
        address = self._address
        options: dict[str, Any] = {
            "initial_peers": list(address.join),
            "nat_port_map": address.relay,
            "auto_nat": address.relay,
            "use_relay": True,
            "use_auto_relay": address.relay,
            "startup_timeout": 60.0,
            # A second daemon, only to see whether this identity is in use, would double the time to start.
            "check_if_identity_free": False,
        }
        if address.reachable:
            options["host_maddrs"] = [f"/ip4/{address.host}/tcp/{address.port}"]
        else:
            options |= {"no_listen": True, "dht_mode": "client", "host_maddrs": None}
        if address.announce:
            options["announce_maddrs"] = list(address.announce)
        if address.identity is not None:
            address.identity.parent.mkdir(parents=True, exist_ok=True)
            options["identity_path"] = str(address.identity)
        return options


def _reason(error: Exception, address: Address) -> Exception:
    """Nobody there, which may change, or something that its owner has to see to."""
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

    said = re.sub(r"^Daemon failed to start: ([0-9/]+ [0-9:]+ )?", "", str(error))
    slow_or_alone = "bootstrap peers" in said or "failed to start in" in said
    if slow_or_alone or not isinstance(error, P2PDaemonError):
        return Broken(f"nobody answers at {', '.join(address.join) or 'any address'}: {said}")
    key = f", {address.identity}" if address.identity is not None else ""
    return ValueError(
        f"the network daemon does not start: {said}; check --host, --port, --join, --announce{key}"
    )


def _host(address: str) -> str:
    """Of a multiaddress such as /ip4/203.0.113.5/tcp/8710; empty if it leads through a relay."""
    words = address.split("/")
    straight = len(words) > 2 and words[1] in ("ip4", "ip6") and "p2p-circuit" not in words
    return words[2] if straight else ""


def _tie_to_this_process(daemon: int) -> Any:
    """A daemon whose owner was killed must not live on and keep its port: see to it that somebody ends it."""
    # Nothing can be run in the child any more; a process of two lines waits for our end instead.
    watch = (
        "import os,signal,sys\nsys.stdin.buffer.read()\n"
        "try: os.kill(int(sys.argv[1]), signal.SIGKILL)\nexcept ProcessLookupError: pass"
    )
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", watch, str(daemon)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
