"""Liars as real clients against a real swarm: each is refused with its own code, and nothing of theirs is trained on.

One swarm for the whole file: coordinator, trainer, relay, validator and an honest worker, all processes of their own.
Ten more workers lie by `shoal worker --lie KIND`; the other liars are clients in this process, which enrol,
lease and work like any worker up to the point where they lie.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
from liar_client import (
    ENDLESS,
    Liar,
    Made,
    aimed,
    bomb,
    columns_of,
    refusal,
    sha256_of,
    stream_forever,
    write_parquet,
)
from swarm_processes import Swarm, read_ledger

from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Verdict
from shoal.wire.ledger import LedgerEvent, LedgerHead, verify_ledger
from shoal.wire.messages import (
    Abandon,
    Claim,
    Heartbeat,
    Info,
    LeaseStatus,
    NodeView,
    ProblemDetails,
    RelayReport,
)
from shoal.wire.record import Record, Sealed
from shoal.wire.request import Target, sign_request
from shoal.wire.rollouts import RolloutTable, TableLimits, decode, encode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

EXPECTED = {
    "wrong-weights": "reject.wrong_computation",
    "stale-weights": "reject.wrong_computation",
    "forged-proof": "reject.forged_proof",
    "edited-prompt": "reject.edited_prompt",
    "other-prompts": "reject.other_prompts",
    "truncated": "reject.early_stop",
    "wrong-logprobs": "reject.wrong_logprobs",
    "hot-sampling": "reject.wrong_sampling",
    "other-seeds": "reject.wrong_sampling",
    "replay": "reject.replayed",
}
BEGIN_HONEST = {"stale-weights", "replay"}
"""Kinds whose first work is honest: they have no older work to send yet."""
ALSO_EXPECTED = {"replay": {"reject.wrong_lease", "reject.oversized_table"}}
"""A file that is sent again before it was accepted is no copy of accepted work yet: it only names another lease, and may
have more rows than this one."""
LIMITS = TableLimits(max_rows=64, max_prompt_tokens=4096, max_output_tokens=64, max_proof_bytes=4096)
BEAT = "/v1/heartbeat"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    torch.set_num_threads(1)
    swarm = Swarm(
        tmp_path_factory.mktemp("liars"),
        last_version=100_000,  # ends with the tests
        relays=1,
        workers=1,
        lies=list(EXPECTED),
        deadline_s=300.0,
        # A dozen processes on two cores are slow, and no test here is about slow workers: large
        # steps leave room for many leases and make versions last.
        settings={"groups_per_step": 96, "lease_s": 120.0, "claim_s": 60.0, "heartbeat_s": 5.0},
    )
    with swarm:
        yield swarm


@pytest.fixture
def enter(swarm: Swarm, tmp_path: Path) -> Iterator[Callable[[], Liar]]:
    """Returns a function that enrols a new node at each call."""
    liars: list[Liar] = []

    def enter() -> Liar:
        liars.append(Liar(swarm.url, tmp_path / f"liar-{len(liars)}"))
        return liars[-1]

    yield enter
    for liar in liars:
        liar.close()


Enter = Callable[[], Liar]


# -- what can be seen from outside ---------------------------------------------------------------------------


def ask(swarm: Swarm, path: str, reply: type[Record]) -> Record:
    return reply.parse(httpx2.get(swarm.url + path, timeout=30.0).raise_for_status().content)


def view(swarm: Swarm, node: str) -> NodeView:
    found = ask(swarm, f"/v1/nodes/{node}", NodeView)
    assert isinstance(found, NodeView)
    return found


def lying_processes(swarm: Swarm) -> dict[str, str]:
    """Returns the node id of each `--lie` worker. Worker 1 is honest."""
    folders = {lie: swarm.folder / f"worker-{number}" for number, lie in enumerate(EXPECTED, start=2)}
    return {lie: Key.load(folder / "node.key").public for lie, folder in folders.items()}


def codes_by_node(events: list[LedgerEvent]) -> dict[str, list[str]]:
    codes: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.type == "verdict.given":
            codes[event.body["node"]].append(event.body["code"])
    return codes


def traces_of(liar: Liar) -> list[LedgerEvent]:
    """Returns the ledger's events of a node."""
    events = liar.events_since_it_enrolled()
    return [event for event in events if liar.node in (event.actor, event.body.get("node"))]


