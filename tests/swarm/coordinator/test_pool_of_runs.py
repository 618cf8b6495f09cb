"""Several runs behind one address. tests/e2e/test_two_runs.py has real workers."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from small_swarm import CONFIG, SPEC, Node, refusal, signed_client

from shoal.swarm.coordinator.http import server
from shoal.swarm.coordinator.http.server import Hosting, run_pool
from shoal.wire.keys import Key
from shoal.wire.messages import OpenSession, RunList, Session
from shoal.wire.requirements import Capabilities, Needs
from shoal.wire.run_spec import RunSpec

BIG = SPEC.model_copy(update={"run": "big", "needs": Needs(memory_gb=80.0)})


def hosting(dir: Path, spec: RunSpec) -> Hosting:
    return Hosting(config=CONFIG, spec=spec, dir=dir / spec.run)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(server, "CACHE_S", 0.0)
    stop, ready, urls = threading.Event(), threading.Event(), []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    runs = [hosting(tmp_path, SPEC), hosting(tmp_path, BIG)]
    thread = threading.Thread(target=run_pool, args=(runs, "127.0.0.1", 0, stop, on_ready))
    thread.start()
    assert ready.wait(60)
    yield urls[0]
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def test_the_list_has_the_neediest_first(url: str) -> None:
    def listed() -> list[str]:
        runs = RunList.parse(httpx2.get(f"{url}/v1/runs").content).runs
        assert all(run.path == f"/runs/{run.run}" for run in runs)
        return [run.run for run in runs]

    assert listed() == ["small", "big"]
    node = Node(f"{url}/runs/small", Key.generate()).join()
    assert listed() == ["big", "small"]
    node.client.close()
    # A run's own address lists all runs, too.
    assert httpx2.get(f"{url}/runs/big/v1/runs").content == httpx2.get(f"{url}/v1/runs").content


def test_each_run_has_its_own_nodes_ledger_and_keys(url: str) -> None:
    node = Node(f"{url}/runs/big", Key.generate()).join()
    assert httpx2.get(f"{url}/runs/big/v1/nodes/{node.id}").is_success
    assert httpx2.get(f"{url}/runs/small/v1/nodes/{node.id}").status_code == 404
    keys = {httpx2.get(f"{url}{path}/v1/info").json()["run_key"] for path in ("", "/runs/small", "/runs/big")}
    assert len(keys) == 2
    heads = [httpx2.get(f"{url}/runs/{run}/v1/ledger/head").json()["body"] for run in ("small", "big")]
    assert [head["run"] for head in heads] == ["small", "big"]
    assert heads[0]["seq"] < heads[1]["seq"]
    # A request signed for one run's path counts for no other's.
    moved = signed_client(f"{url}/runs/small", node.client.key)
    assert refusal(moved.call, "GET", f"/v1/leases/{'0' * 32}", None, Session).code == "request.unknown_key"
    for client in (node.client, moved):
        client.close()


def test_a_path_without_prefix_belongs_to_the_first_run(url: str) -> None:
    assert httpx2.get(f"{url}/v1/info").json()["spec"]["run"] == "small"
    assert httpx2.get(f"{url}/readyz").is_success
    assert httpx2.get(f"{url}/").is_success
    assert httpx2.get(f"{url}/runs/big/").text == httpx2.get(f"{url}/").text
    answer = httpx2.get(f"{url}/runs/none/v1/info")
    assert (answer.status_code, answer.json()["code"]) == (404, "request.not_found")


def test_a_machine_that_does_not_fit_gets_no_session(url: str) -> None:
    node = Node(f"{url}/runs/big", Key.generate()).join()  # reports no capabilities, so it is not checked
    small = Capabilities(device="cpu", memory_gb=8.0, dtypes=("float32",), families=("llama",))
    ask = OpenSession(software="test", capabilities=small)
    refused = refusal(node.client.call, "POST", "/v1/session", ask, Session)
    assert refused.code == "request.unfit"
    assert "80 GB of memory, this machine has 8.0" in refused.problem.detail
    # Nothing changed: its session still counts.
    assert not node.beat().finished
    large = small.model_copy(update={"memory_gb": 80.0})
    ask = OpenSession(software="test", capabilities=large)
    assert node.client.call("POST", "/v1/session", ask, Session).epoch == node.epoch + 1
    node.client.close()


def test_two_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    runs = [hosting(tmp_path / "a", SPEC), hosting(tmp_path / "b", SPEC)]
    with pytest.raises(ValueError, match="different names: small, small"):
        run_pool(runs, "127.0.0.1", 0, threading.Event())
