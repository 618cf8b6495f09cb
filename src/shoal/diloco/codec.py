"""How a pseudo-gradient travels: fp32, fp16 or 8 bit. What is summed is always float32.

    fp32   little-endian float32
    fp16   little-endian float16, values past its range at its ends
    int8   blocks of 256 values: a float32 scale per block (its largest magnitude / 127), then a signed byte per value

A chunk is coded by itself, so that coding, sending and summing overlap. Our own, because a coding has to give the same
bytes with every version of every library.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from shoal.diloco.outer import Vector

CodecName = Literal["fp32", "fp16", "int8"]
CODECS: tuple[CodecName, ...] = get_args(CodecName)
BLOCK = 256
_LARGEST_HALF = np.float32(65504.0)


def encode(codec: CodecName, values_N: Vector) -> bytes:
    if codec == "fp32":
        return values_N.astype("<f4", copy=False).tobytes()
    if codec == "fp16":
        return np.clip(values_N, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2").tobytes()
    return _encode_int8(values_N)


def decode(codec: CodecName, coded: bytes, num_values: int) -> Vector:
    """The float32 values of a chunk; ValueError if the bytes are not `num_values` of them."""
    if len(coded) != coded_bytes(codec, num_values):
        raise ValueError(
            f"{len(coded)} bytes of {codec} where {num_values} values take {coded_bytes(codec, num_values)}"
        )
    if codec == "fp32":
        return np.frombuffer(coded, "<f4").astype(np.float32, copy=False)
    if codec == "fp16":
        return np.frombuffer(coded, "<f2").astype(np.float32)
    return _decode_int8(coded, num_values)


def coded_bytes(codec: CodecName, num_values: int) -> int:
    if codec == "fp32":
        return 4 * num_values
    if codec == "fp16":
        return 2 * num_values
    return 4 * _num_blocks(num_values) + num_values


def reduce_chunk(
    codec: CodecName, coded: Sequence[bytes], weights: Sequence[float], num_values: int
) -> bytes:
    """The weighted mean of coded chunks, coded once: whoever decodes it has the same bits.

    Summed in the order given, in float32. `weights` need not sum to 1; if all are 0 they count alike.
    """
    total = float(sum(weights))
    shares = [weight / total for weight in weights] if total > 0 else [1 / len(weights)] * len(weights)
    sum_N = decode(codec, coded[0], num_values) * np.float32(shares[0])
    for chunk, share in zip(coded[1:], shares[1:], strict=True):
        sum_N += decode(codec, chunk, num_values) * np.float32(share)
    return encode(codec, sum_N)


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def _encode_int8(values_N: Vector) -> bytes:
    num_blocks = _num_blocks(len(values_N))
    padded = np.zeros(num_blocks * BLOCK, np.float32)
    padded[: len(values_N)] = values_N
    blocks = padded.reshape(num_blocks, BLOCK)
    scales = np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / np.float32(127)
    # A block of zeros has scale 0 and would divide by it.
    blocks /= np.where(scales > 0, scales, np.float32(1))[:, None]
    np.rint(blocks, out=blocks)
    coded: bytes = scales.astype("<f4").tobytes() + padded[: len(values_N)].astype(np.int8).tobytes()
    return coded


def _decode_int8(coded: bytes, num_values: int) -> Vector:
    num_blocks = _num_blocks(num_values)
    scales = np.frombuffer(coded, "<f4", count=num_blocks).astype(np.float32, copy=False)
    values = np.frombuffer(coded, np.int8, offset=4 * num_blocks).astype(np.float32)
    whole = num_values // BLOCK * BLOCK
    values[:whole].reshape(-1, BLOCK)[:] *= scales[: whole // BLOCK, None]
    if whole < num_values:
        values[whole:] *= scales[-1]
    return values
