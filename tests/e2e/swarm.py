"""A whole run as real processes on loopback, for tests that break it: `shoal run` on a small run file."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from shoal.wire.ledger import LedgerEvent
from shoal.wire.messages import Stats

RUN_FILE = """
[run]
name = "e2e"
model = "tiny"
last_version = {last_version}
[task]
name = "sort"
options = {{ length = 4, partial = 0.5 }}
[sampling]
max_new_tokens = 8
samples_per_prompt = 8
[trainer]
learning_rate = 3e-4
supervised_steps = 15
row_tokens = 64
rows_per_micro_batch = 32
[coordinator]
groups_per_step = 8
prompts_per_lease = 4
lease_s = 20.0
claim_s = 10.0
heartbeat_s = 1.0
eval_every = 10
eval_prompts = 8
eval_samples = 2
[local]
relays = {relays}
workers = {workers}
lies = {lies}
deadline_s = {deadline_s}
"""


class Swarm:
    """One `shoal run`. Use as a context manager: whatever happens, its processes are gone afterwards."""

    def __init__(
        self,
        folder: Path,
        *,
        last_version: int = 12,
        relays: int = 2,
        workers: int = 2,
        lies: list[str] | None = None,
        deadline_s: float = 120.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / "run"
        self.file = folder / "e2e.toml"
        self.output_path = folder / "output.txt"
        self.file.write_text(
            RUN_FILE.format(
                last_version=last_version,
                relays=relays,
                workers=workers,
                lies=json.dumps(lies or []),
                deadline_s=deadline_s,
            )
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> "Swarm":
        command = [
            sys.executable,
            "-m",
            "shoal.cli",
            "run",
            str(self.file),
            "--dir",
            str(self.folder),
            *options,
        ]
        with self.output_path.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        return self

    def __enter__(self) -> "Swarm":
        return self.start()

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    # -- looking ------------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def url(self) -> str:
        """The coordinator's, once the run has said it."""

        def said() -> str | None:
            for line in self.output.splitlines()[::-1]:
                if "coordinator http://" in line:
                    return line.split("coordinator ")[1].split(",")[0]
            return None

        return self.wait_for("the run to name its coordinator", said, deadline_s=60.0)

    def pids(self) -> dict[str, int]:
        path = self.folder / "pids.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def stats(self) -> Stats | None:
        try:
            return Stats.parse(httpx.get(f"{self.url}/v1/stats", timeout=5.0).content)
        except httpx.HTTPError:
            return None

    def ledger(self) -> list[LedgerEvent]:
        return list(read_ledger(self.url))

    def wait_for(self, what: str, look: Callable[[], Any], *, deadline_s: float = 120.0) -> Any:
        """Until `look` returns something true."""
        give_up_s = time.monotonic() + deadline_s
        while time.monotonic() < give_up_s:
            if found := look():
                return found
            if self.process is not None and self.process.poll() not in (None, 0):
                raise AssertionError(
                    f"the run ended with {self.process.returncode} while waiting for {what}:\n{self.output[-4000:]}"
                )
            time.sleep(0.1)
        raise AssertionError(f"waited {deadline_s:.0f} s for {what}:\n{self.output[-4000:]}")

    def wait_for_version(self, version: int, deadline_s: float = 120.0) -> Stats:
        def reached() -> Stats | None:
            stats = self.stats()
            return (
                stats
                if stats and stats.newest_version is not None and stats.newest_version >= version
                else None
            )

        stats: Stats = self.wait_for(f"version {version}", reached, deadline_s=deadline_s)
        return stats

    def wait_until_over(self, deadline_s: float = 240.0) -> int:
        assert self.process is not None
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the run was not over after {deadline_s:.0f} s:\n{self.output[-4000:]}"
            ) from None

    # -- breaking -----------------------------------------------------------------------------------------

    def kill(self, role: str) -> int:
        """kill -9 one role; its process id."""
        pid = self.pids()[role]
        os.kill(pid, signal.SIGKILL)
        return pid


def read_ledger(url: str) -> Iterator[LedgerEvent]:
    seq = 1
    while True:
        page = httpx.get(f"{url}/v1/ledger?from_seq={seq}&limit=500", timeout=10.0).raise_for_status().json()
        if not page:
            return
        for event in page:
            yield LedgerEvent.model_validate(event)
        seq = page[-1]["seq"] + 1


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
