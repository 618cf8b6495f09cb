"""Single roles as an operator starts them, one process each: for runs that `shoal run` cannot start."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
from swarm_processes import RUN_FILE, SHOAL, change

from shoal.wire.delegation import write_relay_key
from shoal.wire.keys import Key
from shoal.wire.messages import Stats


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_file(path: Path, name: str, *, last_version: int = 2, **settings: object) -> Path:
    text = RUN_FILE.format(last_version=last_version, relays=1, workers=1, lies="[]", deadline_s=120.0)
    path.write_text(change(text.replace('"e2e"', f'"{name}"'), settings))
    return path


class Roles:
    """A context manager that ends all its processes on exit."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self._environment = folder, environment or {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Roles":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str, *words: object) -> "subprocess.Popen[bytes]":
        arguments = [*SHOAL, *map(str, words)]
        if "--dir" not in words:
            arguments += ["--dir", str(self.folder / name)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(self._environment),
            )
        return self.processes[name]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def start_trainer(self, url: str, file: Path, keys: Path, *, name: str = "") -> None:
        words = ("--keys", keys, "--port", free_port(), "--threads", "1")
        self.start(f"{name}trainer", "trainer", file, *_client(url), *words)

    def start_crew(self, url: str, file: Path, keys: Path, *, name: str = "") -> None:
        """Starts trainer, relay and validator of one run."""
        self.start_trainer(url, file, keys, name=name)
        port = free_port()
        key = write_relay_key(
            Key.load(keys / "relay.key"), f"http://127.0.0.1:{port}", self.folder / f"{name}relay-key"
        )
        relay = ("--key", key, "--port", port)
        self.start(f"{name}relay", "relay", *_client(url), *relay)
        validator = ("--key", keys / "validator.key", "--threads", "1")
        self.start(f"{name}validator", "validator", *_client(url), *validator)

    def wait_for(self, what: str, look: Callable[[], Any], *, deadline_s: float = 400.0) -> Any:
        """Waits until `look` returns something true; a failed request counts as false."""
        give_up_s = time.monotonic() + deadline_s
        while time.monotonic() < give_up_s:
            try:
                if found := look():
                    return found
            except httpx2.HTTPError:
                pass
            time.sleep(0.2)
        logs = "\n".join(f"== {name}\n{self.log(name)[-1500:]}" for name in self.processes)
        raise AssertionError(f"waited {deadline_s:.0f} s for {what}:\n{logs}")

    def wait_until_up(self, url: str, **options: Any) -> None:
        self.wait_for(f"{url} to answer", lambda: httpx2.get(f"{url}/healthz", **options).is_success)

    def wait_until_finished(self, url: str, **options: Any) -> Stats:
        def finished() -> Stats | None:
            stats = Stats.parse(httpx2.get(f"{url}/v1/stats", **options).raise_for_status().content)
            return stats if stats.finished else None

        stats: Stats = self.wait_for(f"the run at {url} to finish", finished)
        return stats


def _client(url: str) -> tuple[str, ...]:
    return ("--coordinator", url, "--deadline-s", "600")
