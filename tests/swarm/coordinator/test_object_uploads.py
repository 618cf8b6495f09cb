"""Uploads: exactly the declared bytes, under a name of ours, complete or absent."""

import hashlib
import socket
from collections.abc import Iterator

import pytest
import small_swarm
from small_swarm import SmallSwarm, refusal

from shoal.net.http_client import Refused
from shoal.wire.messages import AskUpload, ProblemDetails, Upload


@pytest.fixture(autouse=True)
def of_the_folder() -> None:
    if small_swarm.STORE_URL:
        pytest.skip("test_both_stores.py has what holds of an object store")


def put(swarm: SmallSwarm, path: str, content: bytes | Iterator[bytes]) -> str:
    response = swarm.public.put(path, content=content)
    return "ok" if response.is_success else ProblemDetails.parse(response.content).code


def stored_files(swarm: SmallSwarm) -> list[str]:
    return sorted(path.name for path in (swarm.dir / "objects").rglob("*") if path.is_file())


def test_other_bytes_than_declared_are_refused(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    path = node.ask_upload(lease, b"declared").path
    assert path.startswith("/v1/objects/") and hashlib.sha256(b"declared").hexdigest() not in path
    assert put(swarm, path, b"DECLARED") == "request.wrong_digest"
    assert put(swarm, path, b"decl") == "request.incomplete"
    assert put(swarm, path, b"declared, and then some") == "request.too_large"
    assert put(swarm, path, iter([b"declared", b", and then some"])) == "request.too_large"
    assert stored_files(swarm) == []
    assert refusal(node.submit, lease, b"declared").code == "request.conflict"
    assert put(swarm, path, iter([b"decl", b"ared"])) == "ok"
    assert put(swarm, path, b"declared") == "ok"
    assert stored_files(swarm) == [hashlib.sha256(b"declared").hexdigest()]
    node.submit(lease, b"declared")
    assert put(swarm, path, b"declared") == "request.lease_closed"


@pytest.mark.on_socket
def test_a_huge_upload_is_refused_before_it_is_sent(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    ask = AskUpload(epoch=node.epoch, num_bytes=lease.max_bytes + 1, sha256="0" * 64)
    path = f"/v1/leases/{lease.lease_id}/upload"
    assert refusal(node.client.call, "POST", path, ask, Upload).code == "request.too_large"
    # And by its Content-Length, at once: not a byte of the body is waited for.
    target = node.ask_upload(lease, b"small").path
    with socket.create_connection(("127.0.0.1", int(swarm.authority.split(":")[1])), timeout=10) as raw:
        raw.sendall(
            f"PUT {target} HTTP/1.1\r\nHost: {swarm.authority}\r\nContent-Length: 99999999999\r\n\r\n".encode()
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_huge_upload_through_the_client_is_refused(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    path = node.ask_upload(node.lease(), b"small").path
    with pytest.raises(Refused) as refused:
        node.client.put_bytes(path, bytes(8 << 20))
    assert refused.value.code == "request.too_large"
    assert stored_files(swarm) == []


@pytest.mark.on_socket
def test_an_upload_that_breaks_off_leaves_nothing(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    data = b"x" * 1000
    path = node.ask_upload(lease, data).path
    raw = socket.create_connection(("127.0.0.1", int(swarm.authority.split(":")[1])), timeout=10)
    raw.sendall(f"PUT {path} HTTP/1.1\r\nHost: {swarm.authority}\r\nContent-Length: 1000\r\n\r\nxxx".encode())
    raw.close()
    node.upload(lease, data)
    node.submit(lease, data)
    swarm.reopen()
    assert stored_files(swarm) == [hashlib.sha256(data).hexdigest()]


def test_asking_again_gives_the_same_place_until_the_bytes_differ(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    first = node.ask_upload(lease, b"one")
    assert node.ask_upload(lease, b"one") == first
    second = node.ask_upload(lease, b"two")
    assert second != first
    assert put(swarm, first.path, b"one") == "request.not_found"
    assert put(swarm, second.path, b"two") == "ok"
    # Bytes that were declared later have not been sent, whatever was sent before.
    node.ask_upload(lease, b"three")
    assert refusal(node.submit, lease, b"two").code == "request.conflict"
    assert refusal(node.submit, lease, b"three").code == "request.conflict"


def test_names_are_ours(swarm: SmallSwarm) -> None:
    for name in ("0" * 64, "..%2f..%2fshoal.db", "anything", hashlib.sha256(b"").hexdigest()):
        assert put(swarm, f"/v1/objects/{name}", b"x") == "request.not_found"
    for name in ("0" * 64, "..%2f..%2fshoal.db", "..%2fshoal.db", "A" * 64):
        refused = refusal(swarm.validator.send, "GET", f"/v1/objects/{name}")
        assert refused.code == "request.not_found"


def test_a_digest_of_another_node_cannot_name_other_bytes(swarm: SmallSwarm) -> None:
    swarm.start()
    owner, thief = swarm.node(), swarm.node()
    owner.deliver(data=b"honest")
    lease = thief.lease()
    path = thief.ask_upload(lease, b"honest").path  # the digest and size of the owner's file
    assert put(swarm, path, b"HONEST") == "request.wrong_digest"
    digest = hashlib.sha256(b"honest").hexdigest()
    assert swarm.validator.send("GET", f"/v1/objects/{digest}").content == b"honest"
