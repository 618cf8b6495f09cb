"""Encodes pseudo-gradients for the network: fp32, fp16, 8 or 4 bit. Sums are always float32.

    fp32          little-endian float32
    fp16          little-endian float16, values out of range clipped; values below 6e-5 lose digits
    fp16-scaled   blocks of 256 values: a float32 scale per block (the power of two that brings its largest magnitude to
                  2^14 or more and below 2^15), then a little-endian float16 per value
    int8          blocks of 256 values: a float32 scale per block (its largest magnitude / 127), then a signed byte per value
    int4          blocks of 128 values: a float32 scale per block (its largest magnitude / 7), then half a byte per value

Each chunk is coded on its own, so that coding, sending and summing overlap. No library is used, because the same values
must give the same bytes with every version of every library.
"""

from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.diloco.outer import Vector

CodecName = Literal["fp32", "fp16", "fp16-scaled", "int8", "int4"]
Coded = bytes | bytearray | memoryview
CODECS: tuple[CodecName, ...] = get_args(CodecName)
BLOCK = {"fp16-scaled": 256, "int8": 256, "int4": 128}
"""Values that share a scale. Fewer for int4, which has fewer steps, so that one large value affects fewer others."""
LARGEST = {"int8": 127, "int4": 7}
"""Largest magnitude of a coded value."""
_LARGEST_FP16 = np.float32(65504.0)


def encode(codec: CodecName, values_N: Vector) -> Coded:
    """Returns the coded values. With fp32 they share memory with `values_N`, which must not change until they are sent."""
    if codec == "fp32":
        return np.ascontiguousarray(values_N, "<f4").data.cast("B")
    if codec == "fp16":
        return _to_fp16(values_N).data.cast("B")
    return _encode_blocks(codec, values_N)


def decode(codec: CodecName, coded: Coded, num_values: int) -> Vector:
    """Returns the float32 values of a chunk. Raises ValueError if the bytes do not hold exactly `num_values`."""
    if len(coded) != coded_bytes(codec, num_values):
        raise ValueError(
            f"got {len(coded)} bytes of {codec}, but {num_values} values take {coded_bytes(codec, num_values)}"
        )
    if codec == "fp32":
        return np.frombuffer(coded, "<f4").astype(np.float32, copy=False)
    if codec == "fp16":
        return _from_fp16(np.frombuffer(coded, "<f2"))
    return _decode_blocks(codec, coded, num_values)


def coded_bytes(codec: CodecName, num_values: int) -> int:
    """Returns the size of `num_values` coded values."""
    if codec == "fp32":
        return 4 * num_values
    if codec == "fp16":
        return 2 * num_values
    body = {"fp16-scaled": 2 * num_values, "int8": num_values, "int4": (num_values + 1) // 2}[codec]
    return 4 * _num_blocks(codec, num_values) + body


def _to_fp16(values_N: Vector) -> NDArray[np.float16]:
    """Converts with torch, which is vectorised, unlike NumPy. Both round as IEEE 754 requires."""
    clipped = np.clip(values_N, -_LARGEST_FP16, _LARGEST_FP16)
    half: NDArray[np.float16] = torch.from_numpy(clipped).half().numpy()
    return half.astype("<f2", copy=False)


def _from_fp16(half_N: NDArray[np.float16]) -> Vector:
    # torch warns about read-only memory.
    writable = half_N if half_N.flags.writeable else half_N.copy()
    values: Vector = torch.from_numpy(writable).float().numpy()
    return values


def _num_blocks(codec: CodecName, num_values: int) -> int:
    return -(-num_values // BLOCK[codec])


def _encode_blocks(codec: CodecName, values_N: Vector) -> bytes:
    num_blocks, block = _num_blocks(codec, len(values_N)), BLOCK[codec]
    padded = np.zeros(num_blocks * block, np.float32)
    padded[: len(values_N)] = values_N
    blocks = padded.reshape(num_blocks, block)
    largest = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    scales = _fp16_scales(largest) if codec == "fp16-scaled" else largest / np.float32(LARGEST[codec])
    not_finite = ~np.isfinite(scales)
    if not_finite.any():  # integers cannot represent NaN or infinity, so the block's scale becomes NaN
        scales[not_finite], blocks[not_finite] = np.nan, 0.0
    # A block of zeros has scale 0: divide by 1 instead.
    blocks /= np.where(scales > 0, scales, np.float32(1))[:, None]
    head: bytes = scales.astype("<f4").tobytes()
    if codec == "fp16-scaled":
        return head + _to_fp16(padded[: len(values_N)]).tobytes()
    np.rint(blocks, out=blocks)
    values = padded[: len(values_N)].astype(np.int8)
    return head + (values.tobytes() if codec == "int8" else _pack_int4(values))


def _decode_blocks(codec: CodecName, coded: Coded, num_values: int) -> Vector:
    num_blocks, block = _num_blocks(codec, num_values), BLOCK[codec]
    scales = np.frombuffer(coded, "<f4", count=num_blocks).astype(np.float32, copy=False)
    if codec == "fp16-scaled":
        values = _from_fp16(np.frombuffer(coded, "<f2", offset=4 * num_blocks))
    else:
        body = np.frombuffer(coded, np.int8, offset=4 * num_blocks)
        values = (body if codec == "int8" else _unpack_int4(body, num_values)).astype(np.float32)
    whole = num_values // block * block
    values[:whole].reshape(-1, block)[:] *= scales[: whole // block, None]
    if whole < num_values:
        values[whole:] *= scales[-1]
    return values


def _fp16_scales(largest_B: Vector) -> Vector:
    """Returns powers of two, by which dividing and multiplying is exact: only float16's own rounding remains, 2^-11.

    Float16 keeps that precision over 29 powers of two, so values of a block down to 2^-28 of its largest have it.
    """
    exponents_B = np.frexp(largest_B)[1]
    # The smallest normal float32: a smaller scale would be rounded itself.
    scales_B = np.ldexp(np.float32(1), np.maximum(exponents_B - 15, -126)).astype(np.float32)
    scales: Vector = np.where(np.isfinite(largest_B), np.where(largest_B > 0, scales_B, 0), np.nan).astype(
        np.float32
    )
    return scales


def _pack_int4(values_N: NDArray[np.int8]) -> bytes:
    """Packs two values into a byte, the first in the low half."""
    even = np.zeros(len(values_N) + len(values_N) % 2, np.uint8)
    even[: len(values_N)] = values_N.view(np.uint8) & 15
    packed: bytes = (even[0::2] | even[1::2] << 4).astype(np.uint8).tobytes()
    return packed


def _unpack_int4(body: NDArray[np.int8], num_values: int) -> NDArray[np.int8]:
    halves = np.empty(2 * len(body), np.int8)
    # Shifting to the top and back extends the sign.
    halves[0::2] = (body << 4) >> 4
    halves[1::2] = body >> 4
    return halves[:num_values]
