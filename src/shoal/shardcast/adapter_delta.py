"""A delta that sends adapters: two small matrices for each changed weight, which every receiver adds to the base exactly.

    new weight = bfloat16( base weight + scale · (B' · A') )        A', B': whole numbers, at most 16 bits
    payload    = "SHADAPT1", size of the file, then one zstd frame: a JSON header and the numbers of every A' and B'

All receivers must get the same bits, whatever their processor. A product of matrices in floating point depends on the order of its
sums. Here all terms and sums are whole numbers below 2^53, which float64 holds exactly, so every order and every BLAS gives the same
sum. The scale, the addition and the two roundings are single operations of IEEE 754. The manifest names the digest of the merged file.

A payload comes from a peer that need not be trusted: sizes are checked before memory is allocated. docs/wire/delta.md has the format.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from shoal.shardcast.manifest_files import write_at
from shoal.wire.codes import CorruptData

MAGIC = b"SHADAPT1"
HEAD = struct.Struct("<8sQ")
"""Magic and size of the file that the payload is for; the zstd frame follows."""
LEVELS = 32767
"""Largest whole number of A' and B'."""
MAX_RANK = 1 << 20
"""2^15 · 2^15 · 2^20 is below 2^53: sums stay exact."""
COPY_BYTES = 8 << 20
MERGE_ROWS = 1 << 22
"""Values of a weight that are merged at once."""
_LENGTH = struct.Struct("<I")
Numbers = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMatrices:
    """The adapter of one weight. Rows and columns are those of the weight."""

    name: str
    """The weight's name in the safetensors file."""
    scale: float
    """Factor of the product of the whole numbers."""
    a: Numbers
    """[rank, columns]"""
    b: Numbers
    """[rows, rank]; its product with `a` is [rows, columns]"""


def encode_adapters(adapters: Sequence[AdapterMatrices], num_bytes: int) -> bytes:
    """Returns the payload for a file of `num_bytes`."""
    header = [
        {"name": one.name, "scale": one.scale.hex(), "a": list(one.a.shape), "b": list(one.b.shape)}
        for one in adapters
    ]
    text = json.dumps(header, separators=(",", ":")).encode()
    pieces = [_LENGTH.pack(len(text)), text]
    pieces += [values.astype("<i2").tobytes() for one in adapters for values in (one.a, one.b)]
    return HEAD.pack(MAGIC, num_bytes) + zstandard.ZstdCompressor(level=1).compress(b"".join(pieces))


