"""The signed client, against a real server that verifies each request."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from fastapi import FastAPI, Request, Response

from shoal.net.http_client import Refused, SignedClient, Unreachable, fetch_files
from shoal.net.http_server import Server, listen
from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.telemetry import Log
from shoal.wire.codes import CODES, Rejected
from shoal.wire.keys import Key
from shoal.wire.messages import AskLease, ProblemDetails, Session
from shoal.wire.record import Record
from shoal.wire.request import Target, verify_request

LOG = Log("test")
KEY = Key.from_seed(bytes(range(32)))


class Echo(Record):
    signer: str
    body: str
    query: str


@dataclass
class Counting:
    """Requests that the server received."""

    nonces: list[str] = field(default_factory=list)
    uploads: list[bytes] = field(default_factory=list)
    upload_headers: list[dict[str, str]] = field(default_factory=list)
    tries: int = 0


def problem(code: str, retry_after_s: float | None = None) -> Response:
    body = ProblemDetails(
        code=code,
        detail="because of the test",
        fix=CODES[code].remedy,
        retry_after_s=retry_after_s,
        server_time_s=time.time(),
    )
    return Response(
        body.model_dump_json(), status_code=CODES[code].status, media_type="application/problem+json"
    )


def make_app(seen: Counting) -> FastAPI:  # noqa: C901 - a list of routes
    app = FastAPI()

    @app.api_route("/deep/v1/echo", methods=["GET", "POST"])
    async def echo(request: Request) -> Response:
        body = await request.body()
        target = Target(
            method=request.method,
            authority=request.headers["host"],
            path=request.url.path,
            query=request.url.query,
        )
        try:
            signer = verify_request(request.headers, target, body, now_s=time.time())
        except Rejected as rejected:
            return problem(rejected.code)
        seen.nonces.append(signer.nonce)
        reply = Echo(signer=signer.key, body=body.decode(), query=request.url.query)
        return Response(reply.model_dump_json())

    @app.post("/v1/session")
    def session() -> Response:
        seen.tries += 1
        if seen.tries == 1:
            return problem("request.too_early", retry_after_s=0.01)
        if seen.tries == 2:
            return problem("request.too_many", retry_after_s=0.01)
        if seen.tries == 3:
            return problem("request.paused", retry_after_s=0.01)
        if seen.tries == 4:
            return Response("<html>bad gateway</html>", status_code=502)
        return Response('{"epoch": 7, "heartbeat_s": 5.0}')

    @app.post("/v1/banned")
    def banned() -> Response:
        seen.tries += 1
        return problem("request.banned")

    @app.post("/v1/garbage")
    def garbage() -> Response:
        return Response('{"epoch": "seven"}')

    @app.put("/v1/objects/{token}")
    async def put(token: str, request: Request) -> Response:
        seen.uploads.append(await request.body())
        seen.upload_headers.append(dict(request.headers))
        return problem("request.too_large") if token == "large" else Response("{}")

    @app.get("/v1/elsewhere")
    def elsewhere() -> Response:
        return Response(status_code=307, headers={"Location": "http://127.0.0.1:1/"})

    return app


@pytest.fixture
def seen() -> Counting:
    return Counting()


@pytest.fixture
def url(seen: Counting) -> Iterator[str]:
    server = Server(make_app(seen), listen("127.0.0.1", 0))
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.close()


@pytest.fixture
def client(url: str) -> Iterator[SignedClient]:
    client = SignedClient(url, KEY, log=LOG)
    yield client
    client.close()


def test_the_server_can_check_what_the_client_signed(url: str, seen: Counting) -> None:
    client = SignedClient(f"{url}/deep/", KEY, log=LOG)
    reply = client.call("POST", "/v1/echo", AskLease(epoch=3), Echo)
    assert reply == Echo(signer=KEY.public, body='{"epoch":3,"holds":null}', query="")
    reply = client.call("GET", "/v1/echo?a=1&b=x%20y", None, Echo)
    assert reply == Echo(signer=KEY.public, body="", query="a=1&b=x%20y")
    assert len(set(seen.nonces)) == 2
    client.close()


def test_a_refusal_names_reason_and_remedy(client: SignedClient) -> None:
    with pytest.raises(
        Refused, match=r"POST /v1/banned: request\.banned: because of the test \(read the ledger"
    ) as caught:
        client.call("POST", "/v1/banned", AskLease(epoch=1), Session)
    assert caught.value.code == "request.banned"


def test_call_until_retries_while_the_server_is_busy_or_broken(client: SignedClient, seen: Counting) -> None:
    session = client.call_until("a session", "POST", "/v1/session", None, Session, deadline_s=30)
    assert session.epoch == 7
    assert seen.tries == 5


def test_call_until_does_not_retry_other_refusals(client: SignedClient, seen: Counting) -> None:
    with pytest.raises(Refused):
        client.call_until("a ban", "POST", "/v1/banned", None, Session, deadline_s=30)
    assert seen.tries == 1


def test_an_answer_that_cannot_be_parsed_counts_as_unreachable(client: SignedClient) -> None:
    with pytest.raises(Unreachable, match=r"cannot parse the answer: Session\.epoch"):
        client.call("POST", "/v1/garbage", None, Session)
    with pytest.raises(Unreachable, match="HTTP 404 without a known problem"):
        client.call("POST", "/v1/nowhere", None, Session)


def test_redirects_are_not_followed(client: SignedClient) -> None:
    with pytest.raises(Unreachable, match="HTTP 307"):
        client.call("GET", "/v1/elsewhere", None, Session)


def test_an_unreachable_server() -> None:
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    client = SignedClient(f"http://127.0.0.1:{port}", KEY, log=LOG)
    with pytest.raises(Unreachable, match="ConnectError"):
        client.call("GET", "/v1/info", None, Session)
    with pytest.raises(DeadlinePassed, match=r"for the coordinator: GET .*ConnectError"):
        client.call_until("the coordinator", "GET", "/v1/info", None, Session, deadline_s=0.2)
    heard: list[Exception] = []
    with pytest.raises(DeadlinePassed):
        client.call_until(
            "the coordinator", "GET", "/v1/info", None, Session, deadline_s=0.2, heard=heard.append
        )
    assert heard
    assert all(isinstance(failure, Unreachable) for failure in heard)
    client.stop.set()
    with pytest.raises(Stopped):
        client.call_until("the coordinator", "GET", "/v1/info", None, Session, deadline_s=60)
    client.close()


def test_an_upload_has_a_length_and_no_signature(client: SignedClient, seen: Counting) -> None:
    data = bytes(range(256)) * 10_000  # more than two pieces
    client.put_bytes("/v1/objects/abc", data)
    assert seen.uploads == [data]
    assert seen.upload_headers[0]["content-length"] == str(len(data))
    assert "transfer-encoding" not in seen.upload_headers[0]
    assert "signature" not in seen.upload_headers[0]
    with pytest.raises(Refused, match=r"request\.too_large"):
        client.put_bytes("/v1/objects/large", b"x")


def test_two_threads_may_share_a_client(url: str, seen: Counting) -> None:
    client = SignedClient(f"{url}/deep", KEY, log=LOG)
    threads = [
        threading.Thread(target=lambda: [client.call("GET", "/v1/echo", None, Echo) for _ in range(10)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(seen.nonces)) == 20
    client.close()


@pytest.mark.parametrize(
    "url", ["", "swarm.example", "ftp://h:1", "http://", "http://u:p@h:1", "http://[::1"]
)
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="coordinator URL"):
        SignedClient(url, KEY, log=LOG)


def test_the_default_port_is_left_out_as_in_the_host_header() -> None:
    for url, authority in [
        ("http://Swarm.Example:80/x", "swarm.example"),
        ("https://swarm.example:443", "swarm.example"),
        ("http://swarm.example:8100", "swarm.example:8100"),
        ("http://[::1]:8100", "[::1]:8100"),
    ]:
        client = SignedClient(url, KEY, log=LOG)
        assert client._urls[0].authority == authority
        client.close()


class Downloads:
    """Writes files in place of a client that downloads them."""

    def download_until(self, what: str, sha256: str, path: Path, *, deadline_s: float) -> None:
        path.write_text(sha256)


def test_data_files_are_in_a_folder_that_other_users_do_not_see(tmp_path: Path) -> None:
    folder = tmp_path / "validator" / "data"
    fetch_files(cast("SignedClient", Downloads()), ["a" * 64], folder, deadline_s=1.0)
    assert (folder / ("a" * 64)).exists()
    assert folder.stat().st_mode & 0o777 == 0o700
