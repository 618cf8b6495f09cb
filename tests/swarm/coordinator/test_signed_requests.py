"""Authentication and authorisation. The lettered tests are the known holes of PRIME's signed requests, one by one."""

import json
import socket
import time
from collections.abc import Iterator, Mapping

import pytest
from small_swarm import Node, SmallSwarm, at_once, manifest, refusal
from sqlalchemy import func, select

from shoal.net.http_client import SignedClient
from shoal.swarm.coordinator.housekeeping import tidy
from shoal.swarm.coordinator.http.router import LARGE_BODY, SMALL_BODY
from shoal.swarm.coordinator.store.schema import nonces
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.messages import AskLease, Enrol, Heartbeat, ProblemDetails, RelayReport
from shoal.wire.record import seal
from shoal.wire.request import NONCE_KEPT_S, Target, content_digest, sign_request
from shoal.wire.run_spec import PROTOCOL

BEAT = "/v1/heartbeat"


def beat_body(node: Node) -> bytes:
    return Heartbeat(epoch=node.epoch, phase="testing").model_dump_json().encode()


def headers_for(swarm: SmallSwarm, node: Node, body: bytes, **changes: str) -> dict[str, str]:
    """Returns a valid signature of a heartbeat, or of the request that `changes` describes."""
    aim = {"method": "POST", "authority": swarm.authority, "path": BEAT, "query": ""} | changes
    return sign_request(node.client.key, Target(**aim), body, now_s=time.time())


def post(
    swarm: SmallSwarm, body: bytes, headers: Mapping[str, str], path: str = BEAT, method: str = "POST"
) -> str:
    """Returns "ok" or the code of the refusal. Every refusal is a problem with the status its code has."""
    response = swarm.public.request(method, path, content=body, headers=dict(headers))
    if response.is_success:
        return "ok"
    problem = ProblemDetails.parse(response.content)
    assert response.headers["content-type"] == "application/problem+json"
    assert abs(problem.server_time_s - swarm.clock()) < 10
    return problem.code


def test_a_good_signature_is_good(swarm: SmallSwarm) -> None:
    node = swarm.node()
    body = beat_body(node)
    assert post(swarm, body, headers_for(swarm, node, body)) == "ok"


def test_a_request_counts_once_for_as_long_as_its_signature_lives(swarm: SmallSwarm) -> None:
    """(a) PRIME's server forgot a nonce after 60 s and took its request again."""
    node = swarm.node()
    body = beat_body(node)
    headers = headers_for(swarm, node, body)
    assert post(swarm, body, headers) == "ok"
    for ahead_s in (0, 61, 300, 355):
        swarm.clock.ahead_s = ahead_s
        tidy(swarm.coordinator)
        assert post(swarm, body, headers) == "request.replayed"
    swarm.clock.ahead_s = 365
    assert post(swarm, body, headers) == "request.expired"
    swarm.clock.ahead_s = NONCE_KEPT_S + 1
    tidy(swarm.coordinator)
    assert post(swarm, body, headers) == "request.expired"
    with swarm.coordinator.database.read() as db:
        assert db.execute(select(func.count()).select_from(nonces)).scalar_one() == 0


def test_no_parameter_may_be_missing(swarm: SmallSwarm) -> None:
    """(a) PRIME's server accepted a request without a time stamp for ever."""
    node = swarm.node()
    body = beat_body(node)
    headers = headers_for(swarm, node, body)
    parts = headers["Signature-Input"].split(";")
    for name in ("created", "expires", "nonce", "keyid", "alg", "tag"):
        less = ";".join(part for part in parts if not part.startswith(f"{name}="))
        assert less != headers["Signature-Input"]
        assert post(swarm, body, headers | {"Signature-Input": less}) == "request.bad_signature"


def test_the_query_and_the_nonce_of_a_get_are_signed(swarm: SmallSwarm) -> None:
    """(b) PRIME's client signed only the path, so that one capture worked with ever new nonces."""
    node = swarm.node()
    path = f"/v1/leases/{'0' * 32}"
    headers = headers_for(swarm, node, b"", method="GET", path=path, query="a=1")
    assert post(swarm, b"", headers, f"{path}?a=2", "GET") == "request.bad_signature"
    assert post(swarm, b"", headers, path, "GET") == "request.bad_signature"
    fresh = headers | {"Signature-Input": headers["Signature-Input"].replace('nonce="', 'nonce="00')[:-2]}
    assert post(swarm, b"", fresh, f"{path}?a=1", "GET") == "request.bad_signature"
    # None of those attempts used up the nonce.
    assert post(swarm, b"", headers, f"{path}?a=1", "GET") == "request.not_found"
    assert post(swarm, b"", headers, f"{path}?a=1", "GET") == "request.replayed"