def is_adapter_payload(path: Path) -> bool:
    """Returns whether a payload file has adapters instead of changed words."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def decode_adapters(payload: bytes, num_bytes: int) -> list[AdapterMatrices]:
    """Returns the adapters of a payload for a file of `num_bytes`. Raises CorruptData if it is not one."""
    if len(payload) < HEAD.size:
        raise CorruptData("an adapter payload is shorter than its head")
    magic, size = HEAD.unpack_from(payload)
    if magic != MAGIC or size != num_bytes:
        raise CorruptData(f"an adapter payload for {size} bytes, the base has {num_bytes}")
    try:
        # Adapters are smaller than the weights that they change, so this bounds the memory.
        data = zstandard.ZstdDecompressor().decompress(
            payload[HEAD.size :], max_output_size=num_bytes, read_across_frames=False
        )
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        return _read_matrices(header, data, _LENGTH.size + length)
    except (zstandard.ZstdError, struct.error, ValueError, TypeError, KeyError) as error:
        raise CorruptData(f"an adapter payload cannot be read: {error}") from None


def _read_matrices(header: list[dict[str, Any]], data: bytes, start: int) -> list[AdapterMatrices]:
    found = []
    for one in header:
        matrices = []
        for key in ("a", "b"):
            rows, columns = (int(size) for size in one[key])
            if rows < 1 or columns < 1 or start + 2 * rows * columns > len(data):
                raise ValueError(f"{one['name']}: {key} of {rows} x {columns} exceeds the payload")
            matrices.append(np.frombuffer(data, "<i2", rows * columns, start).reshape(rows, columns))
            start += 2 * rows * columns
        a, b = matrices
        scale = float.fromhex(one["scale"])
        if a.shape[0] != b.shape[1] or a.shape[0] > MAX_RANK or not math.isfinite(scale):
            raise ValueError(f"{one['name']}: matrices {b.shape} and {a.shape}, scale {scale}")
        found.append(AdapterMatrices(name=str(one["name"]), scale=scale, a=a, b=b))
    if start != len(data):
        raise ValueError(f"{len(data) - start} bytes after the last matrix")
    return found


def merge_words(base: npt.NDArray[np.uint16], one: AdapterMatrices) -> npt.NDArray[np.uint16]:
    """Returns the bfloat16 words of a weight with its adapter added. `base` has the weight's words, flat."""
    rows, columns = one.b.shape[0], one.a.shape[1]
    merged = np.empty(rows * columns, np.uint16)
    right = one.a.astype(np.float64)
    step = max(1, MERGE_ROWS // columns)
    for first in range(0, rows, step):
        part = slice(first * columns, min(rows, first + step) * columns)
        product = one.b[first : first + step].astype(np.float64) @ right
        product *= one.scale
        product += (base[part].astype(np.uint32) << 16).view(np.float32).reshape(product.shape)
        merged[part] = _to_bfloat16(product.astype(np.float32)).reshape(-1)
    return merged


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds to the nearest bfloat16, ties to even. Values are finite."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def file_layout(
    read: Callable[[int, int], bytes], num_bytes: int
) -> Mapping[str, tuple[int, int, list[int]]]:
    """Returns first byte, number of bytes and shape of every bfloat16 tensor of a safetensors file."""
    length = int.from_bytes(read(0, 8), "little")
    if not 2 <= length <= num_bytes - 8:
        raise CorruptData(f"a safetensors header of {length} bytes in a file of {num_bytes}")
    header: dict[str, Any] = json.loads(read(8, length))
    header.pop("__metadata__", None)
    return {
        name: (8 + length + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0], entry["shape"])
        for name, entry in header.items()
        if entry["dtype"] == "BF16"
    }  # fmt: skip


def apply_adapters(old: Path, payload: Path, into: Path) -> str:
    """Writes the base file `old` with the payload's adapters added to `into`; returns the BLAKE3 digest of the result."""
    with old.open("rb") as source, into.open("w+b", buffering=0) as out:
        num_bytes = os.fstat(source.fileno()).st_size
        adapters = decode_adapters(payload.read_bytes(), num_bytes)
        for start in range(0, num_bytes, COPY_BYTES):
            write_at(out.fileno(), os.pread(source.fileno(), COPY_BYTES, start), start)
        change_words(
            adapters,
            lambda start, length: os.pread(source.fileno(), length, start),
            lambda start, words: write_at(out.fileno(), memoryview(words.tobytes()), start),
            num_bytes,
        )
    return blake3().update_mmap(into).hexdigest()


def change_words(
    adapters: Sequence[AdapterMatrices],
    read: Callable[[int, int], bytes],
    write: Callable[[int, npt.NDArray[np.uint16]], None],
    num_bytes: int,
) -> None:
    """Merges every adapter: reads bytes of the base, and writes the merged words at their place in the file."""
    layout = file_layout(read, num_bytes)
    for one in adapters:
        start, length, shape = layout.get(one.name, (0, 0, []))
        if shape != [one.b.shape[0], one.a.shape[1]]:
            raise CorruptData(
                f"an adapter of {one.name!r} is {one.b.shape[0]} x {one.a.shape[1]}, the base has {shape or 'no such weight'}"
            )
        write(start, merge_words(np.frombuffer(read(start, length), "<u2"), one))
