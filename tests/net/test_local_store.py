"""LocalStore: an object has exactly its declared bytes, or does not exist."""

import hashlib
import os
from pathlib import Path

import pytest

from shoal.net.object_store import LocalStore
from shoal.wire.codes import Rejected

DATA = b"sixty-four rows of rollouts" * 100
SHA256 = hashlib.sha256(DATA).hexdigest()


def incoming_files(folder: Path) -> list[Path]:
    return list((folder / "incoming").iterdir())


def test_an_object_exists_when_its_upload_is_complete(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    upload = store.receive("token", SHA256, len(DATA))
    upload.write(DATA[:1000])
    assert not store.path(SHA256).exists()
    upload.write(DATA[1000:])
    assert not store.path(SHA256).exists()
    upload.finish()
    assert store.path(SHA256).exists()
    assert store.path(SHA256).read_bytes() == DATA
    assert incoming_files(tmp_path) == []


def test_the_first_surplus_byte_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    upload = store.receive("token", SHA256, len(DATA))
    upload.write(DATA)
    with pytest.raises(Rejected, match=r"request\.too_large"):
        upload.write(b"!")
    assert not store.path(SHA256).exists()
    assert incoming_files(tmp_path) == []


@pytest.mark.parametrize(
    ("sent", "code"),
    [(b"", "incomplete"), (DATA[:-1], "incomplete"), (b"?" + DATA[1:], "wrong_digest")],
)
def test_other_bytes_than_declared_are_refused(tmp_path: Path, sent: bytes, code: str) -> None:
    store = LocalStore(tmp_path)
    upload = store.receive("token", SHA256, len(DATA))
    upload.write(sent)
    with pytest.raises(Rejected, match=f"request.{code}"):
        upload.finish()
    assert not store.path(SHA256).exists()
    assert incoming_files(tmp_path) == []


def test_overlapping_attempts_do_not_damage_each_other(tmp_path: Path) -> None:
    # A client that lost the answer retries while the server still reads the first attempt.
    store = LocalStore(tmp_path)
    first = store.receive("token", SHA256, len(DATA))
    first.write(DATA[:1000])
    second = store.receive("token", SHA256, len(DATA))
    first.write(DATA[1000:])
    first.finish()
    second.write(DATA[:10])
    second.discard()
    assert store.path(SHA256).read_bytes() == DATA
    third = store.receive("token", SHA256, len(DATA))
    third.write(DATA)
    third.finish()
    assert store.path(SHA256).read_bytes() == DATA


def test_interrupted_uploads_are_deleted_on_restart(tmp_path: Path) -> None:
    LocalStore(tmp_path)
    young, old = tmp_path / "incoming" / "token.0123", tmp_path / "incoming" / "token.4567"
    for path in (young, old):
        path.write_bytes(DATA[:10])
    os.utime(old, (1.0, 1.0))
    store = LocalStore(tmp_path)
    # The young one may be in progress at another coordinator that shares the folder.
    assert incoming_files(tmp_path) == [young]
    assert not store.path(SHA256).exists()


def test_complete_objects_survive_a_restart(tmp_path: Path) -> None:
    upload = LocalStore(tmp_path).receive("token", SHA256, len(DATA))
    upload.write(DATA)
    upload.finish()
    assert LocalStore(tmp_path).path(SHA256).read_bytes() == DATA


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc/passwd", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", "incoming"]
)
def test_only_a_digest_is_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(Rejected, match=r"request\.not_found"):
        LocalStore(tmp_path).path(name)
