"""Workers, validator and trainer behind a network that loses, doubles, delays and cuts: the run still finishes, and its books
add up."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from small_swarm import CONFIG, LOG, Node, SmallSwarm, manifest, report, signed_client, with_signal

from fault_proxy import FAULTS, FaultProxy
from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import NotYet, Stopped, wait_for
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.wire.keys import Key
from shoal.wire.lease import Verdict
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import Announce, Batch, Claim, LeaseStatus, Recorded
from shoal.wire.record import seal

pytestmark = pytest.mark.integration

STEPS = 3


class Clients:
    def __init__(self, swarm: SmallSwarm, url: str) -> None:
        self.swarm, self.url, self.done = swarm, url, threading.Event()

    def persist(self, action: Callable[..., Any], *arguments: Any) -> Any:
        def attempt() -> Any:
            try:
                return action(*arguments)
            except Unreachable as error:
                raise NotYet(str(error)) from None
            except Refused as refused:
                if refused.code not in ("request.too_early", "request.too_many", "request.incomplete"):
                    raise
                raise NotYet(str(refused), 0.02) from None

        return wait_for(
            "the coordinator", attempt, deadline_s=90, log=LOG, stop=self.done, first_delay_s=0.02
        )

    def work(self) -> None:
        node = Node(self.url, Key.generate())
        with closing(node.client):
            self.persist(node.join)
            while True:
                lease = self.persist(node.lease)
                data = lease.lease_id.encode()
                try:
                    self.persist(node.upload, lease, data)
                    self.persist(node.submit, lease, data).open(self.swarm.run_key.public)
                except Refused as refused:  # an upload was answered, and the answer lost
                    assert refused.code in ("request.conflict", "request.lease_closed"), refused

    def judge(self) -> None:
        client = signed_client(self.url, Key.load(self.swarm.dir / "keys" / "validator.key"))
        with closing(client):
            while True:
                claim = self.persist(client.call, "POST", "/v1/checks/claim", None, Claim)
                verdict = Verdict(
                    lease_id=claim.lease.lease_id,
                    code="accepted",
                    detail="",
                    rewards=with_signal(claim.lease),
                    output_tokens=claim.lease.num_rows,
                    checks=claim.checks,
                )
                path = f"/v1/checks/{claim.lease.lease_id}/verdict"
                self.persist(client.call, "POST", path, verdict, LeaseStatus)

    def train(self) -> list[str]:
        client = signed_client(self.url, Key.load(self.swarm.dir / "keys" / "trainer.key"))
        trained: list[str] = []
        with closing(client):
            for version in range(STEPS):
                batch = self.persist(client.call, "GET", f"/v1/batches/{version}", None, Batch)
                trained += [group.group_id for group in batch.groups]
                told = Announce(
                    manifest=seal(manifest(version + 1), self.swarm.run_key),
                    origin_url="http://127.0.0.1:1",
                    report=report(version + 1),
                )
                self.persist(client.call, "POST", "/v1/policies", told, Recorded)
        return trained


def test_the_run_finishes(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"claim_s": 2.0}), any_name=True, on_socket=True)
    swarm.start()
    proxy = FaultProxy(int(swarm.url.rsplit(":", 1)[1]), seed=11, share=0.4)
    clients = Clients(swarm, f"http://127.0.0.1:{proxy.port}")
    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(clients.work) for _ in range(3)] + [pool.submit(clients.judge)]
        trained = clients.train()
        clients.done.set()
        assert {type(loop.exception(60)) for loop in loops} == {Stopped}
    proxy.close()
    assert set(proxy.met) == set(FAULTS)  # it met every one of them
    assert len(trained) == len(set(trained)) == STEPS * swarm.config.groups_per_step
    events = swarm.ledger()
    verify_chain(events)
    books = replay(events)
    shown = {node.node: node for node in swarm.stats().nodes}
    for key, book in books.nodes.items():
        assert (shown[key].credit, shown[key].trust) == (book.credit, book.standing.trust.value)
    swarm.close()
