"""DiLoCo as an optimiser: inner steps as ever, and every H of them an outer step on what all sites moved.

    optimizer = DiLoCo(model, inner=AdamW(model.parameters(), lr=4e-4), averager=averager)
    for batch in batches:
        loss(model, batch).backward()
        optimizer.saw(len(batch))
        optimizer.step()
        optimizer.zero_grad()

Learning-rate schedulers and gradient scalers take it for the inner optimiser. The inner state stays here and on its
device; the outer state is in main memory. With `Schedule(fragments=K, overlap_steps=tau, mix=alpha)` it is Streaming
DiLoCo: layers in K turns, each averaged in the background while training goes on.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.diloco.averaging.averager import Averager, Fetched, Ready
from shoal.diloco.fragments import fragments_of
from shoal.diloco.outer import Outer, OuterState, first_state, is_finite, outer_step
from shoal.diloco.rounds import Outcome, RoundResult, take_round
from shoal.net.waiting import Stopped
from shoal.telemetry import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When rounds happen. Every peer of a run has the same `inner_steps` and `fragments`."""

    inner_steps: int = 500
    """H: between two rounds on the same parameters."""
    deadline_s: float = 600.0
    """A round that found no agreement by then is taken alone."""
    fragments: int = 1
    overlap_steps: int = 0
    """tau: inner steps taken while a round is under way. 0 waits for it."""
    mix: float = 0.5
    """alpha: how much of a fragment's own value stays when the round that overlapped it lands."""

    def __post_init__(self) -> None:
        if self.fragments < 1 or self.inner_steps < 1 or self.inner_steps % self.fragments:
            raise ValueError(f"inner_steps={self.inner_steps} is no multiple of fragments={self.fragments}")
        if not 0 <= self.overlap_steps < self.interval or not 0 <= self.mix < 1:
            raise ValueError(
                f"overlap_steps={self.overlap_steps} must be below the {self.interval} steps between two rounds, "
                f"and mix={self.mix} in [0, 1)"
            )

    @property
    def interval(self) -> int:
        """Inner steps between two rounds."""
        return self.inner_steps // self.fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A round as the optimiser saw it end."""

    round: int
    step: int
    state_digest: str
    waited_s: float
    """Time in which no inner step was taken."""
    result: RoundResult


