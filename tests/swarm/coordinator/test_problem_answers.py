"""Every error is a problem we know: code, detail, remedy, the server's time; never a stack trace."""

import logging

import httpx2
import pytest
from small_swarm import SmallSwarm
from sqlalchemy import text

from shoal.wire.codes import CODES
from shoal.wire.messages import ProblemDetails


def test_routes_that_are_not_there(swarm: SmallSwarm) -> None:
    for method, path in (
        ("GET", "/v1/leases"),
        ("DELETE", "/v1/info"),
        ("POST", "/v1/objects/x"),
        ("GET", "/docs"),
        ("POST", "/v1/enrol/"),
    ):
        response = swarm.public.request(method, path)
        assert response.status_code == 404, path
        problem = ProblemDetails.parse(response.content)
        assert (problem.code, problem.fix) == ("request.not_found", CODES["request.not_found"].remedy)
        assert path in problem.detail


def test_too_early_says_when(swarm: SmallSwarm) -> None:
    response = swarm.public.get("/v1/origin")
    assert (response.status_code, response.headers["retry-after"]) == (425, "1")
    assert ProblemDetails.parse(response.content).retry_after_s == 1.0


@pytest.mark.on_socket
def test_an_error_of_ours_is_a_problem_and_a_log_line(
    swarm: SmallSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    with swarm.coordinator.database.group() as group:
        group.db.execute(text("DROP TABLE relays"))
    with caplog.at_level(logging.ERROR):
        response = swarm.public.get("/v1/stats")
    assert response.status_code == 500
    problem = ProblemDetails.parse(response.content)
    assert problem.code == "request.failed"
    assert "relays" not in response.text and "Traceback" not in response.text
    # SQLite and PostgreSQL name the error differently.
    told = ("GET /v1/stats failed: OperationalError", "GET /v1/stats failed: UndefinedTable")
    assert any(words in line for line in caplog.messages for words in told)
    # Later requests use a new connection: the error closed the old one.
    assert httpx2.get(f"{swarm.url}/v1/info").is_success


def test_health(swarm: SmallSwarm) -> None:
    assert swarm.public.get("/healthz").json() == {"run": "small", "ledger_seq": 1}


def test_bodies_that_are_not_records(swarm: SmallSwarm) -> None:
    node = swarm.node()
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"epoch": 1e400}', b'{"epoch": "1", "phase": ""}'):
        with pytest.raises(Exception, match=r"request\.malformed"):
            node.client.send("POST", "/v1/heartbeat", body)
