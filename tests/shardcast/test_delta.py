"""Deltas: the exact bytes for any two files of equal size, and CorruptData for anything that is not a delta."""

import contextlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_delta import apply, encode

from shoal.shardcast import delta
from shoal.shardcast.delta import apply_deltas, write_delta
from shoal.wire.codes import CorruptData

PAGE = Path(__file__).parents[2] / "docs" / "wire" / "delta.md"
HEAD = 16


@pytest.fixture(params=[64, 1 << 21], ids=["small chunks", "one chunk"])
def chunk_words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(delta, "CHUNK_WORDS", request.param)
    return int(request.param)


def some_bytes(num: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num)


def stepped(data: bytes, share: float, seed: int = 0) -> bytes:
    """Changes data like a training step: some words by one unit in the last place, a few by more."""
    rng = np.random.default_rng(seed)
    words = np.frombuffer(data, "<u2").copy()
    places = rng.choice(words.size, int(share * words.size), replace=False)
    words[places] += rng.choice(np.array([1, 0xFFFF, 1, 0xFFFF, 7], np.uint16), places.size)
    return words.tobytes()


@given(old=st.binary(max_size=700), new=st.binary(max_size=700), words=st.sampled_from([1, 3, 64, 1 << 21]))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_any_two_files_of_equal_size(old: bytes, new: bytes, words: int) -> None:
    new = new[: len(old)].ljust(len(old), b"\x80")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_WORDS", words)
        payload = encode(old, new)
        assert apply(old, payload) == new


@given(data=st.data(), num=st.integers(1, 500))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_few_words_of_bfloat16(data: st.DataObject, num: int) -> None:
    # Infinities, NaNs with any payload, both zeros and denormals are treated as plain bit patterns.
    odd = st.sampled_from([0x7F80, 0xFF80, 0x7FC0, 0x7FFF, 0xFFFF, 0x8000, 0x0000, 0x0001, 0x3F80])
    words = np.array(data.draw(st.lists(odd | st.integers(0, 0xFFFF), min_size=num, max_size=num)), "<u2")
    changed = words.copy()
    for place in data.draw(st.lists(st.integers(0, num - 1), max_size=20)):
        changed[place] = data.draw(odd | st.integers(0, 0xFFFF))
    old, new = words.tobytes(), changed.tobytes()
    assert apply(old, encode(old, new)) == new


@pytest.mark.parametrize("num", [0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 1000, 1001])
def test_sizes_and_ends(num: int, chunk_words: int) -> None:
    old = some_bytes(num)
    first, last, all_of_it = bytearray(old), bytearray(old), bytes(byte ^ 0xA5 for byte in old)
    for edge, place in ((first, 0), (last, -1)):
        if num:
            edge[place] ^= 0xFF
    for new in (old, bytes(first), bytes(last), all_of_it, bytes(num), b"\xff" * num):
        payload = encode(old, new)
        assert apply(old, payload) == new
        assert encode(old, new) == payload


def test_several_chunks(chunk_words: int) -> None:
    old = some_bytes(5000)
    new = stepped(old, 0.05)
    assert apply(old, encode(old, new)) == new


@pytest.mark.parametrize("share", [0.0, 0.003, 0.3, 1.0])
def test_files_larger_than_the_real_chunk_size(share: float) -> None:
    old = some_bytes(2 * (2 * delta.CHUNK_WORDS) + 4098)
    new = stepped(old, share)
    payload = encode(old, new)
    assert apply(old, payload) == new
    if share == 0.003:
        assert len(old) / len(payload) > 200


def test_files_of_different_sizes_have_no_delta() -> None:
    with pytest.raises(ValueError, match="4 and 6 bytes"):
        encode(b"abcd", b"abcdef")


# -- files ----------------------------------------------------------------------------------------------