def assert_refused(swarm: Swarm, liar: Liar, make: Callable[[Lease], Made], code: str) -> None:
    """Asserts that the file is refused with `code`, earns no credit and is counted against the node."""
    status = liar.deliver(make)
    assert (status.state, status.code) == ("rejected", code), status.detail
    assert status.credit == 0
    seen = view(swarm, liar.node)
    assert (seen.trust, seen.last_code, seen.rejected, seen.credit) == ("quarantined", code, 1, 0)


# -- workers that lie ----------------------------------------------------------------------------------------


def test_every_lying_worker_is_refused_with_its_own_code_and_ejected(swarm: Swarm) -> None:
    def ejected() -> dict[str, NodeView] | None:
        stats = swarm.stats()
        banned = {node.node: node for node in stats.nodes if node.trust == "banned"} if stats else {}
        return banned if len(banned) >= len(EXPECTED) else None

    banned = swarm.wait_for("every liar to be ejected", ejected, deadline_s=240.0)
    nodes = lying_processes(swarm)
    for lie, node in nodes.items():
        assert banned[node].last_code in {EXPECTED[lie], *ALSO_EXPECTED.get(lie, ())}, lie
    codes = codes_by_node(swarm.ledger())
    for lie, node in nodes.items():
        refused = [code for code in codes[node] if code != ACCEPTED]
        assert len(refused) == 2 and set(refused) <= {EXPECTED[lie], *ALSO_EXPECTED.get(lie, ())}, lie
        if lie not in BEGIN_HONEST:
            assert codes[node] == refused, lie
            assert banned[node].credit == 0


def test_honest_work_by_the_same_client_is_accepted(enter: Enter) -> None:
    """Shows that the other tests' refusals are caused by their lies and not by this client."""
    node = enter()
    status = node.deliver(node.made)
    assert (status.state, status.code) == ("accepted", ACCEPTED), status.detail
    assert status.credit > 0


# -- files ---------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_table(swarm: Swarm, enter: Enter) -> None:
    def noise(lease: Lease) -> Made:
        return Made(random.Random(lease.lease_id).randbytes(5000), lease.policies[-1].version)

    assert_refused(swarm, enter(), noise, "reject.malformed_file")


@pytest.mark.parametrize(
    ("dictionary", "max_bytes", "code"),
    [
        pytest.param(False, 100_000, "reject.oversized_table", id="60 million zeros"),
        # The format forbids dictionaries: with them a small page could decode to any size.
        pytest.param(True, 2_000, "reject.malformed_file", id="60 million zeros by a dictionary"),
    ],
)
def test_parquet_bombs(swarm: Swarm, enter: Enter, dictionary: bool, max_bytes: int, code: str) -> None:
    data = bomb(60_000_000, dictionary=dictionary)
    assert len(data) < max_bytes
    validator = swarm.pids()["validator-1"]
    assert_refused(swarm, enter(), lambda lease: aimed(data, lease), code)
    assert swarm.pids()["validator-1"] == validator, "the validator had to be started again"


def test_rows_in_another_order(swarm: Swarm, enter: Enter) -> None:
    """Rewards follow the order of rows: a worker that could choose the order could give an answer another one's reward."""
    liar = enter()

    def reordered(lease: Lease) -> Made:
        table = liar.work(lease)
        rows = tuple(sorted(table.rows, key=lambda row: (row.prompt_index, -row.sample_index)))
        version = table.policy_version
        return Made(write_parquet(columns_of(rows), lease_id=lease.lease_id, version=version), version)

    assert_refused(swarm, liar, reordered, "reject.malformed_file")


def test_an_answer_left_out(swarm: Swarm, enter: Enter) -> None:
    liar = enter()

    def shortened(lease: Lease) -> Made:
        table = liar.work(lease)
        return Made(encode(replace(table, rows=table.rows[1:])), table.policy_version)

    assert_refused(swarm, liar, shortened, "reject.incomplete_group")


# -- other people's work -------------------------------------------------------------------------------------


