"""The addresses and ports of a run on this machine, and the line by which others join it."""

import contextlib
import itertools
import json
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.run.supervise import RunFailed
from shoal.files import write_bytes_atomically

LOOPBACK = "127.0.0.1"
COORDINATOR_PORT = 8700
PORTS = range(20_000, 30_000)
"""Ports below those that systems give to outgoing connections, so that a restarted role finds its port free."""
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAddresses:
    """Where the roles of a run listen, and by which name others reach them."""

    host: str
    """The address to listen on."""
    outside: str
    """The name or address in the URLs of coordinator, origin and relays."""
    ports: tuple[int, ...]
    """The coordinator's, the origin's, then one for each relay."""

    @property
    def url(self) -> str:
        """The coordinator's URL for roles on this machine: loopback where it listens there, since lying workers need it."""
        return self._url(LOOPBACK if self.host in _WILDCARDS else self.outside, self.ports[0])

    @property
    def outside_url(self) -> str:
        """The coordinator's URL for other machines."""
        return self._url(self.outside, self.ports[0])

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the run."""
        return not (self.outside.startswith("127.") or self.outside in ("localhost", "::1"))

    def options(self, port: int) -> list[str]:
        """Returns the options of a role that listens on one of the ports."""
        named = ["--host", self.host, "--port", str(port)]
        return named + (["--url", self.url_of(port)] if port != self.ports[0] else [])

    def url_of(self, port: int) -> str:
        """Returns the URL by which others reach the role that listens on one of the ports."""
        return self._url(self.outside, port)

    @staticmethod
    def _url(name: str, port: int) -> str:
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def choose_addresses(
    folder: Path, host: str, port: int | None, *, relays: int, held: contextlib.ExitStack
) -> RunAddresses:
    """Returns addresses with free ports, the ones of the last start where possible: leases issued then name the relays by them.

    Without `port`, the coordinator gets COORDINATOR_PORT, or another port if that is taken. Other runs do not choose these ports
    until `held` is closed.
    """
    path = folder / "ports.json"
    before: list[int] = json.loads(path.read_text()) if path.exists() else []
    first = port or (before[0] if before else COORDINATOR_PORT)
    check_address(host, port)
    ports = free_ports(2 + relays, [first, *before[1:]], host=host, held=held)
    write_bytes_atomically(path, json.dumps(ports).encode())
    outside = find_own_address() if host in _WILDCARDS else host
    return RunAddresses(host=host, outside=outside, ports=tuple(ports))


def check_address(host: str, port: int | None) -> None:
    """Raises ValueError if this machine does not have the address, or if another program has the port."""
    with contextlib.ExitStack() as bound:
        try:
            sock = bound.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            sock.bind((host, 0))
        except OSError as error:
            raise ValueError(
                f"--host {host}: {error.strerror}; give an address of this machine, or 0.0.0.0 for all of them"
            ) from None
        if port and not _try_bind(host, port, bound, None):
            raise ValueError(
                f"--port {port} is in use by another program on {host}; choose another one, or leave --port out"
            )


def find_own_address() -> str:
    """Returns the address of this machine in its network, by which others in the same network reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: it only chooses the interface
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostname()


def join_sentences(addresses: RunAddresses, admission: str) -> list[str]:
    """Returns how another machine joins the run, or why it cannot."""
    if not addresses.is_public:
        return ["only this machine can join; --host 0.0.0.0 lets others in your network join"]
    command = f"shoal join {addresses.outside_url}"
    if admission == "invite":
        return [
            f"others join with: {command} --invite CODE  (make a code: shoal admin invite; `shoal docs guides/operator`)"
        ]
    needs = {
        "allow": ", once their node is on your list",
        "stake": ", once you have entered a stake for them",
    }
    return [f"others join with: {command}{needs.get(admission, '')}"]


def free_ports(
    count: int,
    wanted: Sequence[int] = (),
    *,
    host: str = LOOPBACK,
    held: contextlib.ExitStack | None = None,
) -> list[int]:
    """Returns different ports that are free now, `wanted` ones first. With `held`, reserves them until it is closed.

    All are bound while choosing, so that they differ.
    """
    others = iter(random.sample(PORTS, 500))
    with contextlib.ExitStack() as bound:
        found = []
        for first in [*wanted, *[None] * count][:count]:
            candidates = itertools.chain(() if first is None else (first,), others)
            port = next((port for port in candidates if _try_bind(host, port, bound, held)), None)
            if port is None:
                raise RunFailed(
                    f"{host}: none of 500 ports in {PORTS} is free; give another --host, or stop the programs that use them"
                )
            found.append(port)
    return found


def _try_bind(host: str, port: int, bound: contextlib.ExitStack, held: contextlib.ExitStack | None) -> bool:
    sock = bound.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    # As the roles do, so that closed connections of an earlier run do not count.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()
        # The role binds the TCP port seconds later. Until then the UDP port of that number shows other runs that it is taken:
        # two runs started together would choose the same port, and the second would talk to the first one's coordinator.
        (bound if held is None else held).enter_context(
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        ).bind((LOOPBACK, port))
    except OSError:
        return False
    return True
