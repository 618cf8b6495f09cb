"""Public routes need no key: what they compute over whole tables is cached, and each address may ask only so often."""

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx2
import pytest
from in_process import InProcessTransport
from small_swarm import SPEC, SmallSwarm, at_once
from sqlalchemy import Engine, event

from shoal.net.http_server import Server, listen
from shoal.swarm.coordinator.http import live_page, server
from shoal.swarm.coordinator.http.server import LEDGER_PAGES, RunApp, RunPool
from shoal.swarm.coordinator.store import ledger_chain
from shoal.swarm.coordinator.views import page_snapshot, stats
from shoal.wire.messages import ProblemDetails, RunList, Stats, StepReport


@pytest.fixture
def public(swarm: SmallSwarm) -> httpx2.Client:
    """Returns a client of an app that caches as in production."""
    app = RunApp(swarm.coordinator, cache_s=0.3)
    return httpx2.Client(base_url=swarm.url, transport=InProcessTransport(lambda: app))


def test_a_costly_answer_is_computed_once_in_a_while(
    swarm: SmallSwarm, public: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    compute = stats.stats

    def counted(*given: Any) -> Any:
        computed.append(1)
        return compute(*given)

    monkeypatch.setattr(stats, "stats", counted)
    swarm.start()
    before = Stats.parse(public.get("/v1/stats").content)
    swarm.node()
    for _ in range(5):
        assert Stats.parse(public.get("/v1/stats").content) == before
    assert len(computed) == 1
    time.sleep(0.35)
    assert len(Stats.parse(public.get("/v1/stats").content).nodes) == 1
    assert len(computed) == 2


def test_the_view_of_one_node_reads_no_verdicts_of_others(swarm: SmallSwarm) -> None:
    node, statements = swarm.node(), list[str]()

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        swarm.public.get(f"/v1/nodes/{node.id}").raise_for_status()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    of_verdicts = [statement for statement in statements if "FROM verdicts" in statement]
    assert of_verdicts and all("verdicts.node IN" in statement for statement in of_verdicts)


def test_a_part_of_the_curve_is_computed_once_for_all_viewers(
    swarm: SmallSwarm, public: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, compute = [], page_snapshot.make_curve

    def counted(steps: list[StepReport]) -> Any:
        computed.append(1)
        return compute(steps)

    swarm.start()
    public.get("/v1/page")
    monkeypatch.setattr(live_page, "make_curve", counted)
    monkeypatch.setattr(live_page.Feed, "_refresh", AsyncMock())  # no next snapshot during this test
    for _ in range(5):
        assert public.get("/v1/curve?first=1&last=9").status_code == 200
    assert len(computed) == 1
    public.get("/v1/curve?first=2&last=9")
    assert len(computed) == 2


def test_one_address_may_ask_for_the_runs_of_a_pool_only_so_often(
    swarm: SmallSwarm, slowly: RunApp, tmp_path: Path
) -> None:
    other = SmallSwarm(tmp_path / "other", spec=SPEC.model_copy(update={"run": "other"}))
    pool = RunPool([slowly, other.app])
    with httpx2.Client(base_url=swarm.url, transport=InProcessTransport(lambda: pool)) as client:
        answers = [client.get("/v1/runs") for _ in range(20)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(RunList.parse(answers[0].content).runs) == 2 and refused
    assert ProblemDetails.parse(refused[0].content).code == "request.too_many"
    other.close()


@pytest.fixture
def slowly(swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch) -> RunApp:
    """Returns an app that lets an address ask once every ten seconds, after one question."""
    monkeypatch.setattr(server, "COSTLY_PER_S", 0.1)
    return RunApp(swarm.coordinator, cache_s=0.3)


def ask(swarm: SmallSwarm, app: RunApp, path: str, addresses: list[str]) -> list[int]:
    codes = []
    for address in addresses:
        with httpx2.Client(base_url=swarm.url, transport=InProcessTransport(lambda: app, address)) as client:
            codes.append(client.get(path).status_code)
    return codes


@pytest.mark.parametrize("path", ["/v1/stats", "/v1/history", "/v1/runs", "/v1/curve", "/metrics"])
def test_one_address_may_ask_only_so_often(swarm: SmallSwarm, slowly: RunApp, path: str) -> None:
    with httpx2.Client(base_url=swarm.url, transport=InProcessTransport(lambda: slowly)) as client:
        answers = [client.get(path) for _ in range(20)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert answers[0].status_code == 200 and refused
        problem = ProblemDetails.parse(refused[0].content)
        assert problem.code == "request.too_many" and problem.retry_after_s
        assert client.get("/healthz").status_code == 200


def test_one_address_may_look_at_pages_of_nodes_only_so_often(swarm: SmallSwarm, slowly: RunApp) -> None:
    swarm.start()
    codes = ask(swarm, slowly, f"/v1/nodes/{swarm.node().id}/page", ["198.51.100.7"] * 20)
    assert codes[0] == 200 and 429 in codes


def test_a_computer_with_many_ipv6_addresses_is_one_asker(swarm: SmallSwarm, slowly: RunApp) -> None:
    codes = ask(swarm, slowly, "/v1/stats", [f"2001:db8::{number:x}" for number in range(20)])
    assert codes[0] == 200 and 429 in codes


def test_a_customer_with_many_ipv6_networks_is_one_asker(swarm: SmallSwarm, slowly: RunApp) -> None:
    codes = ask(swarm, slowly, "/v1/stats", [f"2001:db8:0:{number:x}::1" for number in range(20)])
    assert codes[0] == 200 and 429 in codes


def test_readers_of_the_ledger_wait_for_each_other(
    swarm: SmallSwarm, public: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, 16 readers took a heartbeat from 20 ms to 150 to 830 ms."""
    reading, most, read = threading.Semaphore(LEDGER_PAGES), list[bool](), ledger_chain.read_page

    def counted(*given: Any) -> Any:
        most.append(reading.acquire(blocking=False))
        time.sleep(0.01)
        found = read(*given)
        reading.release()
        return found

    monkeypatch.setattr(ledger_chain, "read_page", counted)
    swarm.start()
    answers = at_once(lambda: public.get("/v1/ledger").status_code, 8)
    assert answers == [200] * 8 and most == [True] * 8


@pytest.mark.parametrize("as_pool", [False, True])
def test_a_server_that_stops_leaves_no_threads(swarm: SmallSwarm, as_pool: bool) -> None:
    swarm.start()
    lease = swarm.node().lease()

    def own_threads() -> set[int]:
        return {
            thread.ident or 0
            for thread in threading.enumerate()
            if thread.name.startswith(("disk", "writer"))
        }

    before = own_threads()
    app = RunApp(swarm.coordinator)
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = Server(RunPool([app]) if as_pool else app, sock)
    server.start()
    with httpx2.Client(base_url=url) as client:
        assert client.put(f"/v1/objects/{'0' * 64}", content=b"x").status_code == 404
        client.post(f"/v1/leases/{lease.lease_id}/upload", content=b"{}")
    assert own_threads() > before
    server.close()
    end_s = time.monotonic() + 10
    while own_threads() - before and time.monotonic() < end_s:
        time.sleep(0.02)
    assert own_threads() <= before
