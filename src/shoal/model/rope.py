"""Rotary position embeddings, with the scalings that published models use: linear, llama3, yarn; dynamic below its own length."""

import math

import torch
from torch import Tensor

from shoal.model.shape import Rope, Shape


def rope_table(shape: Shape) -> Tensor:
    """Returns cosines and signed sines of every position, [positions, 2 D], float32.

    They are computed on the CPU, so that all devices use the same values. The sines of the first half are negated: rotating is
    then x * cos + (x with its halves swapped) * sin.
    """
    frequencies = _frequencies(shape.rope, shape.head_dim)
    angles = torch.arange(shape.max_positions, device="cpu").float()[:, None] * frequencies
    factor = _attention_factor(shape.rope)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos, -sin, sin), dim=1)


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Returns the angle per position of each pair of values, [D / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    plain = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        # Divides slow frequencies by the factor, keeps fast ones, and interpolates between `low` and `high` rotations.
        rotations = rope.original_max_position_embeddings * plain / (2 * math.pi)
        kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * plain / rope.factor + kept * plain
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain  # dynamic scaling begins beyond max_position_embeddings, which no row passes


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Divides by the factor the frequencies that make fewer than beta_slow rotations, and keeps those above beta_fast."""

    def index_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high if high > low else low + 0.001  # a step instead of a ramp; 0 would divide by zero
    divided = ((torch.arange(head_dim // 2, device="cpu").float() - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * divided + plain * (1 - divided)


def _attention_factor(rope: Rope) -> float:
    """Returns what cosines and sines are multiplied by: YaRN raises the attention's temperature with the factor."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
