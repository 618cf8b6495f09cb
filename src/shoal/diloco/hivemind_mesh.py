"""The open internet by Hivemind: its DHT as directory, its libp2p daemon for streams (NAT traversal, relays, TLS).

Only these two are used. Hivemind's own averager is not: it reports success with wrong averages (docs/diloco.md), and its
processes start under fork alone. The daemon's quirk stays: closing a socket right after writing may lose what was
written, so whoever sent last waits for the other side to close (mesh.Stream.closed_by_peer).
"""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.diloco.mesh import Broken, Handler, Stream

OPEN_S = 10.0
STOP_S = 5.0
PROTOCOL = "/shoal/diloco/1"


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
    identity: Path | None = None
    """File with the key behind this peer's id; made at the first start."""


class HivemindMesh:
    """One peer of the run called `run`. Everything happens on the event loop that calls `start`."""

    def __init__(self, run: str, address: Address) -> None:
        self._key = f"shoal/diloco/{run}"
        self._protocol = f"{PROTOCOL}/{run}"
        self._address = address
        self.peer = ""
        self.reachable = address.reachable
        self._p2p: Any = None
        self._node: Any = None
        self._watch: Any = None
        self.addresses: tuple[str, ...] = ()
        """What others may pass to join."""

    async def start(self, handler: Handler) -> None:
        from hivemind.dht.node import DHTNode
        from hivemind.p2p import P2P
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        logging.getLogger("hivemind").setLevel(logging.ERROR)
        try:
            self._p2p = await P2P.create(**self._options())
            self._watch = _tie_to_this_process(self._p2p._child.pid)
            self._node = await DHTNode.create(
                p2p=self._p2p, initial_peers=list(self._address.join), client_mode=not self.reachable
            )
        except (P2PDaemonError, RuntimeError, OSError) as error:
            raise Broken(f"no peer at {', '.join(self._address.join) or 'any address'}: {error}") from None
        self.peer = self._p2p.peer_id.to_base58()
        if self.reachable:
            self.addresses = tuple(str(address) for address in await self._node.get_visible_maddrs())

        async def accept(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = Stream(reader, writer)
            try:
                await handler(stream)
            finally:
                stream.close()

        await self._p2p.add_binary_stream_handler(self._protocol, accept)

    async def open(self, peer: str) -> Stream:
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        try:
            async with asyncio.timeout(OPEN_S):
                _, reader, writer = await self._p2p.call_binary_stream_handler(
                    PeerID.from_base58(peer), self._protocol
                )
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise Broken(f"no stream to {peer}: {error or f'{OPEN_S:.0f} s'}") from None
        return Stream(reader, writer)

    async def announce(self, card: bytes, *, for_s: float) -> None:
        from hivemind.utils import get_dht_time

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
        try:
            async with asyncio.timeout(STOP_S):
                if self._node is not None:
                    await self._node.shutdown()
                await self._p2p.shutdown()
        except TimeoutError:
            pass  # the daemon drains streams of peers that are gone; the watch ends it
        self._watch.stdin.close()
        self._watch.wait(STOP_S)

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
