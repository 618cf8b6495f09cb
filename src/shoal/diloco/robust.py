"""Limits what one peer can do to an average: bounded weights and norms, values that must be finite, a trimmed mean.

    weight   at most `max_norm_ratio` times the group's median weight
    update   scaled down to `max_norm_ratio` times the group's median norm
    value    finite, and no more norm in all chunks of a part than the peer declared for the whole vector

A peer declares the norm of its update before the exchange, so all peers compute the same factors beforehand, and sums
are still sent chunk by chunk. A median is right while liars are fewer than half of the group; with two peers there is no
majority, and the bounds do nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.diloco.codec import CodecName, Coded, coded_bytes, decode, encode
from shoal.diloco.outer import Vector, is_finite

AverageKind = Literal["mean", "trimmed"]

NORM_SLACK = 1.5
"""Coding may raise a norm: 127 values of half a step beside one of 7 steps have 1.48 times their norm in int4."""
_BLOCK = 1 << 18


class BadChunk(ValueError):
    """A peer's chunk cannot be part of an average. `peer` sent it."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustSettings:
    """How the updates of a group become one. All peers of a run must have the same."""

    average: AverageKind = "mean"
    """"trimmed" leaves out the highest and lowest quarter of the group at every coordinate, at least one peer each."""
    max_norm_ratio: float = 3.0
    """Largest norm of an update, and largest weight, as a multiple of the group's median."""

    def __post_init__(self) -> None:
        if self.average not in ("mean", "trimmed") or not self.max_norm_ratio >= 1:
            raise ValueError(
                f"average={self.average!r} must be mean or trimmed, and max_norm_ratio={self.max_norm_ratio} at least 1"
            )

    def as_text(self) -> str:
        """Returns the settings for comparison between peers."""
        return f"average = {self.average}, max_norm_ratio = {self.max_norm_ratio}"

    def num_trimmed(self, num_members: int) -> int:
        """Returns how many values are left out at each end of every coordinate. Needs three members."""
        return max(1, num_members // 4) if self.average == "trimmed" and num_members > 2 else 0

    def bounded_weights(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Returns the weights, none above `max_norm_ratio` times their median: a peer states its own weight."""
        largest = self.max_norm_ratio * upper_median(weights)
        return tuple(min(weight, largest) for weight in weights)

    def norm_factors(self, norms: Sequence[float]) -> tuple[float, ...]:
        """Returns the factor of each update that bounds its norm."""
        largest = self.max_norm_ratio * upper_median(norms)
        return tuple(1.0 if norm <= largest else largest / norm for norm in norms)

    def largest_average(self, norms: Sequence[float]) -> float:
        """Returns a norm that no average of these updates can exceed, for any part of the vector."""
        # A mean is no longer than its longest member. Each coordinate of a trimmed mean may come from another member.
        spread = 1.0 if self.average == "mean" else math.sqrt(len(norms))
        return NORM_SLACK**2 * spread * self.max_norm_ratio * upper_median(norms)


class PartAverager:
    """Averages the chunks of one part, in their order, and checks every member's values against its declared norm."""

    def __init__(
        self,
        codec: CodecName,
        members: Sequence[str],
        weights: Sequence[float],
        norms: Sequence[float],
        settings: RobustSettings,
    ) -> None:
        self._codec: CodecName = codec
        self._members, self._norms = tuple(members), tuple(norms)
        total = float(sum(weights))
        self._shares = [weight / total if total > 0 else 1 / len(weights) for weight in weights]
        self._factors = settings.norm_factors(norms)
        self._trim = settings.num_trimmed(len(self._members))
        self._squares = [0.0] * len(self._members)

    def check_size(self, peer: str, coded: Coded, num_values: int) -> None:
        """Raises BadChunk if a member's chunk does not have the size of `num_values` coded values."""
        if len(coded) != (wanted := coded_bytes(self._codec, num_values)):
            raise BadChunk(
                peer,
                f"its pseudo-gradient has a chunk of {len(coded)} bytes, but {num_values} values of {self._codec} "
                f"take {wanted}; use the same model and codec at every site",
            )

    def average(self, coded: Sequence[Coded], num_values: int) -> Coded:
        """Returns the weighted mean of one chunk of every member, coded once, so that all peers decode the same bits.

        Sums in the order of the members, in float32. If all weights are 0 the chunks count equally. Each chunk is multiplied by its
        factor, which does not change its weight. Raises BadChunk, and ValueError for a size that `check_size` refuses.
        """
        if self._trim:
            values_MN = np.stack(
                [
                    self._values(at, coded[at], num_values) * np.float32(factor)
                    for at, factor in enumerate(self._factors)
                ]
            )
            mean_N = _trimmed_mean(values_MN, np.asarray(self._shares, np.float32), self._trim)
            return encode(self._codec, mean_N)
        sum_N = self._values(0, coded[0], num_values) * np.float32(self._shares[0] * self._factors[0])
        part_N = np.empty_like(sum_N)
        for at in range(1, len(coded)):
            scale = np.float32(self._shares[at] * self._factors[at])
            np.multiply(self._values(at, coded[at], num_values), scale, out=part_N)
            sum_N += part_N
        return encode(self._codec, sum_N)

    def _values(self, at: int, coded: Coded, num_values: int) -> Vector:
        """Returns a member's values. Raises BadChunk if they are not finite or exceed the norm that it declared."""
        values_N = decode(self._codec, coded, num_values)
        if not is_finite(values_N):
            raise BadChunk(self._members[at], "its pseudo-gradient is not finite")
        self._squares[at] += squared_norm(values_N)
        norm, declared = math.sqrt(self._squares[at]), self._norms[at]
        if norm > NORM_SLACK * declared:
            raise BadChunk(
                self._members[at],
                f"its pseudo-gradient has a norm of {norm:.3g}, but it declared {declared:.3g}",
            )
        return values_N


def _trimmed_mean(values_MN: Vector, shares_M: Vector, trim: int) -> Vector:
    """Returns the mean by coordinate without the `trim` lowest and highest values, weighted among those that remain."""
    order_MN = np.argsort(values_MN, axis=0, kind="stable")[trim : len(values_MN) - trim]
    weights_MN = shares_M[order_MN]
    kept_MN = np.take_along_axis(values_MN, order_MN, axis=0)
    total_N = weights_MN.sum(axis=0)
    weights_MN = np.where(total_N > 0, weights_MN, np.float32(1))
    mean_N: Vector = (kept_MN * weights_MN).sum(axis=0) / weights_MN.sum(axis=0)
    return mean_N


def upper_median(values: Sequence[float]) -> float:
    """Returns the median of the values above 0, the upper one of two; 0 if there are none.

    Zeros are ignored, because a peer that has just joined may not have moved yet. The upper one, because with two values
    the lower would let a peer that has done little shrink the update of the other.
    """
    ordered = sorted(value for value in values if value > 0)
    return ordered[len(ordered) // 2] if ordered else 0.0


def squared_norm(values_N: Vector) -> float:
    """Returns the sum of squares."""
    squares = 0.0
    for at in range(0, len(values_N), _BLOCK):
        block_N = values_N[at : at + _BLOCK]
        with np.errstate(all="ignore"):
            square = float(np.dot(block_N, block_N))
        if not 1e-20 < square < 1e30:  # in float32, small squares may have become 0 and large ones infinite
            square = float(np.dot(block_N.astype(np.float64), block_N.astype(np.float64)))
        squares += square
    return squares


def declared_norm(values_N: Vector) -> float:
    """Returns the norm that a peer declares. 0 for values that are not finite, which are refused in any case."""
    squares = squared_norm(values_N)
    return math.sqrt(squares) if math.isfinite(squares) else 0.0
