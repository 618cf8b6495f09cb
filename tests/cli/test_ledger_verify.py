"""`shoal ledger verify` against real coordinators: an honest one, ones whose books were changed, and servers that are none."""

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

from shoal.cli.commands import ledger
from shoal.cli.commands.ledger import audit_ledger
from shoal.net.http_client import SignedClient, Unreachable
from shoal.net.http_server import Server, listen
from shoal.net.waiting import Stopped
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.context import DATABASE_FILE
from shoal.swarm.coordinator.http.server import run_coordinator
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


@contextmanager
def coordinator(folder: Path) -> Iterator[str]:
    """A coordinator in `folder`; its URL."""
    stop, ready, urls = threading.Event(), threading.Event(), []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    arguments = (CoordinatorConfig(), SPEC, folder, "127.0.0.1", 0, stop, on_ready)
    thread = threading.Thread(target=run_coordinator, args=arguments)
    thread.start()
    try:
        assert ready.wait(30)
        yield urls[0]
    finally:
        stop.set()
        thread.join(30)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """The folder of a run with a handful of events."""
    folder = tmp_path / "coordinator"
    with coordinator(folder) as url:
        for _ in range(6):
            with closing(SignedClient(url, Key.generate(), log=Log("test"))) as client:
                client.call("POST", "/v1/enrol", Enrol(protocol=PROTOCOL, software="test"), Enrolled)
    return folder


@pytest.fixture(autouse=True)
def several_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "PAGE", 3)


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as db, db:
        for statement in statements:
            assert db.execute(statement).rowcount > 0


def audit(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with coordinator(folder) as url:
        code = audit_ledger(url, threading.Event())
    return code, capsys.readouterr().out


def test_honest_books(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = audit(books, capsys)
    assert code == 0
    key = Key.load(books / "keys" / "run.key").public
    assert said.startswith("good: 7 events, head ")
    assert f"signed by run key {key[:16]}\n" in said
    assert said.endswith("added up: 6 nodes and 0 leases; trust and credit are as shown for 6 nodes\n")


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
def test_books_that_were_changed(
    books: Path, statement: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(books, statement)
    code, said = audit(books, capsys)
    assert code == 1
    assert said.startswith(words)
    assert said.count("\n") == 1


# -- servers that say something else ----------------------------------------------------------------------


Answer = Callable[[str, bytes], bytes | None]


@contextmanager
def in_front_of(url: str, answer: Answer) -> Iterator[str]:
    """A server that passes on what the coordinator says, as `answer` changes it; None is a 404."""

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


def audit_through(folder: Path, answer: Answer) -> int:
    with coordinator(folder) as url, in_front_of(url, answer) as front:
        return audit_ledger(front, threading.Event())


def only(path: str, change: Callable[[Any], Any]) -> Answer:
    return lambda asked, body: json.dumps(change(json.loads(body))).encode() if asked == path else body


def test_events_kept_back(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    early = only("/v1/ledger", lambda page: [event for event in page if event["seq"] < 6])
    assert audit_through(books, early) == 1
    assert capsys.readouterr().out == "NOT GOOD: the ledger ends before event 6; its head says 7\n"


def test_a_head_that_nobody_signed(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shortened(head: Any) -> Any:
        return head | {"body": head["body"] | {"seq": 3}}

    assert audit_through(books, only("/v1/ledger/head", shortened)) == 1
    assert "the signature by" in capsys.readouterr().out

    other = Key.generate().public
    assert audit_through(books, only("/v1/ledger/head", lambda head: head | {"key": other})) == 1
    assert f"is signed by {other[:16]}, expected" in capsys.readouterr().out


@pytest.mark.parametrize("page", [["text"], [{"seq": 1}], {"events": []}, 7])
def test_pages_that_are_none(books: Path, page: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_through(books, only("/v1/ledger", lambda _: page)) == 1
    assert capsys.readouterr().out.startswith("NOT GOOD: ")


def test_a_page_that_never_gets_on(books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same events again and again are the wrong ones the second time."""
    first: list[bytes] = []

    def stuck(path: str, body: bytes) -> bytes:
        if path != "/v1/ledger":
            return body
        first.append(body)
        return first[0]

    assert audit_through(books, stuck) == 1
    assert "where 4 was expected" in capsys.readouterr().out


def test_a_server_that_is_no_coordinator(books: Path) -> None:
    with pytest.raises(
        Unreachable, match=r"does not answer as a coordinator does \(HTTP 404\); check the URL"
    ):
        audit_through(books, lambda path, body: None)
    with pytest.raises(Unreachable, match="does not answer as a coordinator does"):
        audit_through(books, lambda path, body: b"<html>welcome</html>")


def test_nobody_there() -> None:
    with pytest.raises(
        Unreachable, match=r"127\.0\.0\.1:1: ConnectError: .*check the URL, and that the coordinator"
    ):
        audit_ledger("http://127.0.0.1:1", threading.Event())


def test_an_audit_can_be_stopped(books: Path) -> None:
    stop = threading.Event()
    stop.set()
    with coordinator(books) as url, pytest.raises(Stopped):
        audit_ledger(url, stop)
