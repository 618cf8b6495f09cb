"""Runs the commands of the docs unchanged beside a live run, in the order of the pages."""

import contextlib
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_processes import SHOAL, Role, Swarm

from docs_commands import ROOT, Command, commands_in_blocks
from shoal.cli.run.addresses import free_ports
from shoal.wire.keys import Key

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LIVE = [command for command in commands_in_blocks() if command.runs_live]
PAGES = sorted({command.page for command in LIVE})

EXIT_EJECTED = 4


class Reader:
    """A folder like the reader's: a clone with a finished demo, and a live run elsewhere."""

    def __init__(self, folder: Path, swarm: Swarm) -> None:
        self.folder, self.swarm = folder, swarm
        for name, target in (
            ("runs", ROOT / "runs"),
            ("out/demo", swarm.folder),
            ("keys", swarm.folder / "coordinator" / "keys"),
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(target)
        for page in (ROOT / "docs").rglob("*.md"):
            for title, text in re.findall(
                r'^```toml title="(.*?)"\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL
            ):
                (folder / title).write_text(text)
        write_reverse(self.folder)
        self.joined: subprocess.Popen[bytes] | None = None
        self.shown = b""
        """What `shoal join` showed at its terminal."""
        self.done: set[str] = set()
        """Runs a command that is on several pages once."""

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        return os.environ | self.swarm.mark | {"PYTHONPATH": ":".join(filter(None, paths))}

    def words(self, command: Command) -> list[str]:
        """Returns the command with its placeholders filled in."""
        text = re.sub(r"http://(HOST|127\.0\.0\.1):8700", self.swarm.url, command.text)
        node = self.folder / "shoal-node" / "node.key"
        if node.exists():
            text = re.sub(r"\bNODE\b", Key.load(node).public, text)
        words = shlex.split(text)[1:]
        if words[0] == "run" and "--dry-run" not in words:
            # The default port is for one run of the machine at a time.
            words += ["--port", str(free_ports(1)[0])]
        return words

    def type(self, command: Command) -> None:
        if command.text in self.done:
            return None
        self.done.add(command.text)
        words = self.words(command)
        if words[0] == "join":
            return self.join(words)
        done = subprocess.run(
            [*SHOAL, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        wanted = EXIT_EJECTED if "--lie" in words else 0
        assert done.returncode == wanted, f"{command.where}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        # Output that is not for a terminal has no colours, and an error is no traceback.
        assert "\x1b" not in done.stdout + done.stderr and "Traceback" not in done.stderr
        assert done.stdout or done.stderr, f"{command.where} said nothing"
        if words == ["pause"]:
            self.swarm.wait_for("the node to pause", self.is_paused)
        return None

    def is_paused(self) -> bool:
        stats, node = self.swarm.stats(), Key.load(self.folder / "shoal-node" / "node.key").public
        return stats is not None and any(
            "paused" in (one.phase or "") for one in stats.nodes if one.node == node
        )

    def join(self, words: list[str]) -> None:
        """Runs the command at a terminal, answers yes, and returns when its first file exists."""
        ours, theirs = os.openpty()
        self.joined = subprocess.Popen(
            [*SHOAL, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        said = read_until(ours, b"[y/N]")
        os.write(ours, b"y\n")
        try:
            self.swarm.wait_for(
                f"a first file of the node that joined:\n{said!r}",
                (self.folder / "shoal-node" / "last" / "lease.json").exists,
            )
        finally:
            # Somebody reads what the terminal shows, or the command would wait for its reader.
            threading.Thread(target=self.read_terminal, args=(ours,), daemon=True).start()

    def read_terminal(self, ours: int) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(ours, 65536):
                self.shown += piece

    def close(self) -> None:
        if self.joined is not None and self.joined.poll() is None:
            self.joined.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.joined.wait(30)
            self.joined.kill()


def read_until(terminal: int, words: bytes, deadline_s: float = 90.0) -> bytes:
    said, give_up_s = b"", time.monotonic() + deadline_s
    while words not in said:
        assert time.monotonic() < give_up_s, f"never said {words!r}: {said!r}"
        if select.select([terminal], [], [], 1.0)[0]:
            said += os.read(terminal, 4096)
    return said


def write_reverse(folder: Path) -> None:
    """Writes the example of docs/guides/researcher.md."""
    text = (ROOT / "docs" / "guides" / "researcher.md").read_text()
    source = re.search(r'^```python title="reverse_words.py"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    assert source is not None
    (folder / "reverse_words.py").write_text(source[1])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    # Enough versions to outlast the tests.
    swarm = Swarm(
        folder / "live",
        last_version=5000,
        relays=1,
        workers=1,
        deadline_s=600.0,
        settings={"groups_per_step": 64, "eval_every": 5000},
    )
    # An audit takes longer here than a version lasts.
    swarm.file.write_text(swarm.file.read_text().replace("[task]", "keep_versions = 500\n[task]", 1))
    with swarm:
        swarm.wait_for_version(2)
        swarm.pause("worker-1")  # from here on only the nodes of the commands work
        one = Reader(folder, swarm)
        yield one
        one.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page(reader: Reader, page: Path) -> None:
    for command in (command for command in LIVE if command.page == page):
        reader.type(command)
    if reader.joined is not None and page.name == "contributor.md":
        # Its last commands were `shoal leave` and `shoal remove`.
        assert reader.joined.wait(90) == 0
        assert b"Traceback" not in reader.shown and not (reader.folder / "shoal-node").exists()


def test_a_run_over_several_hosts(tmp_path: Path) -> None:
    """The block of docs/cli.md, all hosts being this one."""
    block = [
        command
        for command in commands_in_blocks()
        if command.page.name == "cli.md" and command.runs_elsewhere == "tests/e2e/test_docs_live.py"
    ]
    assert [command.words[1] for command in block] == [
        "coordinator",
        "trainer",
        "identity",
        "relay",
        "validator",
        "worker",
    ]
    (tmp_path / "runs").symlink_to(ROOT / "runs")
    ports = {name: str(free_port()) for name in ("8700", "8701", "8702")}

    def here(command: Command) -> list[str]:
        text = re.sub(r"host-[a-d]", "127.0.0.1", command.text).replace("0.0.0.0", "127.0.0.1")
        text = re.sub(r"\b870[012]\b", lambda found: ports[found[0]], text)
        # A role's default port, where the page leaves it out.
        default = {"trainer": "8701", "relay": "8702"}.get(command.words[1])
        return [*shlex.split(text)[1:], *(["--port", ports[default]] if default else [])]

    with contextlib.ExitStack() as stack, contextlib.chdir(tmp_path):
        for command in block:
            role = stack.enter_context(Role(tmp_path / "logs", *here(command)))
            if role.name == "identity":
                assert role.wait_until_over(60) == 0, role.log
            if role.name == "coordinator":
                keys = tmp_path / "run" / "coordinator" / "keys"
                wait_until(keys.joinpath("admin.key").exists, f"the run's keys:\n{role.log}")
                (tmp_path / "keys").symlink_to(keys)
            last = role
        last.wait_for_log("accepted", deadline_s=600.0)


def wait_until(look: object, what: str, deadline_s: float = 60.0) -> None:
    assert callable(look)
    give_up_s = time.monotonic() + deadline_s
    while not look():
        assert time.monotonic() < give_up_s, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
