"""The outer optimizer: pure functions on flat float32 vectors in main memory.

theta(t) = NesterovSGD(theta(t-1), mean_i(theta(t-1) - theta_i)). NumPy's multiply and add each round once on every CPU, so
peers with the same average compute the same bits; a fused multiply-add would not guarantee that.
"""

from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """SGD with momentum, equal to torch.optim.SGD with dampening 0. The defaults are those of the DiLoCo papers."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"outer lr={self.lr}, momentum={self.momentum}: lr must be above 0 and momentum in [0, 1)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterState:
    """The state that all peers share: the weights that a round starts from, the momentum, and the work behind them.

    There is one base and one momentum per fragment; plain DiLoCo has a single fragment. The vectors are never modified,
    so a state can be sent to a new peer while training continues.
    """

    round: int
    """Rounds that led to this state."""
    work: float
    """Samples that led to this state, over all peers. Of two competing states the one with more work is kept."""
    bases: tuple[Vector, ...]
    momenta: tuple[Vector, ...]

    @property
    def fragment(self) -> int:
        """Returns the index of the fragment that the next round averages."""
        return self.round % len(self.bases)

    def digest(self) -> str:
        """Returns the BLAKE3 of all fields: peers with equal digests hold the same state, bit for bit."""
        hasher = blake3(f"shoal/diloco/state/1 {self.round} {self.work!r} {len(self.bases)}".encode())
        for vector in (*self.bases, *self.momenta):
            hasher.update(np.ascontiguousarray(vector).view(np.uint8).data)
        return hasher.hexdigest()


def is_finite(values_N: Vector) -> bool:
    """Returns whether all values are finite. A sum of them shows it without allocating a mask."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.sum(values_N)))


def first_state(bases: tuple[Vector, ...]) -> OuterState:
    """Returns the state before the first round."""
    return OuterState(round=0, work=0.0, bases=bases, momenta=tuple(np.zeros_like(base) for base in bases))


def outer_step(state: OuterState, average_N: Vector, outer: Outer, *, work: float) -> OuterState:
    """Returns the state after a round with the average pseudo-gradient `average_N` over `work` samples."""
    at, rate, mu = state.fragment, np.float32(outer.lr), np.float32(outer.momentum)
    momentum_N = state.momenta[at] * mu
    momentum_N += average_N
    if outer.nesterov:
        change_N = momentum_N * mu
        change_N += average_N
        change_N *= rate
    else:
        change_N = momentum_N * rate
    return replace(
        state,
        round=state.round + 1,
        work=state.work + work,
        bases=_replaced(state.bases, at, np.subtract(state.bases[at], change_N, out=change_N)),
        momenta=_replaced(state.momenta, at, momentum_N),
    )


def _replaced(vectors: tuple[Vector, ...], at: int, new: Vector) -> tuple[Vector, ...]:
    return (*vectors[:at], new, *vectors[at + 1 :])