def test_a_chain_of_payloads_in_one_pass(tmp_path: Path, chunk_words: int) -> None:
    versions = [some_bytes(3001)]
    for seed in range(4):
        versions.append(stepped(versions[-1][:-1], 0.1, seed) + bytes([seed]))
    for number, data in enumerate(versions):
        (tmp_path / f"{number}").write_bytes(data)
    for number in range(1, 5):
        old = tmp_path / f"{number - 1}"
        assert write_delta(
            old,
            tmp_path / f"{number}",
            tmp_path / f"{number}.delta",
            old_blake3=blake3(old.read_bytes()).hexdigest(),
            max_bytes=10**6,
        )
    payloads = [tmp_path / f"{number}.delta" for number in range(1, 5)]
    assert payloads[0].read_bytes() == encode(versions[0], versions[1])
    digest = apply_deltas(tmp_path / "0", payloads, tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == versions[4]
    assert digest == blake3(versions[4]).hexdigest()


def test_no_file_is_left_if_the_delta_is_too_large_or_the_base_differs(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(some_bytes(2000, 1))
    new.write_bytes(some_bytes(2000, 2))
    right = blake3(old.read_bytes()).hexdigest()
    assert not write_delta(old, new, tmp_path / "d", old_blake3=right, max_bytes=1000)
    assert not write_delta(old, new, tmp_path / "d", old_blake3="0" * 64, max_bytes=10**6)
    assert not (tmp_path / "d").exists()
    assert write_delta(old, new, tmp_path / "d", old_blake3=right, max_bytes=10**6)


# -- hostile payloads -----------------------------------------------------------------------------------


def varints(*numbers: int) -> bytes:
    out = bytearray()
    for number in numbers:
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def zipped(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def payload_of(
    num: int, gaps: bytes, steps: bytes, *, sizes: tuple[int, int] | None = None, num_bytes: int = 200
) -> bytes:
    """Builds a payload of one chunk; `sizes` are the sizes it declares for its streams."""
    frames = zipped(gaps), zipped(steps)
    declared = sizes or (len(gaps), len(steps))
    return (
        struct.pack("<8sQ", b"SHDELTA1", num_bytes)
        + struct.pack("<5I", num, *declared, len(frames[0]), len(frames[1]))
        + b"".join(frames)
    )


OLD = bytes(200)


def test_a_payload_built_by_hand_is_applied() -> None:
    new = np.frombuffer(apply(OLD, payload_of(3, varints(0, 97, 0), varints(2, 1, 0xFFFF))), "<u2")
    assert new.nonzero()[0].tolist() == [0, 98, 99]
    assert new[[0, 98, 99]].tolist() == [1, 0xFFFF, 0x8000]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "ends 16 bytes too early"),
        (b"SHDELTA2" + bytes(100), "starts with"),
        (struct.pack("<8sQ", b"SHDELTA1", 201), "made for a file of 201 bytes"),
        (struct.pack("<8sQ", b"SHDELTA1", 2**63), "made for a file of"),
        (payload_of(2, varints(0, 1), varints(2, 2)) + b"x", "1 surplus bytes at its end"),
        (payload_of(101, bytes(101), bytes(101)), "101 changes in a chunk of 100 words"),
        (payload_of(2**32 - 1, b"\0", b"\0"), "changes in a chunk"),
        (payload_of(0, b"\0", b"\0"), "without changes"),
        (payload_of(2, varints(0, 99), varints(2, 2)), "a change at word 100 of a chunk of 100"),
        (payload_of(2, varints(2**21 - 1, 2**21 - 1), varints(2, 2)), "a change at word"),
        (payload_of(3, varints(0, 1), varints(2, 2, 2)), "a stream of 2 bytes for 3 numbers"),
        (payload_of(2, varints(0, 1, 1), varints(2, 2)), "3 numbers in a stream that should have 2"),
        (payload_of(2, varints(0, 1), varints(2, 300, 2)), "numbers in a stream that should have 2"),
        (payload_of(2, b"\x00\x80", varints(2, 2)), "1 numbers in a stream that should have 2"),
        (payload_of(2, b"\x00\x80\x80\x80\x80\x01", varints(2, 2)), "a number of more than 3 bytes"),
        (payload_of(2, varints(0, 1), varints(2, 0x10000)), "a step of 65536"),
        (payload_of(2, varints(0, 1), bytes(7)), "a stream of 7 bytes for 2 numbers"),
        (
            payload_of(2, varints(0, 1), bytes(10**8), sizes=(2, 2)),
            "a zstd frame of 100000000 bytes, expected 2",
        ),
        (payload_of(2, varints(0, 1), varints(2, 2), sizes=(3, 2)), "a zstd frame of 2 bytes, expected 3"),
    ],
)
def test_invalid_payloads_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(CorruptData, match=re.escape("not a delta: ")) as caught:
        apply(OLD, payload)
    assert words in caught.value.detail


def test_invalid_frames_are_refused() -> None:
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(2))
    two = zipped(bytes(2)) + zipped(bytes(10**6))
    for frame in (silent, two, b"", b"\x28\xb5\x2f\xfd", bytes(40), b"\x28\xb5\x2f\xfd" + bytes(40)):
        head = struct.pack("<8sQ5I", b"SHDELTA1", 200, 2, 2, 2, len(frame), len(frame))
        with pytest.raises(CorruptData, match="not a delta"):
            apply(OLD, head + frame + frame)


@given(cut=st.integers(0, 10_000), place=st.integers(0, 10_000), byte=st.integers(0, 255))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_a_damaged_payload_is_refused_or_gives_a_file_of_the_same_size(
    cut: int, place: int, byte: int
) -> None:
    old = some_bytes(4000)
    whole = encode(old, stepped(old, 0.2))
    with pytest.raises(CorruptData):
        apply(old, whole[: cut % len(whole)])
    damaged = bytearray(whole)
    damaged[place % len(whole)] = byte
    with contextlib.suppress(CorruptData):
        assert len(apply(old, bytes(damaged))) == len(old)


@given(noise=st.binary(max_size=300))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_noise_after_a_valid_header(noise: bytes) -> None:
    with contextlib.suppress(CorruptData):
        assert len(apply(OLD, struct.pack("<8sQ", b"SHDELTA1", 200) + noise)) == 200


# -- the page -------------------------------------------------------------------------------------------


def test_the_golden_payload() -> None:
    golden = PAGE.read_text().split("## Golden payload")[1]
    (block,) = re.findall(r"```\n(.*?)\n```", golden, re.DOTALL)
    payload = bytes.fromhex(block)
    words = np.array([0x3F80] * 140 + [0xBC00, 0x0000], "<u2")
    changed = words.copy()
    changed[[1, 2, 140, 141]] = [0x3F81, 0x3F7F, 0x3C00, 0x8000]
    old, new = words.tobytes(), changed.tobytes()
    assert apply(old, payload) == new
    # Compressors may write different frames, but the streams must be equal.
    streams = [bytes.fromhex(stream) for stream in re.findall(r"`((?:[0-9a-f]{2} ){4,}[0-9a-f]{2})`", golden)]
    assert _streams(encode(old, new)) == _streams(payload) == streams
    assert encode(old, new)[: HEAD + 12] == payload[: HEAD + 12]


def _streams(payload: bytes) -> list[bytes]:
    *_, gaps, steps = struct.unpack_from("<5I", payload, HEAD)
    body = payload[HEAD + 20 :]
    return [zstandard.decompress(frame) for frame in (body[:gaps], body[gaps : gaps + steps])]
