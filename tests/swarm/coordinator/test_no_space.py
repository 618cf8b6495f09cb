"""A full disk: requests are refused with a reason, nothing is lost, the log stays short, and it goes on when there is room."""

import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_swarm import Node, SmallSwarm, refusal
from sqlalchemy.exc import OperationalError

from ledger_reader import read_ledger
from shoal.net.http_client import Refused
from shoal.swarm.coordinator.disk_full import report
from shoal.swarm.coordinator.housekeeping import run_once
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import ProblemDetails
from small_disk import fill, small_disk

DISK_BYTES = 8 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, DISK_BYTES) as folder:
        yield folder


def until_full(node: Node) -> Refused:
    """Writes until SQLite fails: at first it can reuse pages of its log."""
    for _ in range(1000):
        try:
            node.beat()
        except Refused as refused:
            return refused
    raise AssertionError("the disk never was full")


def test_a_full_disk(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    swarm = SmallSwarm(disk / "run")
    try:
        swarm.start()
        node = swarm.node()
        swarm.work(node)
        lease = node.lease()
        upload = node.ask_upload(lease, data := b"d" * (96 << 10))
        filler = fill(disk)

        refused = refusal(node.client.put_upload, upload, data)
        assert (refused.problem.code, refused.problem.retry_after_s) == ("request.no_space", 5.0)
        assert f"no space left in {disk / 'run'}" in refused.problem.detail
        assert not list((disk / "run" / "objects" / "incoming").iterdir())
        if swarm.coordinator.database.is_sqlite:
            assert until_full(node).problem.code == "request.no_space"
        assert f"no space left in {disk / 'run'}" in ready(swarm)
        for _ in range(3):
            run_once(swarm.coordinator, tidies=True)  # does not end by it
        assert "continues by itself" in ready(swarm)

        filler.unlink()
        run_once(swarm.coordinator, tidies=True)
        assert swarm.public.get("/readyz").status_code == 200
        node.client.put_upload(upload, data)
        node.submit(lease, data)
        assert swarm.claim().lease == lease
        swarm.verdict(lease)
        events = read_ledger(swarm.config.database or disk / "run" / "shoal.db")
        assert verify_chain(events)[0] == len(events)
        assert [event.type for event in events].count("verdict.given") == 2
    finally:
        swarm.close()
    told = caplog.text
    assert told.count("nothing can be written") == 1 and told.count("there is space again") == 1, told
    assert "Traceback" not in told


def test_other_errors_are_not_taken_for_it(swarm: SmallSwarm) -> None:
    full = sqlite3.connect(":memory:")
    full.execute("PRAGMA max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as found:
        full.execute("CREATE TABLE a AS SELECT hex(randomblob(100000)) AS b")
    wrapped = OperationalError("INSERT", {}, found.value)
    for error in (found.value, wrapped, OSError(errno.EDQUOT, "over quota")):
        assert f"no space left in {swarm.dir}" in (report(swarm.coordinator, error) or "")
    with pytest.raises(sqlite3.OperationalError) as found:
        full.execute("SELECT * FROM nowhere")
    full.close()
    for other in (found.value, OSError(errno.ENOENT, "gone"), ValueError("no room")):
        assert report(swarm.coordinator, other) is None


def ready(swarm: SmallSwarm) -> str:
    answer = swarm.public.get("/readyz")
    problem = ProblemDetails.parse(answer.content)
    assert (answer.status_code, problem.code) == (503, "request.not_ready")
    return problem.detail
