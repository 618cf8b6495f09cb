"""Roles that are started one by one while another is missing: each says what it waits for, and gives up with a reason."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from roles import free_port
from swarm_processes import Role, Swarm

from shoal.wire.delegation import write_relay_key
from shoal.wire.keys import Key
from shoal.wire.messages import Stats

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NOWHERE = "http://127.0.0.1:1"
DEADLINE = 3


class Cast:
    """The roles of one run, each in a folder of its own."""

    def __init__(self, folder: Path, stage: ExitStack) -> None:
        self.folder, self._stage = folder, stage
        self.file = str(Swarm(folder / "file").file)
        self.keys = folder / "coordinator" / "keys"
        self.url = NOWHERE

    def start(self, name: str, *arguments: str) -> Role:
        return self._stage.enter_context(
            Role(self.folder / "logs", name, *arguments, "--dir", str(self.folder / name))
        )

    def coordinator(self) -> Role:
        role = self.start("coordinator", self.file, "--port", "0")
        role.wait_for_log("serving")
        self.url = role.log.split("url=")[1].split()[0]
        return role

    def client(self, name: str, *arguments: str, deadline_s: float = DEADLINE) -> Role:
        return self.start(name, *arguments, "--coordinator", self.url, "--deadline-s", str(deadline_s))

    def trainer(self, deadline_s: float = DEADLINE) -> Role:
        keys = ("--keys", str(self.keys))
        return self.client(
            "trainer", self.file, *keys, "--port", "0", "--threads", "1", deadline_s=deadline_s
        )

    def relay(self) -> Role:
        port = free_port()
        key = write_relay_key(
            Key.load(self.keys / "relay.key"), f"http://127.0.0.1:{port}", self.folder / "relay-key"
        )
        return self.client("relay", "--key", str(key), "--port", str(port))

    def worker(self, deadline_s: float = DEADLINE) -> Role:
        return self.client("worker", "--threads", "1", deadline_s=deadline_s)

    def validator(self) -> Role:
        return self.client("validator", "--key", str(self.keys / "validator.key"), "--threads", "1")

    def wait_until_it_waits_for(self, words: str) -> None:
        """Waits until the coordinator's page shows the sentence."""
        swarm = Swarm(self.folder / "file")
        swarm.wait_for(f"stats to wait for {words!r}", lambda: self.waiting_for().startswith(words))

    def waiting_for(self) -> str:
        return Stats.parse(httpx2.get(f"{self.url}/v1/stats", timeout=10.0).content).waiting_for


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    with ExitStack() as stage:
        yield Cast(tmp_path, stage)
    for log in (tmp_path / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()


def assert_gives_up(role: Role, *words: str) -> None:
    """Asserts exit status 3 and a last line that says what the role waited for, for how long, and what to do."""
    assert role.wait_until_over() == 3, role.log
    last = role.log.strip().splitlines()[-1]
    assert last.startswith("shoal: waited "), last
    for each in (*words, "start this role again", "--deadline-s"):
        assert each in last, last


def test_no_coordinator(cast: Cast) -> None:
    for name in ("run", "trainer", "relay", "validator"):
        Key.load_or_create(cast.keys / f"{name}.key")
    for role in (cast.trainer(), cast.relay(), cast.worker(), cast.validator()):
        assert_gives_up(role, "for the coordinator", f"{NOWHERE}/v1/info", "Connection refused")


def test_a_coordinator_that_goes_away(cast: Cast) -> None:
    coordinator = cast.coordinator()
    worker, validator = cast.worker(deadline_s=6), cast.validator()
    worker.wait_for_log("joined run")
    validator.wait_for_log("checking for run")
    coordinator.process.kill()
    coordinator.process.wait()
    for role in (worker, validator):
        assert_gives_up(role, cast.url, "Connection refused")


def test_one_role_after_the_other(cast: Cast) -> None:
    cast.coordinator()
    no_trainer = "the trainer has not published version 0"
    assert cast.waiting_for() == f"a policy: {no_trainer}"
    relay, validator = cast.relay(), cast.validator()
    assert_gives_up(cast.worker(), "for a lease", no_trainer)
    relay.wait_for_log(f"waiting for an answer from upstream: the coordinator names no origin: {no_trainer}")
    validator.wait_for_log("waiting for a submission to check: no submission waits to be checked")
    for role in (relay, validator):
        role.process.terminate()
        assert role.wait_until_over() == 130, role.log

    cast.wait_until_it_waits_for("a policy")
    trainer = cast.trainer(deadline_s=12)
    cast.wait_until_it_waits_for("relays: none live (0 of 1 known)")
    assert_gives_up(cast.worker(), "for a lease", "no relay is live, so nobody could fetch the weights")
    trainer.wait_for_log("waiting for rollouts for the step from version 0: relays: none live")
    assert_gives_up(trainer, "for rollouts for the step from version 0", "relays: none live")

    cast.relay()
    trainer = cast.trainer(deadline_s=6)
    cast.wait_until_it_waits_for("workers: none live")
    assert_gives_up(
        trainer, "for rollouts for the step from version 0", "workers: none live (0 of 1 enrolled)"
    )

    worker = cast.worker(deadline_s=120)
    cast.wait_until_it_waits_for("a validator: ")
    assert_gives_up(
        cast.trainer(), "for rollouts for the step from version 0", "a validator: ", "queued, none claimed"
    )
    assert worker.process.poll() is None, worker.log

    # All roles are present again, so the run continues.
    validator, trainer = cast.validator(), cast.trainer(deadline_s=60)
    trainer.wait_for_log("version announced  version=1 ", deadline_s=90)
    assert "resumed  version=0" in trainer.log
    for role in (trainer, validator, worker):
        role.process.terminate()
        assert role.wait_until_over() == 130, role.log
