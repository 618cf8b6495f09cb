"""The object store: exact bytes or nothing, under names nobody outside chooses."""

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


def test_an_upload_is_there_when_it_is_complete(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    upload = store.receive("token", SHA256, len(DATA))
    upload.write(DATA[:1000])
    assert not store.has(SHA256)
    upload.write(DATA[1000:])
    assert not store.has(SHA256)
    upload.finish()
    assert store.has(SHA256)
    assert store.read(SHA256) == DATA
    assert incoming_files(tmp_path) == []


def test_surplus_bytes_are_refused_at_the_first(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    upload = store.receive("token", SHA256, len(DATA))
    upload.write(DATA)
    with pytest.raises(Rejected, match=r"request\.too_large"):
        upload.write(b"!")
    assert not store.has(SHA256)
    assert incoming_files(tmp_path) == []


@pytest.mark.parametrize("sent", [b"", DATA[:-1], b"?" + DATA[1:]])
def test_other_bytes_than_declared_are_refused(tmp_path: Path, sent: bytes) -> None:
    store = LocalStore(tmp_path)
    upload = store.receive("token", SHA256, len(DATA))
    upload.write(sent)
    with pytest.raises(Rejected, match=r"request\.wrong_digest"):
        upload.finish()
    assert not store.has(SHA256)
    assert incoming_files(tmp_path) == []


def test_two_attempts_at_one_upload_cannot_tear_each_other(tmp_path: Path) -> None:
    # A client that lost the answer tries again while the server still reads the first attempt.
    store = LocalStore(tmp_path)
    first = store.receive("token", SHA256, len(DATA))
    first.write(DATA[:1000])
    second = store.receive("token", SHA256, len(DATA))
    first.write(DATA[1000:])
    first.finish()
    second.write(DATA[:10])
    second.discard()
    assert store.read(SHA256) == DATA
    third = store.receive("token", SHA256, len(DATA))
    third.write(DATA)
    third.finish()
    assert store.read(SHA256) == DATA


def test_what_a_crash_cut_off_is_swept_away(tmp_path: Path) -> None:
    LocalStore(tmp_path)
    young, old = tmp_path / "incoming" / "token.0123", tmp_path / "incoming" / "token.4567"
    for path in (young, old):
        path.write_bytes(DATA[:10])
    os.utime(old, (1.0, 1.0))
    store = LocalStore(tmp_path)
    assert incoming_files(tmp_path) == [
        young
    ]  # it may be on its way to another coordinator of the same folder
    assert not store.has(SHA256)


def test_complete_objects_survive_a_restart(tmp_path: Path) -> None:
    upload = LocalStore(tmp_path).receive("token", SHA256, len(DATA))
    upload.write(DATA)
    upload.finish()
    assert LocalStore(tmp_path).read(SHA256) == DATA


@pytest.mark.parametrize(
    "name", ["", "..", "../../etc/passwd", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", "incoming"]
)
def test_only_a_digest_is_a_name(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    for use in (store.path, store.has, store.read):
        with pytest.raises(Rejected, match=r"request\.not_found"):
            use(name)


def test_an_absent_object_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"request\.not_found"):
        LocalStore(tmp_path).read("ab" * 32)
