"""The mesh over the internet: Hivemind's DHT as directory, its libp2p daemon for streams (NAT traversal, relays, TLS).

Only these two parts of Hivemind are used, and vectors take direct links where possible (mesh.DirectLinks). Hivemind's own
averager is not used: it reports success with wrong averages (docs/decisions/001-digests-decide-averages.md), and its
processes need the start method fork. The daemon may lose what was written to a socket that is closed at once, so the last
sender waits for the other side to close (Stream.wait_closed_by_peer).
"""

import asyncio
import contextlib
import logging
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.diloco.transport.mesh import CONNECT_S, DirectLinks, Handler, LinkOffer, connect_direct
from shoal.diloco.transport.stream import Stream, StreamBroken
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

OPEN_S = 10.0
"""Timeout of opening a stream."""
STOP_S = 5.0
"""Timeout of stopping the daemon."""
DIRECT_RETRY_S = 300.0
"""Seconds for which the daemon's streams are used after a direct link to a peer failed or broke."""
PROTOCOL = "/shoal/diloco/1"
LINK_PROTOCOL = "/shoal/diloco/link/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """How a peer joins the network and is reached in it."""

    join: Sequence[str] = ()
    """Multiaddresses of peers or of a rendezvous; one that answers is enough."""
    host: str = "0.0.0.0"
    port: int = 0
    """0 takes any free port."""
    announce: Sequence[str] = ()
    """Multiaddresses that others should use, if they differ from this machine's own addresses."""
    reachable: bool = True
    """False: this machine only opens connections and listens on no port."""
    relay: bool = False
    """Use other peers as relays, for a machine behind NAT; hole punching is tried first."""
    direct_port: int | None = 0
    """Port for direct links; 0 takes any free port, None sends everything through the daemon."""
    admit: Sequence[str] = ()
    """Ids of all peers of the run; empty admits every peer that knows its name. The averager enforces it."""
    identity: Path | None = None
    """File with the key behind this peer's id; created at the first start."""


