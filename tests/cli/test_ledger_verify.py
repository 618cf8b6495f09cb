"""`shoal ledger verify` against real coordinators: an honest one, ones whose ledger was changed, and other servers."""

import argparse
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from running_coordinator import running_coordinator
from shoal.cli.commands import audit
from shoal.net.http_client import SignedClient, Unreachable
from shoal.net.http_server import Server, listen
from shoal.net.waiting import Stopped
from shoal.swarm.coordinator.context import DATABASE_FILE
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.messages import Enrol, Enrolled
from shoal.wire.run_spec import PROTOCOL, RunSpec, Sampling, TaskSpec

SPEC = RunSpec(
    run="audited",
    task=TaskSpec(name="sort"),
    compute_dtype="float32",
    sampling=Sampling(max_new_tokens=8, samples_per_prompt=2),
    last_version=4,
)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Returns the folder of a run with seven events."""
    folder = tmp_path / "coordinator"
    with running_coordinator(folder, SPEC) as url:
        for _ in range(6):
            with closing(SignedClient(url, Key.generate(), log=Log("test"))) as client:
                client.call("POST", "/v1/enrol", Enrol(protocol=PROTOCOL, software="test"), Enrolled)
    return folder


@pytest.fixture(autouse=True)
def several_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "PAGE_EVENTS", 3)


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as db, db:
        for statement in statements:
            assert db.execute(statement).rowcount > 0


def verify_ledger(url: str, stop: threading.Event | None = None) -> int:
    options = argparse.Namespace(run=url, json=False)
    return audit.verify(options, stop or threading.Event())


def verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with running_coordinator(folder, SPEC) as url:
        code = verify_ledger(url)
    return code, capsys.readouterr().out


def test_an_honest_ledger_is_good(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = verify(run_folder, capsys)
    assert code == 0
    key = Key.load(run_folder / "keys" / "run.key").public
    assert said.startswith("good: 7 events, head ")
    assert f"signed by run key {key[:16]}\n" in said
    assert said.endswith(
        "recomputed 6 nodes and 0 leases from the events; trust and credit of all 6 nodes shown by the coordinator agree\n"
    )


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "UPDATE ledger SET body = replace(body, 'test', 'best') WHERE seq = 4",
            "NOT GOOD: ledger event 4 (node.enrolled) was changed: its hash does not match",
        ),
        ("UPDATE ledger SET time_s = time_s + 1 WHERE seq = 2", "NOT GOOD: ledger event 2 (node.enrolled)"),
        ("UPDATE ledger SET actor = hash WHERE seq = 7", "NOT GOOD: ledger event 7 (node.enrolled)"),
        ("DELETE FROM ledger WHERE seq = 3", "NOT GOOD: found ledger event 4 where 3 was expected"),
        ("UPDATE ledger SET hash = prev WHERE seq = 5", "NOT GOOD: ledger event 5 (node.enrolled)"),
    ],
)
def test_a_changed_ledger_is_reported(
    run_folder: Path, statement: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run_folder, statement)
    code, said = verify(run_folder, capsys)
    assert code == 1
    assert said.startswith(words)
    assert said.count("\n") == 1


# -- servers that change the answers ----------------------------------------------------------------------


ChangeAnswer = Callable[[str, bytes], bytes | None]


@contextmanager
def in_front_of(url: str, answer: ChangeAnswer) -> Iterator[str]:
    """Runs a proxy that changes the coordinator's answers with `answer`; None gives 404."""

    def pass_on(request: Request) -> Response:
        path = request.url.path
        original = httpx2.get(url + path, params=request.query_params).content
        changed = answer(path, original)
        return PlainTextResponse("no", 404) if changed is None else Response(changed)

    app = Starlette()
    app.add_route("/{path:path}", pass_on)
    server = Server(app, listen("127.0.0.1", 0))
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.close()


def verify_through(folder: Path, answer: ChangeAnswer) -> int:
    with running_coordinator(folder, SPEC) as url, in_front_of(url, answer) as front:
        return verify_ledger(front)


def only(path: str, change: Callable[[Any], Any]) -> ChangeAnswer:
    return lambda asked, body: json.dumps(change(json.loads(body))).encode() if asked == path else body


def test_missing_events_are_reported(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    early = only("/v1/ledger", lambda page: [event for event in page if event["seq"] < 6])
    assert verify_through(run_folder, early) == 1
    assert capsys.readouterr().out == "NOT GOOD: the ledger ends before event 6; its head says 7\n"


def test_a_head_without_the_runs_signature_is_reported(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shortened(head: Any) -> Any:
        return head | {"body": head["body"] | {"seq": 3}}

    assert verify_through(run_folder, only("/v1/ledger/head", shortened)) == 1
    assert "the signature by" in capsys.readouterr().out

    other = Key.generate().public
    assert verify_through(run_folder, only("/v1/ledger/head", lambda head: head | {"key": other})) == 1
    assert f"is signed by {other[:16]}, expected" in capsys.readouterr().out


@pytest.mark.parametrize("page", [["text"], [{"seq": 1}], {"events": []}, 7])
def test_pages_without_events_are_reported(
    run_folder: Path, page: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_through(run_folder, only("/v1/ledger", lambda _: page)) == 1
    assert capsys.readouterr().out.startswith("NOT GOOD: ")


def test_a_repeated_page_is_reported(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that always sends the first page would otherwise never end."""
    first: list[bytes] = []

    def stuck(path: str, body: bytes) -> bytes:
        if path != "/v1/ledger":
            return body
        first.append(body)
        return first[0]

    assert verify_through(run_folder, stuck) == 1
    assert "where 4 was expected" in capsys.readouterr().out


def test_another_web_server_is_named(run_folder: Path) -> None:
    with pytest.raises(
        Unreachable, match=r"does not answer like a coordinator \(/v1/info gives HTTP 404\); check the URL"
    ):
        verify_through(run_folder, lambda path, body: None)
    with pytest.raises(Unreachable, match="does not answer like a coordinator"):
        verify_through(run_folder, lambda path, body: b"<html>welcome</html>")


def test_a_refused_connection_is_named() -> None:
    with pytest.raises(
        Unreachable, match=r"127\.0\.0\.1:1: ConnectError: .*check the URL, and that the coordinator"
    ):
        verify_ledger("http://127.0.0.1:1")


def test_verifying_can_be_stopped(run_folder: Path) -> None:
    stop = threading.Event()
    stop.set()
    with running_coordinator(run_folder, SPEC) as url, pytest.raises(Stopped):
        verify_ledger(url, stop)