def test_another_nodes_file(swarm: Swarm, enter: Enter) -> None:
    """A copied file unchanged, encoded again, and with the copier's own lease id: three lies, three codes."""
    stolen = accepted_file(swarm)
    table = decode(stolen, LIMITS)

    def as_it_is(lease: Lease) -> Made:
        return Made(stolen, lease.policies[-1].version)

    def encoded_again(lease: Lease) -> Made:
        columns, version = columns_of(table.rows), table.policy_version
        data = write_parquet(columns, lease_id=table.lease_id, version=version)
        assert (
            data != stolen
            and replace(decode(data, LIMITS), made_by=table.made_by, replay=table.replay) == table
        )
        return Made(data, lease.policies[-1].version)

    def relabelled(lease: Lease) -> Made:
        version = lease.policies[-1].version
        rows = table.rows[: lease.num_rows]
        return Made(encode(RolloutTable(lease_id=lease.lease_id, policy_version=version, rows=rows)), version)

    thief = enter()
    # Only trainer and validator get files from the coordinator; the test reads this one from disk.
    assert refusal(thief.client.send, "GET", f"/v1/objects/{sha256_of(stolen)}") == "request.not_allowed"
    assert_refused(swarm, thief, as_it_is, "reject.copied")
    assert_refused(swarm, enter(), encoded_again, "reject.wrong_lease")
    assert_refused(swarm, enter(), relabelled, "reject.other_prompts")


def accepted_file(swarm: Swarm) -> bytes:
    """Returns the bytes of an accepted training submission of the honest worker."""
    honest = swarm.worker

    def found() -> bytes | None:
        events = [event for event in swarm.ledger() if event.body.get("node") == honest]
        leases = {e.body["lease_id"] for e in events if e.body.get("purpose") == "train"}
        accepted = {e.body["lease_id"] for e in events if e.body.get("code") == ACCEPTED}
        for event in events:
            if event.type == "submission.received" and event.body["lease_id"] in leases & accepted:
                sha256 = str(event.body["sha256"])
                return (swarm.folder / "coordinator" / "objects" / sha256[:2] / sha256).read_bytes()
        return None

    file: bytes = swarm.wait_for("an accepted submission of the honest worker", found)
    return file


def test_another_nodes_lease(swarm: Swarm, enter: Enter) -> None:
    owner, thief = enter(), enter()
    lease = owner.session.ask_lease()
    # The ledger is public, so every client knows the lease.
    assert any(event.body.get("lease_id") == lease.lease_id for event in traces_of(owner))
    path, data = f"/v1/leases/{lease.lease_id}", b"mine, all mine"
    giving_up = Abandon(epoch=thief.epoch, reason="it is not mine to give")
    before = traces_of(owner)
    assert refusal(thief.ask_upload, lease.lease_id, len(data), sha256_of(data)) == "request.not_yours"
    assert refusal(thief.submit, lease.lease_id, data, 0) == "request.not_yours"
    assert (
        refusal(thief.client.call, "POST", f"{path}/abandon", giving_up, LeaseStatus) == "request.not_yours"
    )
    assert refusal(thief.client.call, "GET", path, None, LeaseStatus) == "request.not_yours"
    assert traces_of(owner) == before
    assert owner.session.ask_status(lease.lease_id) is not None


def test_another_nodes_name(swarm: Swarm, enter: Enter) -> None:
    """A request in another node's name needs its signature, and a captured signature is already used."""
    victim, liar = enter(), enter()
    body = Heartbeat(epoch=victim.epoch, phase="impersonated").model_dump_json().encode()
    target = Target(method="POST", authority=victim.authority, path=BEAT)
    forged = sign_request(liar.client.key, target, body, now_s=time.time())
    forged["Signature-Input"] = forged["Signature-Input"].replace(liar.node, victim.node)
    assert post(swarm, BEAT, body, forged) == "request.bad_signature"
    captured = sign_request(victim.client.key, target, body, now_s=time.time())
    assert post(swarm, BEAT, body, captured) == "ok"
    before = traces_of(victim)
    assert post(swarm, BEAT, body, captured) == "request.replayed"
    assert traces_of(victim) == before


# -- requests ------------------------------------------------------------------------------------------------


def post(swarm: Swarm, path: str, body: bytes, headers: dict[str, str], method: str = "POST") -> str:
    """ "ok", or the code of the refusal."""
    response = httpx2.request(method, swarm.url + path, content=body, headers=headers, timeout=30.0)
    return "ok" if response.is_success else ProblemDetails.parse(response.content).code


