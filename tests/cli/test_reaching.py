"""Commands with a URL where no coordinator answers: the error names the URL and what to do, without a traceback."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_contributor import shoal

from shoal.wire.keys import Key


class Page(BaseHTTPRequestHandler):
    """Answers 404 everywhere, or 200 everywhere like a captive portal."""

    answers_everything = False

    def do_GET(self) -> None:
        body = b"<html>welcome</html>"
        self.send_response(200 if self.answers_everything else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class Portal(Page):
    answers_everything = True


@pytest.fixture(params=["nobody", "a web server", "a portal"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "nobody":
        with socket.socket() as taken:  # bound, but not listening
            taken.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        return
    handler = Portal if request.param == "a portal" else Page
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


COMMANDS = {
    "top": ("top", "URL", "--json"),
    "report": ("report", "URL", "--out", "DIR/run.html"),
    "ledger": ("ledger", "verify", "URL"),
    "audit": ("audit", "URL", "--key", "DIR/some.key", "--dir", "DIR"),
    "eval": ("eval", "URL", "--prompts", "4"),
    "admin": (
        "admin",
        "pause",
        "--reason",
        "for a test of ours",
        "--coordinator",
        "URL",
        "--key",
        "DIR/some.key",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_errors_without_a_coordinator(
    name: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Key.load_or_create(tmp_path / "some.key")
    words = [word.replace("URL", url).replace("DIR", str(tmp_path)) for word in COMMANDS[name]]
    assert shoal(*words) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("shoal: ") and url in said.err and "check the URL" in said.err
    assert "developer.mozilla.org" not in said.err


def test_doctor_without_a_coordinator(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("doctor", url, "--dir", tmp_path / "node") == 1
    said = capsys.readouterr().out
    assert url in said.split("BAD  coordinator")[1] and "developer.mozilla.org" not in said


def test_a_missing_key_is_reported_before_any_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal("audit", "http://127.0.0.1:1", "--key", tmp_path / "none.key", "--dir", tmp_path) == 2
    assert "no key at" in capsys.readouterr().err
