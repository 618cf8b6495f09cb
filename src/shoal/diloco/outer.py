"""The outer optimiser: pure functions on flat float32 vectors in main memory.

theta(t) = NesterovSGD(theta(t-1), mean_i(theta(t-1) - theta_i)). NumPy's multiply and add round once each on every kind
of CPU, so peers that were given the same average hold the same bits afterwards; a fused multiply-add would not promise
that.
"""

from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """SGD with momentum, as torch.optim.SGD has it with dampening 0. The defaults are the papers'."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"outer lr={self.lr}, momentum={self.momentum}: the first is above 0, the second in [0, 1)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterState:
    """What all peers share: the weights a round starts from, the momentum, and how they came about.

    One base and one momentum per fragment; plain DiLoCo has a single fragment. Vectors are never written to after
    they stand here, so a state may be sent to a newcomer while training goes on.
    """

    round: int
    """Rounds behind this state."""
    work: float
    """Samples behind this state, over all peers. Where two states compete, the one with more work is kept."""
    bases: tuple[Vector, ...]
    momenta: tuple[Vector, ...]

    @property
    def fragment(self) -> int:
        """Which fragment the next round is about."""
        return self.round % len(self.bases)

    def digest(self) -> str:
        """BLAKE3 over everything above: two peers with one digest have one state, bit for bit."""
        hasher = blake3(f"shoal/diloco/state/1 {self.round} {self.work!r} {len(self.bases)}".encode())
        for vector in (*self.bases, *self.momenta):
            hasher.update(np.ascontiguousarray(vector).view(np.uint8).data)
        return hasher.hexdigest()


def is_finite(values_N: Vector) -> bool:
    """Whether no value is infinite or none at all; one sum finds out, without a vector of answers."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.sum(values_N)))


def first_state(bases: tuple[Vector, ...]) -> OuterState:
    return OuterState(round=0, work=0.0, bases=bases, momenta=tuple(np.zeros_like(base) for base in bases))


def outer_step(state: OuterState, average_N: Vector, outer: Outer, *, work: float) -> OuterState:
    """The state after a round whose average pseudo-gradient, over `work` samples, is `average_N`."""
    at = state.fragment
    base_N, momentum_N = step_vectors(state.bases[at], state.momenta[at], average_N, outer)
    return replace(
        state,
        round=state.round + 1,
        work=state.work + work,
        bases=_put(state.bases, at, base_N),
        momenta=_put(state.momenta, at, momentum_N),
    )


def step_vectors(
    base_N: Vector, momentum_N: Vector, average_N: Vector, outer: Outer
) -> tuple[Vector, Vector]:
    """New weights and new momentum; what is passed in is left as it was."""
    rate, mu = np.float32(outer.lr), np.float32(outer.momentum)
    new_momentum_N = momentum_N * mu
    new_momentum_N += average_N
    if outer.nesterov:
        change_N = new_momentum_N * mu
        change_N += average_N
        change_N *= rate
    else:
        change_N = new_momentum_N * rate
    np.subtract(base_N, change_N, out=change_N)
    return change_N, new_momentum_N


def _put(vectors: tuple[Vector, ...], at: int, new: Vector) -> tuple[Vector, ...]:
    return (*vectors[:at], new, *vectors[at + 1 :])
