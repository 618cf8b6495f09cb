"""A whole run whose uploads go to an S3-compatible store, its coordinator killed on the way."""

from pathlib import Path

import pytest
from books import check_books, keep_head
from swarm_processes import Swarm

from s3_stores import CREDENTIALS, strict_store

pytestmark = [pytest.mark.s3, pytest.mark.timeout(600)]


def test_a_run_on_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS.secret_key)
    with strict_store() as store:
        swarm = Swarm(tmp_path, last_version=6, lies=["q8-weights"])
        text = swarm.file.read_text().replace("[coordinator]\n", f'[coordinator]\nstore = "{store.url}"\n')
        swarm.file.write_text(text)
        with swarm:
            swarm.wait_for_version(2)
            heads = [keep_head(swarm)]
            killed = swarm.kill("coordinator")
            swarm.wait_until_back("coordinator", killed)
            assert swarm.wait_until_over() == 0, swarm.output
            books = check_books(swarm, heads)
        files = [path for path in (swarm.folder / "coordinator" / "objects").rglob("*") if path.is_file()]
        assert files == []
        submitted = {event.body["lease_id"] for event in books.of("submission.received")}
        names = [name for name in store.names() if "probe-" not in name]
        assert len(names) >= len(submitted) >= 12  # six steps of two leases each
