"""Tests of the codecs: encoded values against the originals."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_swarm import mean_of_chunks

from shoal.diloco.averaging.reducer import CHUNK, chunk_bounds, part_bounds
from shoal.diloco.codec import CODECS, CodecName, coded_bytes, decode, encode


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 700), st.integers(0, 2**32), st.sampled_from(CODECS))
def test_decoded_values_are_within_one_quantisation_step(num: int, seed: int, codec: CodecName) -> None:
    values = (np.random.default_rng(seed).standard_normal(num) * 1e-3).astype(np.float32)
    coded = encode(codec, values)
    assert len(coded) == coded_bytes(codec, num)
    back = decode(codec, coded, num)
    assert back.dtype == np.float32 and back.shape == values.shape
    largest = np.abs(values).max() * 1.01
    step = {
        "fp32": 0.0,
        "fp16": largest / 2048 + 3e-8,
        "fp16-scaled": largest / 2048,
        "int8": largest / 254,
        "int4": largest / 14,
    }[codec]
    assert np.abs(back - values).max() <= step


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_and_large_values_stay_finite(codec: CodecName) -> None:
    values = np.array([0.0, 0.0, 1e6, -1e6] * 100, np.float32)
    back = decode(codec, encode(codec, values), len(values))
    assert np.isfinite(back).all() and not back[:2].any()
    assert not decode(codec, encode(codec, np.zeros(300, np.float32)), 300).any()


def test_wrong_number_of_bytes_is_refused() -> None:
    for codec in CODECS:
        with pytest.raises(ValueError, match="values take"):
            decode(codec, encode(codec, np.zeros(10, np.float32))[:-1], 10)


def test_int8_layout_is_as_documented() -> None:
    coded = encode("int8", np.array([1.27, -0.635, 0.0], np.float32))
    assert np.frombuffer(coded[:4], "<f4")[0] == pytest.approx(0.01)
    assert list(np.frombuffer(coded[4:], np.int8)) == [127, -64, 0]


def test_int4_layout_is_as_documented() -> None:
    coded = encode("int4", np.array([0.7, -0.34, 0.0, -0.7, 0.1], np.float32))
    assert np.frombuffer(coded[:4], "<f4")[0] == pytest.approx(0.1)
    # Two values a byte, the first in the low half, as two's complement: 7, -3, 0, -7, 1.
    assert list(bytes(coded[4:])) == [0x7 | 0xD << 4, 0x0 | 0x9 << 4, 0x1]
    assert decode("int4", coded, 5) == pytest.approx([0.7, -0.3, 0.0, -0.7, 0.1])


def test_mean_is_weighted_and_equal_for_zero_weights() -> None:
    rows = [np.full(5, value, np.float32) for value in (1.0, 5.0)]
    coded = [encode("fp32", row) for row in rows]
    assert mean_of_chunks("fp32", coded, [3.0, 1.0], 5)[0] == 2.0
    assert mean_of_chunks("fp32", coded, [0.0, 0.0], 5)[0] == 3.0


def test_fp16_scaled_layout_is_as_documented() -> None:
    coded = encode("fp16-scaled", np.array([3.0, -0.75, 0.0], np.float32))
    # 3 is 0.75 times 2^2, so the scale is 2^(2 - 15).
    assert np.frombuffer(coded[:4], "<f4")[0] == 2.0**-13
    assert list(np.frombuffer(coded[4:], "<f2")) == [24576.0, -6144.0, 0.0]
    assert decode("fp16-scaled", coded, 3).tolist() == [3.0, -0.75, 0.0]


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-20, 1e-7, 1.0, 1e20, 3e38])
def test_fp16_scaled_keeps_eleven_bits_at_every_magnitude(scale: float) -> None:
    """Down to a ten-thousandth of a block's largest value."""
    values = (np.float64(scale) * np.geomspace(1e-4, 1, 300)).astype(np.float32)
    back = decode("fp16-scaled", encode("fp16-scaled", values), len(values)).astype(np.float64)
    # Subnormal float32 values, 1e-45 apart, have fewer bits to begin with.
    assert (np.abs(back - values) <= np.abs(values.astype(np.float64)) * 2.0**-11 + 1e-45).all()


@pytest.mark.parametrize(("num_steps", "warmup"), [(5, 25), (10, 25), (5, 0), (10, 0)])
def test_scaled_fp16_keeps_the_moves_of_adamw_at_the_reports_rate(num_steps: int, warmup: int) -> None:
    """The INTELLECT-2 report trains with 3e-7 after a warm-up of 25 steps. Plain fp16 has no digits left there."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = torch.optim.AdamW([weights], lr=3e-7, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 3e-7 * min(1.0, (step + 1) / (warmup + 1))
        weights.grad = torch.randn(len(weights), generator=generator)
        optimizer.step()
    moves = weights.detach().numpy()

    def relative_error(codec: CodecName) -> float:
        error = decode(codec, encode(codec, moves), len(moves)) - moves
        return float(np.linalg.norm(error.astype(np.float64)) / np.linalg.norm(moves.astype(np.float64)))

    assert relative_error("fp16-scaled") < 1e-3
    assert relative_error("fp16") > 1e-2


@given(st.integers(1, 5 * CHUNK), st.integers(1, 9))
def test_parts_cover_every_value_once(num_values: int, num_owners: int) -> None:
    bounds = part_bounds(num_values, num_owners)
    assert len(bounds) == num_owners and bounds[0][0] == 0 and bounds[-1][1] == num_values
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert sum(end - start for part in bounds for start, end in chunk_bounds(*part)) == num_values


def test_fp16_equals_numpy_bit_for_bit() -> None:
    """Covers subnormals, ties and the ends of the range."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)].astype(np.float32)
    between = np.concatenate([finite, np.nextafter(finite, np.float32(9e4)), finite * np.float32(1.0002441)])
    coded = encode("fp16", between)
    assert bytes(coded) == np.clip(between, -65504, 65504).astype("<f2").tobytes()
    assert np.array_equal(
        decode("fp16", bytes(coded), len(between)), np.frombuffer(coded, "<f2").astype(np.float32)
    )