class DiLoCo(Optimizer):
    """See above. `site`: the process group of this site's ranks, if it has several."""

    def __init__(
        self,
        model: nn.Module,
        *,
        inner: Optimizer,
        averager: Averager,
        outer: Outer | None = None,
        schedule: Schedule | None = None,
        site: Any = None,
    ) -> None:
        if not isinstance(outer or Outer(), Outer):
            raise ValueError(
                f"outer={type(outer).__name__}: it works on vectors in main memory, not on parameters; "
                "use shoal.diloco.Outer(lr=0.7, momentum=0.9, nesterov=True)"
            )
        # The base class is not initialised: groups, state and defaults are the inner optimiser's own, so that whoever
        # sets a learning rate or unscales gradients here does it there.
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.averager = averager
        self.outer = outer or Outer()
        self.schedule = schedule or Schedule()
        self.steps = 0
        """Inner steps behind the run, for a learning-rate schedule; a newcomer takes over the swarm's."""
        self.phase = 0
        self.joined = False
        self.stop = threading.Event()
        self.on_round: Callable[[Landed], None] = lambda landed: None
        self.on_offer: Callable[[int], None] = lambda round: None
        """Told a round's number before anybody is given this site's share of it."""
        self.carries = True
        """Whether `join` puts what was trained since the last round on top of a newer state. Not after a restart, unless it is
        known that no other peer was offered it: the newer state may hold it already."""
        self._site = site
        self._log = Log("diloco")
        self._samples = 0.0
        self._fragments = fragments_of(model, self.schedule.fragments)
        self.outer_state: OuterState = first_state(tuple(fragment.read() for fragment in self._fragments))
        self._digest = ""
        self._pool: ThreadPoolExecutor | None = None
        self._flight: tuple[Future[RoundResult], float] | None = None

    # -- what a training loop calls -------------------------------------------------------------------------

    def join(self, *, deadline_s: float = 600.0) -> bool:
        """Meet the swarm and take over its state, if it has one that is newer. Whether it had."""
        fetched = self.averager.join(deadline_s=deadline_s)
        adopted = fetched is not None and fetched.state.work > self.outer_state.work
        if fetched is not None and (adopted or not self.steps):
            self._adopt(fetched, carry=self.carries)
        self._digest = self.averager.serve(self.outer_state, step=self.steps)
        self._agree_on_phase()
        self.joined = True
        return adopted

    def saw(self, num_samples: float) -> None:
        """Count samples behind this site's next pseudo-gradient: they are its weight in the average."""
        self._samples += num_samples

    def step(self, closure: Any = None) -> Any:
        """An inner step; and a round, when one is due."""
        if not self.joined:
            self.join(deadline_s=self.schedule.deadline_s)
        loss = self.inner.step(closure)
        self.steps += 1
        self.phase += 1
        self.averager.progress(phase=self.phase, step=self.steps)
        if self._flight is not None and self.phase >= self.schedule.overlap_steps:
            self._land()
        if self.phase >= self.schedule.interval:
            self._launch()
            if not self.schedule.overlap_steps:
                self._land()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's weights. A round under way is waited for, or, after `stop`, given up."""
        if self._flight is not None:
            with contextlib.suppress(Stopped):
                self._land()
        state = self.outer_state
        return {
            "inner": self.inner.state_dict(),
            "round": state.round,
            "work": state.work,
            "bases": [torch.from_numpy(base) for base in state.bases],
            "momenta": [torch.from_numpy(momentum) for momentum in state.momenta],
            "steps": self.steps,
            "phase": self.phase,
            "samples": self._samples,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before `join`, with the model's weights of the same moment loaded."""
        theirs = tuple(len(base) for base in state_dict["bases"])
        ours = tuple(fragment.num_values for fragment in self._fragments)
        if theirs != ours:
            raise ValueError(
                f"the checkpoint has fragments of {theirs} values, here they are {ours}: another model, or another number of "
                "fragments; go on with those of the checkpoint, or begin in another folder"
            )
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.outer_state = OuterState(
            round=state_dict["round"],
            work=state_dict["work"],
            bases=tuple(base.numpy() for base in state_dict["bases"]),
            momenta=tuple(momentum.numpy() for momentum in state_dict["momenta"]),
        )
        self.steps, self.phase = state_dict["steps"], state_dict["phase"]
        self._samples = state_dict["samples"]
        self.carries = False

    @property
    def in_flight(self) -> bool:
        """Whether a round is under way."""
        return self._flight is not None

    def close(self) -> None:
        """Say goodbye to the swarm. What was trained since the last round stays in the model."""
        self.stop.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self.averager.leave()

    # -- rounds ---------------------------------------------------------------------------------------------

    def pseudo_gradient(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """How far this site has moved the due fragment, with the sign of a gradient."""
        at = self.outer_state.fragment
        fragment = self._fragments[at]
        return fragment.as_held(self.outer_state.bases[at]) - fragment.read()

    def _launch(self) -> None:
        delta_N = self.pseudo_gradient()
        if not is_finite(delta_N):
            # Nobody's average may hold it: every site would be lost with this one.
            raise ValueError(
                f"the weights are not finite after {self.steps} inner steps, and the swarm is not given them; lower the inner "
                "learning rate and go on from the last checkpoint"
            )
        state, weight = self.outer_state, self._samples or float(self.schedule.interval)
        ready = Ready(round=state.round, work=state.work, digest=self._digest, weight=weight)
        self.phase, self._samples = 0, 0.0
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="round")

        def run() -> RoundResult:
            return take_round(
                self.averager,
                ready,
                delta_N,
                deadline_s=self.schedule.deadline_s,
                log=self._log,
                stop=self.stop,
                on_offer=self.on_offer,
            )

        self._flight = self._pool.submit(run), weight

    def _land(self) -> None:
        assert self._flight is not None, "no round is under way"
        flight, weight = self._flight
        self._flight = None
        started_s = time.monotonic()
        try:
            result = flight.result()
        except Stopped:
            # As if the round had not begun: what was trained for it is still here, and due.
            self.phase, self._samples = self.phase + self.schedule.interval, self._samples + weight
            raise
        if result.outcome is Outcome.ADOPTED:
            assert result.fetched is not None
            self._adopt(result.fetched, carry=True)
            self._samples += weight
        else:
            self._apply(result)
        self._digest = self.averager.serve(self.outer_state, step=self.steps)
        self._agree_on_phase()
        self.averager.progress(phase=self.phase, step=self.steps)
        self.on_round(
            Landed(
                round=self.outer_state.round,
                step=self.steps,
                state_digest=self._digest,
                waited_s=time.monotonic() - started_s,
                result=result,
            )
        )

    def _apply(self, result: RoundResult) -> None:
        at = self.outer_state.fragment
        self.outer_state = outer_step(self.outer_state, result.average_N, self.outer, work=result.work)
        new_N = self.outer_state.bases[at]
        if self.schedule.overlap_steps:
            mix = np.float32(self.schedule.mix)
            new_N = self._fragments[at].read() * mix + new_N * (np.float32(1) - mix)
        self._fragments[at].write(new_N)

    def _adopt(self, fetched: Fetched, *, carry: bool) -> None:
        """The swarm's state for ours. `carry`: what was trained since our last round is kept, on top of it."""
        theirs = tuple(len(base) for base in fetched.state.bases)
        ours = tuple(fragment.num_values for fragment in self._fragments)
        if theirs != ours:
            raise ValueError(
                f"the swarm trains another model: fragments of {theirs} values, here {ours}; "
                "give every site the same model and the same number of fragments"
            )
        for fragment, old_N, new_N in zip(
            self._fragments, self.outer_state.bases, fetched.state.bases, strict=True
        ):
            fragment.write(new_N + (fragment.read() - fragment.as_held(old_N)) if carry else new_N)
        if not carry:
            self._samples = 0.0
        self.outer_state = fetched.state
        self.steps = max(self.steps, fetched.step)
        self.phase = min(fetched.phase, self.schedule.interval - 1)

    def _agree_on_phase(self) -> None:
        """Ranks of a site must begin a round at the same step, or one would wait in it for another's collective."""
        if self._site is None:
            return
        phase = torch.tensor([self.phase, self.steps])
        torch.distributed.all_reduce(phase, torch.distributed.ReduceOp.MAX, group=self._site)
        self.phase, self.steps = int(phase[0]), int(phase[1])