class HivemindMesh:
    """A peer of the run `run`. All methods run on the event loop that calls `start`."""

    def __init__(self, run: str, address: PeerAddress) -> None:
        self._key = f"shoal/diloco/{run}"
        self._protocol, self._link_protocol = f"{PROTOCOL}/{run}", f"{LINK_PROTOCOL}/{run}"
        self._address = address
        self.peer = ""
        self.reachable = address.reachable
        self._handler: Handler | None = None
        self._p2p: Any = None
        self._node: Any = None
        self._watchdog: Any = None
        self._log = Log("mesh")
        self._links: DirectLinks | None = None
        self._no_direct_until_s: dict[str, float] = {}
        self.num_direct = 0
        """Direct links opened so far."""
        self.addresses: tuple[str, ...] = ()

    async def start(self, handler: Handler) -> None:
        from hivemind.dht.node import DHTNode
        from hivemind.p2p import P2P
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        logging.getLogger("hivemind").setLevel(logging.ERROR)
        self._handler = handler
        try:
            self._p2p = await P2P.create(**self._options())
            self._watchdog = _kill_with_this_process(self._p2p._child.pid)
            self._node = await DHTNode.create(
                p2p=self._p2p, initial_peers=list(self._address.join), client_mode=not self.reachable
            )
        except (P2PDaemonError, RuntimeError, OSError) as error:
            await self._clean_up()
            raise _start_error(error, self._address) from None
        self.peer = self._p2p.peer_id.to_base58()
        if self.reachable:
            self.addresses = tuple(str(address) for address in await self._node.get_visible_maddrs())

        async def accept(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(Stream(reader, writer, peer=info.peer_id.to_base58())) as stream:
                await handler(stream)

        await self._p2p.add_binary_stream_handler(self._protocol, accept)
        if self.reachable and self._address.direct_port is not None:
            self._links = DirectLinks(handler, self._log)
            await self._links.listen(self._address.host, self._address.direct_port)
            await self._p2p.add_binary_stream_handler(self._link_protocol, self._offer)

    async def _start_again(self) -> None:
        """Replaces a daemon that died (killed for memory, for example). Without a daemon this site would train alone, and nothing would report it."""
        if self._address.identity is None:
            raise StreamBroken(
                "the network daemon has died, and without an identity file this peer's id is lost"
            )
        self._log.warning("the network daemon has died; starting another")
        await self._clean_up()
        assert self._handler is not None
        await self.start(self._handler)

    async def _clean_up(self) -> None:
        """Stops what `start` has started, so that it can be called again."""
        if self._watchdog is not None:
            await self.stop()
            self._p2p = self._node = self._watchdog = None
        # asyncio notices a dead daemon in its next iterations; a loop that is closed before warns about it.
        await asyncio.sleep(0.1)

    async def open(self, peer: str, *, bulk: bool = False) -> Stream:
        until_s = self._no_direct_until_s.get(peer, 0.0)
        if bulk and self._address.direct_port is not None and time.monotonic() >= until_s:
            try:
                stream = await self._open_direct(peer)
            except StreamBroken as broken:
                self.mark_broken(peer)
                self._log.warning("no direct link; vectors go through the daemon", peer=peer, reason=broken)
            else:
                self.num_direct += 1
                return stream
        return (await self._open(peer, self._protocol))[0]

    def mark_broken(self, peer: str) -> None:
        self._no_direct_until_s[peer] = time.monotonic() + DIRECT_RETRY_S

    async def _open_direct(self, peer: str) -> Stream:
        stream, host = await self._open(peer, self._link_protocol)
        try:
            async with asyncio.timeout(CONNECT_S):
                offer = LinkOffer.parse(bytes(await stream.receive()))
        except TimeoutError:
            raise StreamBroken(f"no offer of a direct link within {CONNECT_S:.0f} s") from None
        except Rejected as rejected:
            raise StreamBroken(f"malformed link offer: {rejected}") from None
        finally:
            stream.close()
        if not host:
            raise StreamBroken("the peer is reached through a relay")
        return await connect_direct(host, offer, peer=peer)

    async def _offer(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Sends an offer to the peer that opened the daemon's stream. The daemon has authenticated it."""
        assert self._links is not None
        peer = info.peer_id.to_base58()
        with contextlib.closing(Stream(reader, writer, peer=peer)) as stream:
            try:
                await stream.send(self._links.offer(peer).canonical())
                await stream.wait_closed_by_peer(CONNECT_S)
            except StreamBroken as broken:
                self._log.warning("offer of a direct link not delivered", peer=peer, reason=broken)

    async def _open(self, peer: str, protocol: str) -> tuple[Stream, str]:
        """Opens the daemon's stream; returns it with the peer's host, or "" if it goes through a relay."""
        if self._p2p is None:
            raise StreamBroken(
                f"no stream to {peer}: the network daemon is not running; another is being started"
            )
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

        try:
            async with asyncio.timeout(OPEN_S):
                info, reader, writer = await self._p2p.call_binary_stream_handler(
                    PeerID.from_base58(peer), protocol
                )
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise StreamBroken(
                f"no stream to {peer}: {str(error) or f'timed out after {OPEN_S:.0f} s'}"
            ) from None
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
            pass  # the daemon waits for streams of dead peers; the watchdog kills it
        if self._watchdog is not None:
            self._watchdog.stdin.close()
            self._watchdog.wait(STOP_S)
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
            # The check starts a second daemon, which doubles the time to start.
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


def peer_id(identity: Path) -> str:
    """Returns the id of the peer with this key file, and creates the file if there is none."""
    from hivemind.p2p import P2P, PeerID

    if not identity.exists():
        P2P.generate_identity(str(identity))
    return str(PeerID.from_identity(identity.read_bytes()).to_base58())


def _start_error(error: Exception, address: PeerAddress) -> Exception:
    """Returns StreamBroken if no peer answered, which may change, or ValueError if an option is wrong."""
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

    said = re.sub(r"^Daemon failed to start: ([0-9/]+ [0-9:]+ )?", "", str(error))
    slow_or_alone = "bootstrap peers" in said or "failed to start in" in said
    if slow_or_alone or not isinstance(error, P2PDaemonError):
        return StreamBroken(f"no peer answers at {', '.join(address.join) or 'any address'}: {said}")
    key = f", {address.identity}" if address.identity is not None else ""
    return ValueError(
        f"the network daemon failed to start: {said}; check --host, --port, --join, --announce{key}"
    )


def _host(address: str) -> str:
    """Returns the host of a multiaddress such as /ip4/203.0.113.5/tcp/8710, or "" if it goes through a relay."""
    words = address.split("/")
    direct = len(words) > 2 and words[1] in ("ip4", "ip6") and "p2p-circuit" not in words
    return words[2] if direct else ""


def _kill_with_this_process(daemon: int) -> Any:
    """Starts a process that kills the daemon when this one ends, however it ends; otherwise it would keep its port."""
    # Hivemind starts the daemon itself, so the usual parent-death signal cannot be set in the child.
    script = (
        "import os,signal,sys\nsys.stdin.buffer.read()\n"
        "try: os.kill(int(sys.argv[1]), signal.SIGKILL)\nexcept ProcessLookupError: pass"
    )
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", script, str(daemon)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