def test_method_path_and_host_are_signed(swarm: SmallSwarm) -> None:
    """(c) PRIME's signature was valid on any service that had the path."""
    node = swarm.node()
    body = AskLease(epoch=node.epoch).model_dump_json().encode()
    for changes in ({"method": "PUT"}, {"path": "/v1/leases"}, {"authority": "other.example:80"}):
        assert post(swarm, body, headers_for(swarm, node, body, **changes)) == "request.bad_signature"
    # A request made for another server, carried here with that server's name on it.
    headers = headers_for(swarm, node, body, authority="other.example:80") | {"Host": "other.example:80"}
    assert post(swarm, body, headers) == "request.bad_signature"
    headers = headers_for(swarm, node, body, path="/v1/heartbeat")
    assert post(swarm, body, headers, "/v1/%68eartbeat") == "request.bad_signature"


def test_a_request_acts_only_for_its_signer(swarm: SmallSwarm) -> None:
    """(d) PRIME's server acted on an address in the body without comparing it to the signer."""
    victim, other = swarm.node(), swarm.node()
    other.beat(policy_version=3)
    assert [view.policy_version for view in swarm.stats().nodes] == [None, 3]
    body = json.dumps({"epoch": other.epoch, "phase": "", "node": victim.id}).encode()
    assert post(swarm, body, headers_for(swarm, other, body)) == "request.malformed"


def test_a_key_has_one_spelling(swarm: SmallSwarm) -> None:
    """(e) PRIME's server counted quotas by the raw header, which another case of the same hex evaded."""
    node = swarm.node()
    body = beat_body(node)
    headers = headers_for(swarm, node, body)
    for name in ("Signature-Input", "Signature", "Content-Digest"):
        assert post(swarm, body, headers | {name: headers[name].upper()}) != "ok"
    shouted = headers["Signature-Input"].replace(node.id, node.id.upper())
    assert post(swarm, body, headers | {"Signature-Input": shouted}) == "request.bad_signature"


def test_no_other_signature_counts_as_a_request(swarm: SmallSwarm) -> None:
    """(f) PRIME's nodes signed any message that a peer sent, with the same prefix as requests."""
    node = swarm.node()
    body = beat_body(node)
    headers = headers_for(swarm, node, body)
    for tag in ("shoal/lease/1", "shoal/manifest/1", "shoal/req/2"):
        other = headers["Signature-Input"].replace("shoal/req/1", tag)
        assert post(swarm, body, headers | {"Signature-Input": other}) == "request.bad_signature"
    sealed = seal(manifest(0), node.client.key)
    assert post(swarm, body, headers | {"Signature": f"sig1=:{sealed.signature}:"}) == "request.bad_signature"


def test_a_digest_is_hex_before_it_is_anything(swarm: SmallSwarm) -> None:
    """(g) PRIME's server built a file path from the request. (Names of uploads are ours: see test_object_uploads.)"""
    swarm.start()
    node = swarm.node()
    path = f"/v1/leases/{node.lease().lease_id}/upload"
    for sha256 in ("../../etc/passwd", "A" * 64, "0" * 63, "0" * 65, "\x00" * 64, ""):
        body = json.dumps({"epoch": node.epoch, "num_bytes": 5, "sha256": sha256}).encode()
        assert post(swarm, body, headers_for(swarm, node, body, path=path), path) == "request.malformed"


def test_one_of_two_concurrent_requests_with_one_nonce_is_accepted(swarm: SmallSwarm) -> None:
    node = swarm.node()
    body = beat_body(node)
    for threads in (2, 2, 2, 8):
        headers = headers_for(swarm, node, body)
        outcomes = at_once(lambda headers=headers: post(swarm, body, headers), threads)
        assert sorted(outcomes) == ["ok"] + ["request.replayed"] * (threads - 1)


def test_a_refused_request_uses_up_its_nonce(swarm: SmallSwarm) -> None:
    # Otherwise a captured request could be replayed once the reason for its refusal is gone.
    node = swarm.node()
    body = AskLease(epoch=node.epoch).model_dump_json().encode()
    headers = headers_for(swarm, node, body, path="/v1/leases")
    assert post(swarm, body, headers, "/v1/leases") == "request.too_early"
    swarm.start()
    assert post(swarm, body, headers, "/v1/leases") == "request.replayed"
    assert swarm.events("lease.issued") == []


def test_the_body_is_signed(swarm: SmallSwarm) -> None:
    node = swarm.node()
    body = beat_body(node)
    headers = headers_for(swarm, node, body)
    other = body.replace(b"testing", b"tasting")
    assert post(swarm, other, headers) == "request.wrong_digest"
    assert post(swarm, other, headers | {"Content-Digest": content_digest(other)}) == "request.bad_signature"
    assert post(swarm, body, headers | {"Content-Digest": ""}) == "request.wrong_digest"
    assert post(swarm, body, {}) == "request.unsigned"


