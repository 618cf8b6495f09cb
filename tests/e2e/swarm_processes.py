"""Real processes on loopback, for tests that break them: a whole `shoal run` on a small run file, or one role."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from shoal.cli.run.addresses import free_ports
from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
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


LARGE_LEASES = {
    "samples_per_prompt": 16,
    "groups_per_step": 16,
    "prompts_per_lease": 8,
    "lease_s": 120.0,
    "claim_s": 60.0,
    "heartbeat_s": 3.0,
}
"""Settings of runs whose liars differ little from honest workers: small differences show in many rows."""

SHOAL = [sys.executable, "-m", "shoal"]


class Swarm:
    """One `shoal run`. A context manager that ends all its processes on exit."""

    def __init__(
        self,
        folder: Path,
        *,
        last_version: int = 12,
        relays: int = 2,
        workers: int = 2,
        lies: list[str] | None = None,
        deadline_s: float = 240.0,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / "run"
        self.file = folder / "e2e.toml"
        self.output_path = folder / "output.txt"
        text = RUN_FILE.format(
            last_version=last_version,
            relays=relays,
            workers=workers,
            lies=json.dumps(lies or []),
            deadline_s=deadline_s,
        )
        self.file.write_text(change(text, settings or {}))
        self.port = free_ports(1)[0]
        """A port of its own: two runs that start at the same time would both find the default one free."""
        self.process: subprocess.Popen[bytes] | None = None
        self.prefix: list[str] = []
        """The beginning of the command line, for a program that starts the run."""
        self.mark = {"SHOAL_E2E": secrets.token_hex(16)}
        """A mark in the environment of every process of this run, by which all of them can be found."""
        self._output_before = 0

    @property
    def command(self) -> list[str]:
        return [*SHOAL, "run", str(self.file), "--dir", str(self.folder), "--port", str(self.port)]

    def start(self, *options: str) -> "Swarm":
        """Starts the run, or continues it with "--resume"."""
        with self.output_path.open("ab") as output:
            self._output_before = output.tell()
            self.process = subprocess.Popen(
                [*self.prefix, *self.command, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | self.mark,
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
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- looking ------------------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """Returns the output of `shoal run` since its last start."""
        if not self.output_path.exists():
            return ""
        return self.output_path.read_bytes()[self._output_before :].decode(errors="replace")

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def url(self) -> str:
        """Returns the coordinator's URL, once the run has printed it."""

        def said() -> str | None:
            for line in self.output.splitlines()[::-1]:
                if "coordinator http://" in line:
                    return line.split("coordinator ")[1].split(",")[0]
            return None

        url: str = self.wait_for("the run to name its coordinator", said)
        return url

    def pids(self) -> dict[str, int]:
        path = self.folder / "pids.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def processes(self) -> set[int]:
        """Returns the live processes of this run, found by the variable that they inherit, and their children."""
        mark = "SHOAL_E2E={SHOAL_E2E}".format_map(self.mark).encode()
        own = {pid for pid in all_pids() if mark in environment_of(pid)}
        return {pid for pid in own | children_of(own) if is_alive(pid)}

    def stats(self) -> Stats | None:
        try:
            return Stats.parse(httpx2.get(f"{self.url}/v1/stats", timeout=5.0).raise_for_status().content)
        except httpx2.HTTPError:
            return None

    def ledger(self) -> list[LedgerEvent]:
        return list(read_ledger(self.url))

    def verdicts(self, node: str = "") -> list[dict[str, Any]]:
        """Returns the bodies of the ledger's verdicts, of one node or of all."""
        found = [event.body for event in self.ledger() if event.type == "verdict.given"]
        return [body for body in found if node in ("", body["node"])]

    def trained_leases(self) -> set[str]:
        """Returns the leases whose groups are in batches."""
        formed = [event for event in self.ledger() if event.type == "batch.formed"]
        return {group.split("-")[0] for event in formed for group in event.body["group_ids"]}

    def assert_only_accepted_work_is_trained_on(self) -> None:
        """Also asserts that nothing of the run's first worker was refused."""
        trained, verdicts = self.trained_leases(), self.verdicts()
        assert trained <= {body["lease_id"] for body in verdicts if body["code"] == ACCEPTED}
        codes = {body["code"] for body in verdicts if body["node"] == self.worker}
        assert ACCEPTED in codes and codes <= {ACCEPTED, "void.stale"}

    @property
    def worker(self) -> str:
        """Returns the node id of the run's first worker."""
        return Key.load(self.folder / "worker-1" / "node.key").public

    def invite(self) -> str:
        """Returns a new invitation."""
        key = self.folder / "coordinator" / "keys" / "admin.key"
        words = ("--reason", "a test", "--coordinator", self.url, "--key", str(key))
        return shoal("admin", "invite", *words).stdout.split("invitation: ")[1].split()[0]

    def wait_for(
        self, what: str, look: Callable[[], Any], *, deadline_s: float = 240.0, pause_s: float = 0.1
    ) -> Any:
        """Waits until `look` returns something true."""
        give_up_s = time.monotonic() + deadline_s
        while time.monotonic() < give_up_s:
            if found := look():
                return found
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(
                    f"the run ended with {self.process.returncode} while waiting for {what}:\n{self.output[-4000:]}"
                )
            time.sleep(pause_s)
        raise AssertionError(f"waited {deadline_s:.0f} s for {what}:\n{self.output[-4000:]}")

    def wait_for_version(self, version: int, deadline_s: float = 240.0) -> Stats:
        def reached() -> Stats | None:
            stats = self.stats()
            return (
                stats
                if stats and stats.newest_version is not None and stats.newest_version >= version
                else None
            )

        stats: Stats = self.wait_for(f"version {version}", reached, deadline_s=deadline_s)
        return stats

    def wait_for_versions(self, count: int) -> None:
        """Waits until this many more versions were published, so that everything that was ready has been trained on."""
        seen = self.stats()
        assert seen is not None and seen.newest_version is not None
        self.wait_for_version(seen.newest_version + count)

    def wait_until_over(self, deadline_s: float = 400.0) -> int:
        assert self.process is not None
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the run was not over after {deadline_s:.0f} s:\n{self.output[-4000:]}"
            ) from None

    # -- breaking -----------------------------------------------------------------------------------------

    def kill(self, role: str) -> int:
        """Kills one role with SIGKILL and returns its process id."""
        pid = self.pids()[role]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_when(self, role: str, what: str, look: Callable[[], Any]) -> None:
        """Kills a role with SIGKILL as soon as `look` returns something true."""
        self.wait_for(what, look, pause_s=0.001)
        self.kill(role)

    def pause(self, worker: str) -> None:
        """Makes a worker idle after its current lease, as `shoal pause` does: it would take the cores of tested processes."""
        (self.folder / worker).mkdir(parents=True, exist_ok=True)  # the worker may not have started yet
        (self.folder / worker / "paused").touch()

    def wait_until_back(self, role: str, killed: int) -> None:
        """Waits until the supervisor has restarted a role."""
        self.wait_for(f"{role} to be started again", lambda: self.pids().get(role, killed) != killed)

    def crash(self) -> None:
        """Kills `shoal run` itself with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Sends the signal to `shoal run` itself, as Ctrl-C does."""
        assert self.process is not None
        self.process.send_signal(number)


