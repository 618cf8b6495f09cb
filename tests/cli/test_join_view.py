"""The lines that `shoal join` shows at a terminal, from a status file and the coordinator's answers."""

import io
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from shoal.cli.commands.join import JOINED
from shoal.cli.main import main
from shoal.cli.ui import join_view
from shoal.cli.ui.join_view import JoinView, Transfer
from shoal.rollout.worker.heartbeat import Activity, WorkerStatus
from shoal.wire.keys import Key
from shoal.wire.messages import Info, NodeView

INFO = cast("Info", SimpleNamespace(newest_version=4, spec=SimpleNamespace(run="small", last_version=9)))


def node(**changes: object) -> NodeView:
    values = {
        "credit": 1000,
        "accepted": 3,
        "rejected": 0,
        "void": 1,
        "trust": "probation",
        "last_code": None,
    }
    return cast("NodeView", SimpleNamespace(**(values | {"last_detail": ""} | changes)))


def view_of(folder: Path, answers: list[tuple[Info, NodeView | None] | None]) -> tuple[JoinView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=200)
    view = JoinView(
        folder, lambda: answers.pop(0) if answers else None, console, url="http://h:1", stop=threading.Event()
    )
    return view, out


def test_a_download_shows_bytes_speed_and_remaining_time() -> None:
    transfer = Transfer()
    assert transfer.describe(0, 0, 1_000_000_000, 10.0) == "[....................] version 0: 0 of 1,000 MB"
    said = transfer.describe(0, 250_000_000, 1_000_000_000, 15.0)
    assert said == "[#####...............] version 0: 250 of 1,000 MB, 50.0 MB/s, about 15 s left"
    assert transfer.describe(1, 0, 83_000, 16.0) == "[....................] version 1: 0.00 of 0.08 MB"


def test_before_the_first_answer(tmp_path: Path) -> None:
    view, _ = view_of(tmp_path, [])
    lines = view.lines(os.getpid(), view._began_s)
    assert lines[0] == "http://h:1: no answer yet, 0 s here"
    assert lines[1] == "starting" and "none yet" in lines[2] and "B of memory, 0.0 MB of disk" in lines[3]


def test_what_it_does_and_earns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = {
        "phase": "generating with version 4: 1 of 8 rows",
        "tokens_per_s": 812.4,
        "fetching": [5, 10**6, 10**7],
    }
    (tmp_path / "status.json").write_text(json.dumps(status))
    monkeypatch.setattr(join_view, "ASK_S", 0.0)
    view, _ = view_of(tmp_path, [(INFO, node()), (INFO, node(credit=2200, accepted=5))])
    with view:
        view.poll(os.getpid())
        view.poll(os.getpid())
    lines = view.lines(os.getpid(), view._began_s + 3600)
    assert lines[0] == "small at http://h:1: version 4 of 9, 60 min here"
    assert lines[1].startswith("[##..................] version 5: 1 of 10 MB")
    assert lines[2] == "generating with version 4: 1 of 8 rows; 812 tokens/s"
    assert lines[3] == (
        "credit 2,200 (1,200 since you joined, about 1,200 an hour); accepted 5, refused 0, void 1; probation"
    )
    assert lines[5].startswith("p pause after this lease, q stop; log: ")


def test_a_new_node_has_earned_all_its_credit_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_view, "ASK_S", 0.0)
    view, _ = view_of(tmp_path, [(INFO, None), (INFO, node())])
    with view:
        view.poll(os.getpid())
        view.poll(os.getpid())
    assert "credit 1,000 (1,000 since you joined)" in view.lines(os.getpid(), view._began_s + 9)[2]


def test_keys_pause_continue_and_stop(tmp_path: Path) -> None:
    view, _ = view_of(tmp_path, [])
    view._obey("p")
    assert (tmp_path / "paused").exists() and view.lines(1, 0.0)[-1].startswith("p continue")
    view._obey("p")
    assert not (tmp_path / "paused").exists()
    view._obey("q")
    assert view._stop.is_set()


def test_a_refusal_is_said_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_view, "ASK_S", 0.0)
    refused = node(rejected=1, last_code="reject.wrong_computation", last_detail="row 3\x1b[2J")
    view, out = view_of(tmp_path, [(INFO, refused)])
    with view:
        view.poll(os.getpid())
    said = out.getvalue()
    assert "refused: the proofs do not match" in said and "what to do: " in said and "\x1b[2J" not in said


def test_the_status_of_a_worker_names_the_download() -> None:
    status = WorkerStatus()
    status.note_fetched(3, 5_000_000, 20_000_000)
    status.begin(Activity.FETCHING)
    assert status.phase == "waiting for weights: version 3, 5 of 20 MB"
    assert status.describe()["fetching"] == (3, 5_000_000, 20_000_000)
    status.note_fetched(3, 20_000_000, 20_000_000)
    assert status.describe()["fetching"] is None


def test_pausing_a_node_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Key.load_or_create(tmp_path / "node.key")
    (tmp_path / JOINED).write_text(json.dumps({"coordinator": "http://127.0.0.1:1"}))
    assert main(["pause", "--dir", str(tmp_path)]) == 0
    assert f"no worker runs in {tmp_path}; the next one starts paused" in capsys.readouterr().out
    assert (tmp_path / "paused").exists()
    assert main(["pause", "--off", "--dir", str(tmp_path)]) == 0
    assert "not paused any more" in capsys.readouterr().out and not (tmp_path / "paused").exists()
