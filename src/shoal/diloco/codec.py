"""How a pseudo-gradient travels: fp32, fp16, 8 or 4 bit. What is summed is always float32.

    fp32   little-endian float32
    fp16   little-endian float16, values past its range at its ends
    int8   blocks of 256 values: a float32 scale per block (its largest magnitude / 127), then a signed byte per value
    int4   blocks of 128 values: a float32 scale per block (its largest magnitude / 7), then half a byte per value

A chunk is coded by itself, so that coding, sending and summing overlap. Our own, because a coding has to give the same
bytes with every version of every library.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.diloco.outer import Vector

CodecName = Literal["fp32", "fp16", "int8", "int4"]
Coded = bytes | bytearray | memoryview
CODECS: tuple[CodecName, ...] = get_args(CodecName)
BLOCK = {"int8": 256, "int4": 128}
"""Values that share a scale: fewer where a value has fewer steps, so that one large value spoils less."""
LARGEST = {"int8": 127, "int4": 7}
_LARGEST_HALF = np.float32(65504.0)


def encode(codec: CodecName, values_N: Vector) -> Coded:
    """With fp32 the values themselves, not a copy: they must not change until the bytes have been used."""
    if codec == "fp32":
        return np.ascontiguousarray(values_N, "<f4").data.cast("B")
    if codec == "fp16":
        return _to_half(values_N).data.cast("B")
    return _encode_blocks(codec, values_N)


def decode(codec: CodecName, coded: Coded, num_values: int) -> Vector:
    """The float32 values of a chunk; ValueError if the bytes are not `num_values` of them."""
    if len(coded) != coded_bytes(codec, num_values):
        raise ValueError(
            f"{len(coded)} bytes of {codec} where {num_values} values take {coded_bytes(codec, num_values)}"
        )
    if codec == "fp32":
        return np.frombuffer(coded, "<f4").astype(np.float32, copy=False)
    if codec == "fp16":
        return _from_half(np.frombuffer(coded, "<f2"))
    return _decode_blocks(codec, coded, num_values)


def coded_bytes(codec: CodecName, num_values: int) -> int:
    if codec == "fp32":
        return 4 * num_values
    if codec == "fp16":
        return 2 * num_values
    return 4 * _num_blocks(codec, num_values) + (num_values if codec == "int8" else (num_values + 1) // 2)


def reduce_chunk(
    codec: CodecName, coded: Sequence[Coded], weights: Sequence[float], num_values: int
) -> Coded:
    """The weighted mean of coded chunks, coded once: whoever decodes it has the same bits.

    Summed in the order given, in float32. `weights` need not sum to 1; if all are 0 they count alike.
    """
    total = float(sum(weights))
    shares = [weight / total for weight in weights] if total > 0 else [1 / len(weights)] * len(weights)
    sum_N = decode(codec, coded[0], num_values) * np.float32(shares[0])
    part_N = np.empty_like(sum_N)
    for chunk, share in zip(coded[1:], shares[1:], strict=True):
        np.multiply(decode(codec, chunk, num_values), np.float32(share), out=part_N)
        sum_N += part_N
    return encode(codec, sum_N)


def _to_half(values_N: Vector) -> NDArray[np.float16]:
    """torch converts a vector at a time and NumPy a value at a time; both round as IEEE 754 says."""
    clipped = np.clip(values_N, -_LARGEST_HALF, _LARGEST_HALF)
    half: NDArray[np.float16] = torch.from_numpy(clipped).half().numpy()
    return half.astype("<f2", copy=False)


def _from_half(half_N: NDArray[np.float16]) -> Vector:
    own = (
        half_N if half_N.flags.writeable else half_N.copy()
    )  # torch warns of memory that it may not write to
    values: Vector = torch.from_numpy(own).float().numpy()
    return values


def _num_blocks(codec: CodecName, num_values: int) -> int:
    return -(-num_values // BLOCK[codec])


def _encode_blocks(codec: CodecName, values_N: Vector) -> bytes:
    num_blocks, block = _num_blocks(codec, len(values_N)), BLOCK[codec]
    padded = np.zeros(num_blocks * block, np.float32)
    padded[: len(values_N)] = values_N
    blocks = padded.reshape(num_blocks, block)
    scales = np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / np.float32(LARGEST[codec])
    spoilt = ~np.isfinite(scales)
    if spoilt.any():  # no whole number stands for what is not finite, so the scale has to tell of it
        scales[spoilt], blocks[spoilt] = np.nan, 0.0
    # A block of zeros has scale 0 and would divide by it.
    blocks /= np.where(scales > 0, scales, np.float32(1))[:, None]
    np.rint(blocks, out=blocks)
    values = padded[: len(values_N)].astype(np.int8)
    head: bytes = scales.astype("<f4").tobytes()
    return head + (values.tobytes() if codec == "int8" else _pack_halves(values))


def _decode_blocks(codec: CodecName, coded: Coded, num_values: int) -> Vector:
    num_blocks, block = _num_blocks(codec, num_values), BLOCK[codec]
    scales = np.frombuffer(coded, "<f4", count=num_blocks).astype(np.float32, copy=False)
    body = np.frombuffer(coded, np.int8, offset=4 * num_blocks)
    values = (body if codec == "int8" else _unpack_halves(body, num_values)).astype(np.float32)
    whole = num_values // block * block
    values[:whole].reshape(-1, block)[:] *= scales[: whole // block, None]
    if whole < num_values:
        values[whole:] *= scales[-1]
    return values


def _pack_halves(values_N: NDArray[np.int8]) -> bytes:
    """Two values a byte, the first in the low half."""
    even = np.zeros(len(values_N) + len(values_N) % 2, np.uint8)
    even[: len(values_N)] = values_N.view(np.uint8) & 15
    packed: bytes = (even[0::2] | even[1::2] << 4).astype(np.uint8).tobytes()
    return packed


def _unpack_halves(body: NDArray[np.int8], num_values: int) -> NDArray[np.int8]:
    halves = np.empty(2 * len(body), np.int8)
    # Shifts to the top and back extend the sign.
    halves[0::2] = (body << 4) >> 4
    halves[1::2] = body >> 4
    return halves[:num_values]