def test_signatures_that_do_not_count_change_nothing(swarm: Swarm, enter: Enter) -> None:
    liar = enter()
    body = b'{"software": "a session nobody asked for"}'

    def signed(*, key: Key = liar.client.key, now_s: float | None = None, **aim: str) -> dict[str, str]:
        target = {"method": "POST", "authority": liar.authority, "path": "/v1/session"} | aim
        return sign_request(key, Target(**target), body, now_s=time.time() if now_s is None else now_s)

    good = signed()
    broken = good | {"Signature": signed(now_s=1e9)["Signature"]}
    other_host = signed(authority="swarm.example:80")
    before = traces_of(liar)
    refused = {
        "no signature": post(swarm, "/v1/session", body, {}),
        "a broken signature": post(swarm, "/v1/session", body, broken),
        "another body": post(swarm, "/v1/session", body.replace(b"nobody", b"no_one"), good),
        "expired": post(swarm, "/v1/session", body, signed(now_s=time.time() - 3600)),
        "from the future": post(swarm, "/v1/session", body, signed(now_s=time.time() + 3600)),
        "another path": post(swarm, "/v1/session", body, signed(path=BEAT)),
        "another spelling of the path": post(swarm, "/v1/%73ession", body, good),
        "another method": post(swarm, "/v1/session", body, signed(method="PUT")),
        "a query": post(swarm, "/v1/session?again=1", body, good),
        "another host": post(swarm, "/v1/session", body, other_host),
        "another host's name": post(swarm, "/v1/session", body, other_host | {"Host": "swarm.example:80"}),
        "an unknown key": post(swarm, "/v1/session", body, signed(key=Key.generate())),
    }
    assert refused == {
        "no signature": "request.unsigned",
        "a broken signature": "request.bad_signature",
        "another body": "request.wrong_digest",
        "expired": "request.expired",
        "from the future": "request.expired",
        "another path": "request.bad_signature",
        "another spelling of the path": "request.bad_signature",
        "another method": "request.bad_signature",
        "a query": "request.bad_signature",
        "another host": "request.bad_signature",
        "another host's name": "request.bad_signature",
        "an unknown key": "request.unknown_key",
    }
    assert traces_of(liar) == before
    # The session is still the first one, and these attempts did not use up the valid signature.
    liar.client.send("POST", BEAT, Heartbeat(epoch=liar.epoch, phase="").model_dump_json().encode())
    assert post(swarm, "/v1/session", body, good) == "ok"
    opened = traces_of(liar)
    assert len(opened) == len(before) + 1
    assert post(swarm, "/v1/session", body, good) == "request.replayed"
    assert traces_of(liar) == opened


def test_a_worker_is_no_validator_trainer_or_relay(swarm: Swarm, enter: Enter) -> None:
    liar = enter()
    lease = liar.session.ask_lease()
    praise = Verdict(
        lease_id=lease.lease_id, code=ACCEPTED, detail="excellent work", rewards=(1.0,) * lease.num_rows
    )
    report = RelayReport(url="http://127.0.0.1:9", versions=(0,))
    calls: list[tuple[str, str, Record | None]] = [
        ("POST", f"/v1/checks/{lease.lease_id}/verdict", praise),
        ("POST", "/v1/checks/claim", None),
        ("POST", "/v1/relays", report),
        ("GET", "/v1/batches/0", None),
        ("POST", "/v1/policies", None),
    ]
    for method, path, body in calls:
        assert refusal(liar.client.call, method, path, body, Claim) == "request.not_allowed", path


# -- uploads -------------------------------------------------------------------------------------------------