class Role:
    """One role, started by hand as an operator would: a context manager."""

    def __init__(self, folder: Path, *arguments: str, command: Sequence[str] = tuple(SHOAL)) -> None:
        """Starts `shoal` with these arguments, or another `command` that takes them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = arguments[0]
        self.log_path = folder / f"{self.name}-{secrets.token_hex(4)}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def __enter__(self) -> "Role":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, words: str, *, deadline_s: float = 60.0) -> None:
        give_up_s = time.monotonic() + deadline_s
        while words not in self.log:
            if time.monotonic() > give_up_s or self.process.poll() is not None:
                raise AssertionError(f"{self.name} never said {words!r}:\n{self.log[-4000:]}")
            time.sleep(0.05)

    def wait_until_over(self, deadline_s: float = 60.0) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} was not over after {deadline_s:.0f} s:\n{self.log[-4000:]}"
            ) from None


def shoal(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run(
        [*SHOAL, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, cwd=cwd
    )


def calibrated_swarm(
    folder: Path,
    *,
    workers: int = 1,
    lies: list[str] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Swarm:
    """Returns a bfloat16 run that calibrates itself and ends with its test."""
    swarm = Swarm(
        folder,
        last_version=100_000,
        relays=1,
        workers=workers,
        lies=lies,
        deadline_s=300.0,
        settings=LARGE_LEASES | dict(settings or {}),
    )
    text = swarm.file.read_text().replace('model = "tiny"', 'model = "tiny"\ncompute_dtype = "bfloat16"')
    swarm.file.write_text(text)
    return swarm


def change(text: str, settings: Mapping[str, object]) -> str:
    """Writes a run file with other values for keys that it has."""
    for key, value in settings.items():
        text, found = re.subn(rf"(?m)^{key} = .*$", f"{key} = {json.dumps(value)}", text)
        assert found == 1, f"{key} stands {found} times in the run file"
    return text


def read_ledger(url: str) -> Iterator[LedgerEvent]:
    seq = 1
    while True:
        page = httpx2.get(f"{url}/v1/ledger?from_seq={seq}&limit=500", timeout=10.0).raise_for_status().json()
        if not page:
            return
        for event in page:
            yield LedgerEvent.model_validate(event)
        seq = page[-1]["seq"] + 1


def all_pids() -> set[int]:
    return {int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()}


def environment_of(pid: int) -> set[bytes]:
    """Returns the command line of a process; empty if it has ended."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def children_of(parents: set[int]) -> set[int]:
    """Returns the processes with all their descendants."""
    parent_of = {pid: parent for pid in all_pids() if (parent := _parent(pid)) is not None}
    found: set[int] = set()
    while new := {pid for pid, parent in parent_of.items() if parent in parents | found} - found:
        found |= new
    return found


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