def test_a_duplicate_header_is_refused(swarm: SmallSwarm) -> None:
    node = swarm.node()
    body = beat_body(node)
    headers = list(headers_for(swarm, node, body).items())
    for name, value in headers:
        twice = swarm.public.post(BEAT, content=body, headers=[*headers, (name, value)])
        assert ProblemDetails.parse(twice.content).code == "request.bad_signature"


def test_a_wrong_clock_is_refused_with_the_servers_time(swarm: SmallSwarm) -> None:
    node = swarm.node()
    body = beat_body(node)
    target = Target(method="POST", authority=swarm.authority, path=BEAT)
    for offset_s in (-400, 400):
        headers = sign_request(node.client.key, target, body, now_s=time.time() + offset_s)
        assert post(swarm, body, headers) == "request.expired"


def test_a_body_is_capped_before_it_is_looked_at(swarm: SmallSwarm) -> None:
    # Unsigned on purpose: the size is refused first.
    assert post(swarm, b"x" * (SMALL_BODY + 1), {}) == "request.too_large"
    assert post(swarm, b"x" * (LARGE_BODY + 1), {}, "/v1/policies") == "request.too_large"

    def endless() -> Iterator[bytes]:
        for _ in range(SMALL_BODY):
            yield b"xx"

    response = swarm.public.post(BEAT, content=endless())  # chunked: no length to go by
    assert ProblemDetails.parse(response.content).code == "request.too_large"


@pytest.mark.on_socket
@pytest.mark.parametrize("length", [f"Content-Length: {LARGE_BODY}", "Transfer-Encoding: chunked"])
def test_a_large_body_is_read_only_from_keys_of_the_run(swarm: SmallSwarm, length: str) -> None:
    """Unsigned bodies of 4 MB on a few hundred connections would fill the memory. The refusal comes before a byte of the body."""
    node = swarm.node()
    target = Target(method="POST", authority=swarm.authority, path="/v1/policies")
    signed = sign_request(node.client.key, target, b"", now_s=time.time())
    for headers, code in (({}, "request.unsigned"), (signed, "request.not_allowed")):
        lines = [f"Host: {swarm.authority}", length, *(f"{name}: {value}" for name, value in headers.items())]
        host, port = swarm.authority.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall("\r\n".join(["POST /v1/policies HTTP/1.1", *lines, "", ""]).encode())
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
        assert ProblemDetails.parse(answer.partition(b"\r\n\r\n")[2]).code == code


def test_a_stranger_leaves_no_trace(swarm: SmallSwarm) -> None:
    stranger = swarm.stranger()
    assert refusal(stranger.beat).code == "request.unknown_key"
    with swarm.coordinator.database.read() as db:
        assert db.execute(select(func.count()).select_from(nonces)).scalar_one() == 0


def test_roles_go_by_key(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    claim = ("POST", "/v1/checks/claim", None, ProblemDetails)
    report = ("POST", "/v1/relays", RelayReport(url="http://evil.example", versions=()), ProblemDetails)
    batch = ("GET", "/v1/batches/0", None, ProblemDetails)
    stored = ("GET", f"/v1/objects/{'0' * 64}", None, ProblemDetails)
    beat = ("POST", BEAT, Heartbeat(epoch=1, phase=""), ProblemDetails)
    enrol = ("POST", "/v1/enrol", Enrol(protocol=PROTOCOL, software=""), ProblemDetails)
    asked: list[tuple[SignedClient, tuple[object, ...]]] = [
        *((node.client, call) for call in (claim, report, batch, stored)),
        *((swarm.validator, call) for call in (report, batch, beat, enrol)),
        *((swarm.trainer, call) for call in (report, claim, beat, enrol)),
        *((swarm.relay, call) for call in (stored, claim, batch, beat, enrol)),
    ]
    for client, call in asked:
        assert refusal(client.call, *call).code == "request.not_allowed", call


def test_another_protocol_is_refused_with_the_supported_one(swarm: SmallSwarm) -> None:
    stranger = swarm.stranger()
    ask = Enrol(protocol=PROTOCOL + 1, software="future")
    refused = refusal(stranger.client.call, "POST", "/v1/enrol", ask, ProblemDetails)
    assert refused.code == "request.outdated"
    assert f"protocol {PROTOCOL}" in refused.problem.detail


def test_enrolling_again_changes_nothing(swarm: SmallSwarm) -> None:
    node = swarm.node()
    node.join()
    assert len(swarm.events("node.enrolled")) == 1
    assert [event.body["epoch"] for event in swarm.events("session.opened")] == [1, 2]


@pytest.mark.on_socket
def test_a_signed_client_against_the_wrong_name(swarm: SmallSwarm) -> None:
    """A coordinator answers only to its configured names; localhost is none of them here."""
    key = Key.generate()
    client = SignedClient(swarm.url.replace("127.0.0.1", "localhost"), key, log=Log("test"))
    ask = Enrol(protocol=PROTOCOL, software="test")
    assert refusal(client.call, "POST", "/v1/enrol", ask, ProblemDetails).code == "request.bad_signature"
    client.close()
