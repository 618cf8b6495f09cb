"""Hostile clients of the coordinator, each asserted on its code and on nothing having changed; docs/threats.md names them.

Clients whose lie is inside the file meet the validator: the page names their tests too.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_swarm import CONFIG, Node, SmallSwarm, manifest, refusal, report
from sqlalchemy import select

from shoal.swarm.coordinator.store.schema import metadata
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Receipt, Verdict
from shoal.wire.messages import (
    Abandon,
    AdminOrder,
    Announce,
    Appeal,
    AskLease,
    AskUpload,
    Claim,
    Enrol,
    Enrolled,
    Heartbeat,
    HeartbeatReply,
    LeaseStatus,
    Leave,
    ProblemDetails,
    Recorded,
    RelayReport,
    RevokeKey,
    Submit,
    Upload,
)
from shoal.wire.record import Record, Sealed, seal
from shoal.wire.request import Target, sign_request
from shoal.wire.run_spec import PROTOCOL

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs" / "threats.md"


def test_every_row_of_the_page_names_tests_that_exist() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    existing = set(re.findall(r"^(?:async )?def (test_\w+)", source, flags=re.MULTILINE))
    rows = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| (?!attack|who|setting|---|`)", line)
    ]
    assert len(rows) > 60
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        names = re.findall(r"`(test_\w+)`", cells[-1])
        assert names or "not stopped" in row, f"no test is named: {row}"
        assert existing.issuperset(names), set(names) - existing


# -- what must not change ---------------------------------------------------------------------------------


def everything(swarm: SmallSwarm) -> dict[str, Any]:
    """Returns every row of every table except nonces, and every stored file."""
    with swarm.coordinator.database.read() as db:
        kept = {
            table.name: sorted(map(str, db.execute(select(table)).all()))
            for table in metadata.sorted_tables
            if table.name != "nonces"
        }
    files = sorted(path.name for path in (swarm.dir / "objects").rglob("*") if path.is_file())
    return kept | {"files": files}


@contextmanager
def unchanged(swarm: SmallSwarm) -> Iterator[None]:
    before, head = everything(swarm), swarm.public.get("/v1/ledger/head").content
    yield
    after = everything(swarm)
    for name, rows in before.items():
        assert after[name] == rows, name
    assert swarm.public.get("/v1/ledger/head").content == head


@pytest.fixture
def running(swarm: SmallSwarm) -> SmallSwarm:
    swarm.start()
    return swarm


def raw(
    swarm: SmallSwarm,
    key: Key,
    path: str,
    body: Record | bytes = b"",
    *,
    method: str = "POST",
    signed: Callable[[dict[str, str]], dict[str, str]] = lambda headers: headers,
    now_s: float | None = None,
    aimed: dict[str, str] | None = None,
) -> str:
    """Sends a request with the changed signature `signed`, or one signed at another time or for the target `aimed`."""
    content = body if isinstance(body, bytes) else body.model_dump_json().encode()
    aim = {"method": method, "authority": swarm.authority, "path": path, "query": ""}
    target = Target(**(aim | (aimed or {})))
    headers = sign_request(key, target, content, now_s=time.time() if now_s is None else now_s)
    response = swarm.public.request(method, path, content=content, headers=signed(headers))
    return "ok" if response.is_success else ProblemDetails.parse(response.content).code


def beat(node: Node) -> Heartbeat:
    return Heartbeat(epoch=node.epoch, phase="testing")


# -- 1, 2, 29: signatures ---------------------------------------------------------------------------------


def test_1_a_captured_request_sent_again(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    body = AskLease(epoch=node.epoch).model_dump_json().encode()
    target = Target(method="POST", authority=swarm.authority, path="/v1/leases", query="")
    headers = sign_request(node.client.key, target, body, now_s=time.time())
    assert swarm.public.post("/v1/leases", content=body, headers=headers).is_success
    with unchanged(swarm):
        for _ in range(3):
            answer = swarm.public.post("/v1/leases", content=body, headers=headers)
            assert ProblemDetails.parse(answer.content).code == "request.replayed"


def test_2_a_signature_for_something_else(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    key = node.client.key
    with unchanged(swarm):
        for other in ({"path": "/v1/leave"}, {"method": "PUT"}, {"authority": "other:80"}, {"query": "a=1"}):
            assert raw(swarm, key, "/v1/heartbeat", beat(node), aimed=other) == "request.bad_signature"
        for tag in ("shoal/lease/1", "shoal/receipt/1", "shoal/delegation/1"):
            bent = raw(
                swarm,
                key,
                "/v1/heartbeat",
                beat(node),
                signed=lambda headers, tag=tag: {  # type: ignore[misc]
                    **headers,
                    "Signature-Input": headers["Signature-Input"].replace("shoal/req/1", tag),
                },
            )
            assert bent == "request.bad_signature"


def test_29_clocks_that_are_off(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    with unchanged(swarm):
        for off_s in (-10_000, -600, 600, 10_000, 1e9):
            answer = raw(swarm, node.client.key, "/v1/heartbeat", beat(node), now_s=time.time() + off_s)
            assert answer == "request.expired"


def test_a_signature_that_is_missing_or_broken(running: SmallSwarm) -> None:
    swarm, node, stranger = running, running.node(), Key.generate()
    with unchanged(swarm):
        key = node.client.key
        assert raw(swarm, key, "/v1/heartbeat", beat(node), signed=lambda headers: {}) == "request.unsigned"
        assert raw(swarm, stranger, "/v1/heartbeat", beat(node)) == "request.unknown_key"
        digest = "sha-256=:" + "A" * 43 + "=:"
        wrong = raw(
            swarm,
            key,
            "/v1/heartbeat",
            beat(node),
            signed=lambda headers: headers | {"Content-Digest": digest},
        )
        assert wrong == "request.wrong_digest"


# -- 3, 18, 20: other people's names ----------------------------------------------------------------------


def acts_on(lease: Lease, epoch: int) -> list[tuple[str, Record, type[Record]]]:
    digest = hashlib.sha256(b"mine").hexdigest()
    return [
        ("upload", AskUpload(epoch=epoch, num_bytes=4, sha256=digest), Upload),
        ("submit", Submit(epoch=epoch, num_bytes=4, sha256=digest, policy_version=0), Sealed[Receipt]),
        ("abandon", Abandon(epoch=epoch, reason="not mine"), LeaseStatus),
        ("appeal", Appeal(text="not mine"), Recorded),
    ]


def test_3_20_work_that_is_another_nodes(running: SmallSwarm) -> None:
    swarm, victim, thief = running, running.node(), running.node()
    delivered, held = victim.deliver(data=b"honest"), victim.lease()
    with unchanged(swarm):
        for lease in (held, delivered):
            for action, body, reply in acts_on(lease, thief.epoch):
                path = f"/v1/leases/{lease.lease_id}/{action}"
                assert refusal(thief.client.call, "POST", path, body, reply).code == "request.not_yours"
            assert refusal(thief.status, lease).code == "request.not_yours"
        # Identity is the key that signed: there is no field to write another's name into.
        for path, ask in (("/v1/heartbeat", beat(thief)), ("/v1/leave", Leave(epoch=thief.epoch))):
            named = json.dumps(ask.model_dump() | {"node": victim.id}).encode()
            assert raw(swarm, thief.client.key, path, named) == "request.malformed"
        sha256 = hashlib.sha256(b"honest").hexdigest()
        assert refusal(thief.client.fetch_object, sha256).code == "request.not_allowed"


def test_4_20_a_copy_costs_the_copier_alone(running: SmallSwarm) -> None:
    swarm, victim, thief = running, running.node(), running.node()
    honest, copied = victim.deliver(data=b"the same bytes"), thief.deliver(data=b"the same bytes")
    assert swarm.claim().lease == honest
    swarm.verdict(honest)
    second = swarm.claim()
    assert (second.lease, second.copy_of) == (copied, victim.id)
    swarm.verdict(copied, "reject.copied")
    views = {view.node: view for view in swarm.stats().nodes}
    assert (views[victim.id].trust, views[victim.id].accepted) == ("probation", 1)
    assert (views[thief.id].trust, views[thief.id].credit) == ("quarantined", 0)


def test_18_a_clone_of_a_node(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    clone = swarm.stranger(node.client.key)
    clone.join()
    with unchanged(swarm):
        for call in (node.beat, node.lease):
            assert refusal(call).code == "request.stale_epoch"
    clone.lease()


def test_18_a_key_is_revoked_by_its_owner_only(running: SmallSwarm) -> None:
    swarm, node, stranger = running, running.node(), Key.generate()
    with unchanged(swarm):
        assert raw(swarm, stranger, "/v1/keys/revoke", RevokeKey(node=node.id, reason="mine now")).startswith(
            "request.not_"
        )


# -- 5, 26: values that are claimed -----------------------------------------------------------------------


def test_5_rewards_and_credit_that_are_claimed(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    lease = node.lease()
    node.upload(lease, b"mine")
    ask = {
        "epoch": node.epoch,
        "num_bytes": 4,
        "sha256": hashlib.sha256(b"mine").hexdigest(),
        "policy_version": 0,
    }
    with unchanged(swarm):
        for claim in ({"rewards": [1.0]}, {"credit": 10**6}, {"output_tokens": 10**6}):
            body = json.dumps(ask | claim).encode()
            path = f"/v1/leases/{lease.lease_id}/submit"
            assert raw(swarm, node.client.key, path, body) == "request.malformed"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_per_s": "fast"},
        {"tokens_per_s": -1.0},
        {"tokens_per_s": 1e400},
        {"tokens_per_s": 1e13},
        {"phase": "x" * 301},
        {"phase": "\x00"},
        {"phase": {"a": 1}},
        {"policy_version": 2**53},
        {"policy_version": -1},
        {"epoch": "1"},
        {"label": "x"},
    ],
    ids=str,
)
def test_26_telemetry_of_other_types(running: SmallSwarm, changes: dict[str, Any]) -> None:
    swarm, node = running, running.node()
    with unchanged(swarm):
        body = json.dumps(beat(node).model_dump() | changes).encode()
        assert raw(swarm, node.client.key, "/v1/heartbeat", body) == "request.malformed"
    assert node.id not in swarm.public.get("/metrics").text


def test_26_relays_at_addresses_that_are_none(running: SmallSwarm) -> None:
    swarm = running
    with unchanged(swarm):
        for url in (
            "javascript:alert(1)",
            "http://",
            "http://a b",
            "file:///etc/passwd",
            "http://x/" + "a" * 300,
        ):
            body = json.dumps({"url": url, "versions": [0], "bytes_sent": 0}).encode()
            assert raw(swarm, swarm.relay.key, "/v1/relays", body) == "request.malformed"


# -- 11, 12, 13: uploads and submissions ------------------------------------------------------------------


def test_11_uploads_of_more_or_other_bytes(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    lease = node.lease()
    path = node.ask_upload(lease, b"declared").path
    sent = {b"DECLARED": "wrong_digest", b"decl": "incomplete", b"declared and more": "too_large"}
    with unchanged(swarm):
        for data, code in sent.items():
            answer = swarm.public.put(path, content=data)
            assert ProblemDetails.parse(answer.content).code == f"request.{code}"
        for size in (lease.max_bytes + 1, 2**53 - 1):
            ask = AskUpload(epoch=node.epoch, num_bytes=size, sha256="0" * 64)
            asked = f"/v1/leases/{lease.lease_id}/upload"
            assert refusal(node.client.call, "POST", asked, ask, Upload).code == "request.too_large"


def test_12_names_that_lead_elsewhere(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    lease = node.lease()
    with unchanged(swarm):
        for name in ("..%2f..%2fshoal.db", "0" * 64, "..", "%00", "a" * 2000):
            answer = swarm.public.put(f"/v1/objects/{name}", content=b"x")
            assert ProblemDetails.parse(answer.content).code == "request.not_found"
        for name in ("..%2f..%2fkeys%2frun.key", "0" * 64, "A" * 64):
            assert raw(swarm, swarm.validator.key, f"/v1/objects/{name}", method="GET") == "request.not_found"
        for digest in ("../../etc/passwd", "A" * 64, "", "0" * 63):
            body = json.dumps({"epoch": node.epoch, "num_bytes": 5, "sha256": digest}).encode()
            path = f"/v1/leases/{lease.lease_id}/upload"
            assert raw(swarm, node.client.key, path, body) == "request.malformed"
        assert raw(swarm, node.client.key, "/v1/leases/..%2fadmin", method="GET") == "request.not_found"


def test_13_versions_that_were_not_leased(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    lease = node.lease()
    node.upload(lease, b"stale")
    with unchanged(swarm):
        for version in (1, 7, 2**53 - 1):
            assert refusal(node.submit, lease, b"stale", version).code == "request.conflict"
        swarm.clock.ahead_s = swarm.config.lease_s + 1
        assert refusal(node.submit, lease, b"stale").code == "request.lease_closed"


def test_a_submission_of_what_was_never_sent(running: SmallSwarm) -> None:
    swarm, owner, thief = running, running.node(), running.node()
    owner.deliver(data=b"honest")
    lease = thief.lease()
    thief.ask_upload(lease, b"honest")
    with unchanged(swarm):
        assert refusal(thief.submit, lease, b"honest").code == "request.conflict"
        assert refusal(thief.submit, lease, b"something else").code == "request.conflict"


# -- 7, 16, 17: more than one's share ---------------------------------------------------------------------


def test_7_16_asking_again_gives_no_other_lease(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    held, before = node.sealed_lease(), everything(swarm)
    for _ in range(5):
        assert node.sealed_lease() == held
    after = everything(swarm)
    assert after.pop("nodes") != before.pop("nodes")  # only the time of the last request
    assert after == before


@pytest.mark.parametrize("admission", ["invite", "allow", "work", "stake"])
def test_17_keys_that_were_not_admitted(tmp_path: Path, admission: str) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"admission": admission, "work_bits": 30}))
    swarm.start()
    with unchanged(swarm):
        attempts: tuple[dict[str, Any], ...] = ({}, {"invite": "guess"}, {"work": "00"})
        for credentials in attempts:
            ask = Enrol(protocol=PROTOCOL, software="test", **credentials)
            client = swarm.stranger().client
            assert refusal(client.call, "POST", "/v1/enrol", ask, Enrolled).code == "request.not_admitted"
    swarm.close()


def test_21_floods_and_bodies_without_end(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"requests_per_s": 1.0}))
    swarm.start()
    node = swarm.node()
    with unchanged(swarm):
        codes = {raw(swarm, node.client.key, "/v1/leave", Leave(epoch=node.epoch + 1)) for _ in range(40)}
        assert codes == {"request.stale_epoch", "request.too_many"}
        assert raw(swarm, node.client.key, "/v1/heartbeat", b" " * (17 << 10)) == "request.too_large"
    swarm.close()


# -- 19, 23: other roles ----------------------------------------------------------------------------------


def test_19_23_a_worker_is_nothing_else(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    lease = node.deliver()
    verdict = Verdict(
        lease_id=lease.lease_id,
        code="accepted",
        detail="",
        rewards=(1.0,) * lease.num_rows,
        output_tokens=10**6,
    )
    announce = Announce(
        manifest=seal(manifest(1), node.client.key), origin_url="http://evil.example", report=report(1)
    )
    attempts: list[tuple[str, str, Record | None, type[Record]]] = [
        ("POST", "/v1/checks/claim", None, Claim),
        ("GET", f"/v1/checks/{lease.lease_id}", None, Claim),
        ("POST", f"/v1/checks/{lease.lease_id}/verdict", verdict, LeaseStatus),
        ("POST", "/v1/policies", announce, Recorded),
        ("POST", "/v1/relays", RelayReport(url="http://evil.example", versions=(0,)), HeartbeatReply),
        ("POST", "/v1/admin/ban", AdminOrder(reason="because", subject=node.id), Recorded),
        ("GET", "/v1/batches/0", None, Recorded),
    ]
    with unchanged(swarm):
        for method, path, body, reply in attempts:
            assert refusal(node.client.call, method, path, body, reply).code == "request.not_allowed"


def test_19_a_validator_that_judges_what_it_did_not_claim_or_twice(running: SmallSwarm) -> None:
    swarm, node = running, running.node()
    lease = node.deliver()
    with unchanged(swarm):
        assert refusal(swarm.verdict, lease).code == "request.conflict"
    swarm.claim()
    swarm.verdict(lease)
    with unchanged(swarm):
        assert refusal(swarm.verdict, lease, "reject.forged_proof").code == "request.conflict"
        swarm.verdict(lease)  # the same again: the same answer


def test_23_weights_that_the_run_key_did_not_sign(running: SmallSwarm) -> None:
    swarm = running
    with unchanged(swarm):
        for key, version in ((Key.generate(), 1), (swarm.trainer.key, 1)):
            told = Announce(
                manifest=seal(manifest(version), key), origin_url="http://127.0.0.1:1", report=report(version)
            )
            assert refusal(swarm.trainer.call, "POST", "/v1/policies", told, Recorded).code == (
                "request.bad_signature"
            )
        # Signed, but going back, skipping, or other weights for a version that is out.
        for version, weights in ((0, "f" * 64), (3, None)):
            assert refusal(swarm.announce, version, weights=weights).code == "request.conflict"