def test_uploads_of_more_than_was_declared(swarm: Swarm, enter: Enter) -> None:
    liar = enter()
    lease = liar.session.ask_lease()
    small = b"a small file"
    too_many = lease.max_bytes + 1
    assert refusal(liar.ask_upload, lease.lease_id, too_many, "0" * 64) == "request.too_large"
    assert refusal(liar.ask_upload, lease.lease_id, 2**53 - 1, "0" * 64) == "request.too_large"
    assert refusal(liar.submit, lease.lease_id, small, lease.policies[-1].version) == "request.conflict"
    path = liar.ask_upload(lease.lease_id, len(small), sha256_of(small)).path
    assert refusal(liar.client.put_bytes, path, bytes(len(small) + 1)) == "request.too_large"
    assert refusal(liar.client.put_bytes, path, bytes(8 << 20)) == "request.too_large"
    assert refusal(liar.client.put_bytes, path, bytes(len(small))) == "request.wrong_digest"
    assert refusal(liar.client.put_bytes, path[:-1], small) == "request.not_found"
    assert refusal(liar.submit, lease.lease_id, small, lease.policies[-1].version) == "request.conflict"
    stored = swarm.folder / "coordinator" / "objects"
    assert not (stored / sha256_of(small)[:2] / sha256_of(small)).exists()
    assert not list((stored / "incoming").glob(f"{path.rsplit('/', 1)[1]}*"))


@pytest.mark.parametrize("length", ["Transfer-Encoding: chunked", "Content-Length: 99999999999"])
def test_streams_without_end_are_cut(swarm: Swarm, enter: Enter, length: str) -> None:
    liar = enter()
    lease = liar.session.ask_lease()
    path = liar.ask_upload(lease.lease_id, 5, sha256_of(b"small")).path
    chunk = bytes(1 << 16)
    if "chunked" in length:
        chunk = f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
    for method, target in (("PUT", path), ("PUT", "/v1/objects/nothing"), ("POST", "/v1/session")):
        head = f"{method} {target} HTTP/1.1\r\nHost: {liar.authority}\r\n{length}\r\n\r\n"
        status, sent = stream_forever(liar.authority, head, chunk)
        assert sent < ENDLESS, f"{method} {target} was not cut"
        assert status in ("", "HTTP/1.1 413 Request Entity Too Large", "HTTP/1.1 404 Not Found"), status
    liar.client.put_bytes(path, b"small")


# -- and at the end ------------------------------------------------------------------------------------------


def test_nothing_of_theirs_was_trained_on(swarm: Swarm, enter: Enter) -> None:
    test_every_lying_worker_is_refused_with_its_own_code_and_ejected(swarm)
    seen = swarm.stats()
    assert seen is not None and seen.newest_version is not None
    swarm.wait_for_version(
        seen.newest_version + 2, deadline_s=240.0
    )  # so whatever was in the queue then has been used by now
    head = ask(swarm, "/v1/ledger/head", Sealed[LedgerHead])
    info = ask(swarm, "/v1/info", Info)
    assert isinstance(head, Sealed) and isinstance(info, Info)
    events = [event for event in read_ledger(swarm.url) if event.seq <= head.body.seq]
    assert verify_ledger(events, head, info.run_key) == head.body.seq

    verdicts = {event.body["lease_id"]: event for event in events if event.type == "verdict.given"}
    trained = [group for e in events if e.type == "batch.formed" for group in e.body["group_ids"]]
    assert len(trained) > 0 and len(set(trained)) == len(trained), "a group was trained on twice"
    assert {verdicts[group.split("-")[0]].body["code"] for group in trained} == {ACCEPTED}
    trained_nodes = {verdicts[group.split("-")[0]].body["node"] for group in trained}
    liars = lying_processes(swarm)
    assert trained_nodes.isdisjoint(node for lie, node in liars.items() if lie not in BEGIN_HONEST)

    honest = swarm.worker
    assert set(codes_by_node(events)[honest]) == {ACCEPTED}
    assert view(swarm, honest).trust == "trusted"
    # Credit equals accepted work exactly. The honest worker keeps earning during this check.
    credit = {node: view(swarm, node).credit for node in (honest, *liars.values())}
    later = swarm.ledger()
    for node, earned in credit.items():
        assert accepted_tokens(events, node) <= earned <= accepted_tokens(later, node)


def accepted_tokens(events: list[LedgerEvent], node: str) -> int:
    """Returns the tokens of accepted work, without what was revoked when the node was caught."""
    revoked = {id for event in events if event.type == "credit.revoked" for id in event.body["lease_ids"]}
    return sum(
        event.body["output_tokens"]
        for event in events
        if event.type == "verdict.given"
        and event.body["node"] == node
        and event.body["code"] == ACCEPTED
        and event.body["lease_id"] not in revoked
    )
