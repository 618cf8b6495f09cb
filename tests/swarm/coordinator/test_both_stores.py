"""Uploads, the same on both stores: the coordinator's folder, and an S3-compatible store that the node writes to by itself."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from small_swarm import CONFIG, LOG, SPEC, Clock, Node, SmallSwarm, refusal

from s3_stores import CREDENTIALS, Store, careless_store, strict_store
from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.net.object_store import upload_headers
from shoal.net.s3_store import Credentials, S3Store
from shoal.swarm.coordinator.context import open_coordinator
from shoal.swarm.coordinator.http.router import STORE_QUESTIONS
from shoal.swarm.coordinator.leases.uploads import MOST_DECLARED, SWEEP_SLACK_S, sweep
from shoal.wire.lease import Lease
from shoal.wire.messages import Abandon, LeaseStatus, Upload

BOTH = ("folder", pytest.param("s3", marks=pytest.mark.s3))


@pytest.fixture(params=BOTH)
def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SmallSwarm]:
    store = request.getfixturevalue("s3").url if request.param == "s3" else ""
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"store": store}))
    swarm.start()
    yield swarm
    swarm.close()


def put(swarm: SmallSwarm, upload: Upload, data: bytes, declared: bytes) -> bool:
    """Send bytes with whatever headers make them look like the declared ones; whether the store took them."""
    if upload.url:
        headers = upload_headers(hashlib.sha256(declared).hexdigest(), len(declared))
        headers["content-length"] = str(len(data))
        return httpx2.put(upload.url, content=data, headers=headers).is_success
    return swarm.public.put(upload.path, content=data).is_success


def wait_to_declare(swarm: SmallSwarm) -> None:
    """Moves the clock to when other bytes may be declared for a lease."""
    swarm.clock.ahead_s += swarm.config.lease_s / MOST_DECLARED + 0.1


def sweep_up(swarm: SmallSwarm) -> None:
    """Runs the cleanup of an S3 store at a time when open uploads have expired."""
    if isinstance(swarm.coordinator.store, S3Store):
        late = replace(
            swarm.coordinator, clock=lambda: time.time() + swarm.config.lease_s + SWEEP_SLACK_S + 5
        )
        sweep(late, swarm.coordinator.store)


def objects(swarm: SmallSwarm) -> int:
    """Returns the number of stored objects of this run."""
    store = swarm.coordinator.store
    if isinstance(store, S3Store):
        return sum(len(page) for page in store.tokens(older_than_s=time.time() + 1e6))
    return sum(path.is_file() for path in (swarm.dir / "objects").rglob("*"))


def abandon(node: Node, lease: Lease) -> None:
    ask = Abandon(epoch=node.epoch, reason="test")
    node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", ask, LeaseStatus)


def test_exactly_the_declared_bytes(swarm: SmallSwarm) -> None:
    node = swarm.node()
    lease, data = node.lease(), b"declared"
    upload = node.ask_upload(lease, data)
    for other in (b"DECLARED", b"decl", b"declared, and then some", b""):
        assert not put(swarm, upload, other, declared=data), other
        assert refusal(node.submit, lease, data).code == "request.conflict"
    assert objects(swarm) == 0
    assert put(swarm, upload, data, declared=data)
    before = len(swarm.ledger())
    node.submit(lease, data)
    assert len(swarm.ledger()) == before + 1
    node.submit(lease, data)
    assert len(swarm.ledger()) == before + 1


def test_services_read_what_was_submitted(swarm: SmallSwarm) -> None:
    data = bytes(range(256)) * 300
    swarm.node().deliver(data=data)
    sha256 = hashlib.sha256(data).hexdigest()
    for reader in (swarm.validator, swarm.trainer):
        assert reader.fetch_object(sha256) == data
    assert refusal(swarm.validator.fetch_object, "0" * 64).code == "request.not_found"
    assert refusal(swarm.validator.fetch_object, "..%2fshoal.db").code == "request.not_found"
    assert refusal(swarm.node().client.fetch_object, sha256).code == "request.not_allowed"


def test_an_unreadable_file_is_deleted(swarm: SmallSwarm) -> None:
    node = swarm.node()
    swarm.work(node, "reject.early_stop")
    lease = swarm.work(swarm.node(), "reject.malformed_file")
    sweep_up(swarm)
    assert objects(swarm) == 1
    data = f"rollouts of {lease.lease_id}".encode()
    with pytest.raises((Refused, Unreachable)):
        swarm.validator.fetch_object(hashlib.sha256(data).hexdigest())


def test_a_submission_without_an_upload(swarm: SmallSwarm) -> None:
    owner, thief = swarm.node(), swarm.node()
    owner.deliver(data=b"honest")
    lease = thief.lease()
    before = len(swarm.ledger())
    assert refusal(thief.submit, lease, b"honest").code == "request.conflict"
    thief.ask_upload(lease, b"honest")  # knowing a digest is not having the file
    assert refusal(thief.submit, lease, b"honest").code == "request.conflict"
    assert len(swarm.ledger()) == before


def test_stored_objects_cannot_be_overwritten(swarm: SmallSwarm) -> None:
    owner, thief = swarm.node(), swarm.node()
    lease = owner.lease()
    upload = owner.ask_upload(lease, b"honest")
    assert put(swarm, upload, b"honest", declared=b"honest")
    stolen = thief.ask_upload(thief.lease(), b"honest")
    assert (stolen.path, stolen.url.partition("?")[0]) != (upload.path, upload.url.partition("?")[0])
    assert not put(swarm, stolen, b"HONEST", declared=b"honest")
    assert not put(swarm, upload, b"HONEST", declared=b"honest")
    if upload.url:  # the folder takes the same bytes again, which changes nothing
        assert not put(swarm, upload, b"honest", declared=b"honest")
    owner.submit(lease, b"honest")
    assert not put(swarm, upload, b"HONEST", declared=b"honest")
    sha256 = hashlib.sha256(b"honest").hexdigest()
    assert swarm.validator.fetch_object(sha256) == b"honest"


def test_an_upload_can_be_repeated_after_a_lost_answer(swarm: SmallSwarm) -> None:
    node = swarm.node()
    lease = node.lease()
    for _ in range(2):
        node.upload(lease, b"the same")
    node.submit(lease, b"the same")
    assert objects(swarm) == 1
    assert node.status(lease).state == "submitted"


def test_the_same_place_until_the_bytes_differ(swarm: SmallSwarm) -> None:
    node = swarm.node()
    lease = node.lease()
    first = node.ask_upload(lease, b"one")
    again = node.ask_upload(lease, b"one")  # with S3 a new signature, for the same name
    assert (again.path, again.url.partition("?")[0]) == (first.path, first.url.partition("?")[0])
    node.client.put_upload(first, b"one")
    if first.url:  # its store keeps what was uploaded until the lease has ended
        assert refusal(node.ask_upload, lease, b"two").code == "request.too_early"
    wait_to_declare(swarm)
    second = node.ask_upload(lease, b"two")
    assert (second.path, second.url.partition("?")[0]) != (first.path, first.url.partition("?")[0])
    assert refusal(node.submit, lease, b"one").code == "request.conflict"
    assert refusal(node.submit, lease, b"two").code == "request.conflict"
    node.client.put_upload(second, b"two")
    node.submit(lease, b"two")


@pytest.mark.s3
def test_a_lease_asks_an_object_store_only_so_often(s3: Store, tmp_path: Path) -> None:
    """Each attempt to submit asks the store. All such questions share a few threads."""

    class StoppedClock(Clock):
        def __init__(self) -> None:
            super().__init__()
            self._now_s = time.time()

        def __call__(self) -> float:
            return self._now_s

    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"store": s3.url}), clock=StoppedClock())
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    node.ask_upload(lease, b"never sent")
    codes = [refusal(node.submit, lease, b"never sent").code for _ in range(int(STORE_QUESTIONS) + 1)]
    assert codes == ["request.conflict"] * int(STORE_QUESTIONS) + ["request.too_many"]
    swarm.close()


def test_uploads_that_are_never_submitted_are_deleted(swarm: SmallSwarm) -> None:
    node = swarm.node()
    kept = node.deliver(data=b"submitted")
    lease = node.lease()
    node.upload(lease, b"declared first")
    wait_to_declare(swarm)
    upload = node.ask_upload(lease, b"declared then")
    node.client.put_upload(upload, b"declared then")
    abandon(node, lease)
    if upload.url:  # a URL counts until its lease would have ended, so the store is written to even now
        put(swarm, upload, b"declared then", declared=b"declared then")
    else:
        assert not put(swarm, upload, b"declared then", declared=b"declared then")
    sweep_up(swarm)
    assert objects(swarm) == 1
    assert swarm.validator.fetch_object(hashlib.sha256(b"submitted").hexdigest()) == b"submitted"
    assert swarm.claim().lease == kept


def test_a_lost_file_blames_no_node(swarm: SmallSwarm) -> None:
    node = swarm.node()
    lease = node.deliver(data=b"here today")
    store = swarm.coordinator.store
    if isinstance(store, S3Store):
        [[token]] = store.tokens(older_than_s=time.time() + 1e6)
        store.delete(token)
    else:
        [path] = [path for path in (swarm.dir / "objects").rglob("*") if path.is_file()]
        path.unlink()
    swarm.reopen()
    assert node.status(lease).code == "void.infra"


# -- of the S3 store alone --------------------------------------------------------------------------------


@pytest.mark.s3
def test_a_url_is_for_one_name_one_method_and_its_time(s3: Store, tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"store": s3.url}))
    swarm.start()
    node = swarm.node()
    data = b"for one name"
    upload = node.ask_upload(node.lease(), data)
    headers = upload_headers(hashlib.sha256(data).hexdigest(), len(data))
    place, _, query = upload.url.partition("?")
    elsewhere = f"{place[:-1]}{'0' if place[-1] != '0' else '1'}?{query}"
    refused: list[Callable[[], httpx2.Response]] = [
        lambda: httpx2.put(elsewhere, content=data, headers=headers),
        lambda: httpx2.get(upload.url),
        lambda: httpx2.delete(upload.url),
        lambda: httpx2.put(
            upload.url.replace("X-Amz-Expires=", "X-Amz-Expires=9"), content=data, headers=headers
        ),
    ]
    for header in ("if-none-match", "x-amz-checksum-sha256"):
        fewer = {name: value for name, value in headers.items() if name != header}
        refused.append(lambda fewer=fewer: httpx2.put(upload.url, content=data, headers=fewer))  # type: ignore[misc]
    for attempt in refused:
        assert attempt().status_code in (400, 403, 404, 412), attempt
    # What the coordinator itself would take by this name in the other mode, it does not take in this one.
    token = place.rpartition("/")[2]
    assert swarm.public.put(f"/v1/objects/{token}", content=data).status_code == 404
    names = s3.names()
    assert not any(token in name for name in names)
    assert httpx2.put(upload.url, content=data, headers=headers).is_success
    swarm.close()


@pytest.mark.s3
def test_a_store_that_is_away_is_waited_for(tmp_path: Path) -> None:
    with strict_store() as store:
        swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"store": store.url}))
        swarm.start()
        node = swarm.node()
        lease, data = node.lease(), b"nearly"
        node.upload(lease, data)
    before = len(swarm.ledger())
    refused = refusal(node.submit, lease, data)
    assert (refused.code, refused.problem.retry_after_s) == ("request.too_early", 2.0)
    with pytest.raises(Unreachable):
        node.upload(lease, data)
    assert len(swarm.ledger()) == before
    swarm.close()


@pytest.mark.s3
def test_a_store_that_does_not_compare_is_refused(tmp_path: Path) -> None:
    with careless_store() as store:
        config = CONFIG.model_copy(update={"store": store.url})
        with pytest.raises(ValueError, match="do not match their declared SHA-256"):
            open_coordinator(config, SPEC, tmp_path, log=LOG, credentials=CREDENTIALS)
        assert store.names() == []
        wrong = Credentials(access_key="test", secret_key="not it")
        with pytest.raises(ValueError, match="check endpoint, bucket and credentials"):
            open_coordinator(config, SPEC, tmp_path, log=LOG, credentials=wrong)


@pytest.mark.s3
def test_two_runs_share_a_bucket_and_not_each_others_files(s3: Store, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"store": s3.url})
    swarms = [SmallSwarm(tmp_path / name, config) for name in ("one", "two")]
    for number, swarm in enumerate(swarms):
        swarm.start()
        swarm.node().deliver(data=b"file %d" % number)
    sweep_up(swarms[0])
    assert [objects(swarm) for swarm in swarms] == [1, 1]
    for swarm in swarms:
        swarm.close()


def test_a_store_without_credentials_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    config = CONFIG.model_copy(update={"store": "s3://bucket/prefix"})
    with pytest.raises(ValueError, match="AWS_ACCESS_KEY_ID"):
        open_coordinator(config, SPEC, tmp_path, log=LOG)


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"store": "s3://bucket?endpoint=http://127.0.0.1:9"})
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9/bucket cannot be used"):
        open_coordinator(config, SPEC, tmp_path, log=LOG, credentials=CREDENTIALS)


@pytest.mark.parametrize(
    "url",
    [
        "http://bucket",
        "s3://",
        "s3://UPPER/x",
        "s3://bucket/a b",
        "s3://bucket?endpoint=ftp://x",
        "s3://bucket?key=1",
    ],
)
def test_an_invalid_store_address_is_refused(url: str, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"store": url})
    with pytest.raises(ValueError, match=r"coordinator\.store"):
        open_coordinator(config, SPEC, tmp_path, log=LOG, credentials=CREDENTIALS)


def test_a_reader_verifies_the_digest(swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm.node().deliver(data=b"as it was")
    sha256 = hashlib.sha256(b"as it was").hexdigest()
    other = hashlib.sha256(b"other").hexdigest()
    real = SignedClient._send
    monkeypatch.setattr(
        SignedClient,
        "_send",
        lambda self, method, path, content=b"": real(self, method, path.replace(other, sha256), content),
    )
    with pytest.raises(ValueError, match="of another digest"):
        swarm.validator.fetch_object(other)
