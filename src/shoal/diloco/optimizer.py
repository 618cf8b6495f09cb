"""DiLoCo as a torch optimizer: ordinary inner steps, and after every H of them an outer step on all sites' average change.

    optimizer = DiLoCo(model, inner=AdamW(model.parameters(), lr=4e-4), averager=averager)
    for batch in batches:
        loss(model, batch).backward()
        optimizer.count_samples(len(batch))
        optimizer.step()
        optimizer.zero_grad()

Learning-rate schedulers and gradient scalers work with it as with the inner optimizer. The inner state stays on its
device; the outer state is in main memory. `Schedule(fragments=K, overlap_steps=tau, mix=alpha)` is Streaming DiLoCo: the
layers are averaged in K fragments, one after another, in the background while training continues.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.background import BackgroundTask
from shoal.diloco.averaging.averager import Averager, FetchedState, Ready
from shoal.diloco.fragments import fragments_of
from shoal.diloco.outer import Outer, OuterState, first_state, is_finite, outer_step
from shoal.diloco.ranks import SINGLE_PROCESS, Ranks
from shoal.diloco.rounds import RoundOutcome, RoundResult, take_round
from shoal.diloco.site_ranks import RankCommand, SiteCommand, whole_fragments
from shoal.net.waiting import Stopped
from shoal.telemetry import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Defines when rounds happen. Every peer of a run must have the same `inner_steps` and `fragments`."""

    inner_steps: int = 500
    """H: inner steps between two rounds on the same parameters."""
    deadline_s: float = 600.0
    """Seconds after which a round without agreement is taken alone."""
    fragments: int = 1
    overlap_steps: int = 0
    """tau: inner steps taken while a round is in flight. 0 waits for the round."""
    mix: float = 0.5
    """alpha: the share of a fragment's own values that is kept when an overlapped round completes."""

    def __post_init__(self) -> None:
        if self.fragments < 1 or self.inner_steps < 1 or self.inner_steps % self.fragments:
            raise ValueError(
                f"inner_steps={self.inner_steps} must be a multiple of fragments={self.fragments}"
            )
        if not 0 <= self.overlap_steps < self.interval or not 0 <= self.mix < 1:
            raise ValueError(
                f"overlap_steps={self.overlap_steps} must be below the {self.interval} steps between two rounds, "
                f"and mix={self.mix} in [0, 1)"
            )

    @property
    def interval(self) -> int:
        """Returns the number of inner steps between two rounds."""
        return self.inner_steps // self.fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """A completed round, as passed to `on_round`."""

    round: int
    step: int
    state_digest: str
    waited_s: float
    """Seconds in which no inner step was taken."""
    result: RoundResult


class DiLoCo(Optimizer):
    """The optimizer of one site.

    A site of several ranks has `ranks`: this is then rank 0's optimizer, the others have a SiteFollower, and rank 0 averages whole
    parameters. With `site` instead, the process group of the ranks, every rank averages its own shard with that of other sites.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        inner: Optimizer,
        averager: Averager,
        outer: Outer | None = None,
        schedule: Schedule | None = None,
        site: Any = None,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        if not isinstance(outer or Outer(), Outer):
            raise ValueError(
                f"outer={type(outer).__name__}: the outer step works on vectors in main memory, not on parameters; "
                "use shoal.diloco.Outer(lr=0.7, momentum=0.9, nesterov=True)"
            )
        # The base class is not initialised: groups, state and defaults are the inner optimizer's own objects, so that
        # a learning rate set here, or gradients unscaled here, take effect there.
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.averager = averager
        self.outer = outer or Outer()
        self.schedule = schedule or Schedule()
        self.steps = 0
        """Inner steps of the run so far, for a learning-rate schedule. A new peer adopts the swarm's count."""
        self.phase = 0
        """Inner steps since the last round."""
        self.joined = False
        self.stop = threading.Event()
        self.on_round: Callable[[RoundReport], None] = lambda report: None
        self.on_offer: Callable[[int], None] = lambda round: None
        """Called with a round's number before any other peer receives this site's pseudo-gradient."""
        self.keep_local_work = True
        """Whether `join` adds what was trained since the last round to a newer state. False after a restart, unless it is
        certain that no other peer received it: the newer state may include it already."""
        self._site, self._ranks = site, ranks
        self._operations = 0
        """Operations in progress that release the other ranks at their end; they can be nested."""
        self._log = Log("diloco")
        self._samples = 0.0
        fragments = fragments_of(model, self.schedule.fragments)
        self._fragments = fragments if ranks.size == 1 else whole_fragments(fragments, ranks)
        self._lengths = tuple(fragment.num_values for fragment in self._fragments)
        with self._releasing_ranks():
            first = tuple(fragment.read() for fragment in self._fragments)
        self.outer_state: OuterState = first_state(first)
        self._digest = ""
        self._in_flight: tuple[BackgroundTask[RoundResult], float] | None = None

    # -- called by the training loop ------------------------------------------------------------------------

    def join(self, *, deadline_s: float = 600.0) -> bool:
        """Joins the swarm and adopts its state if that is newer; returns whether it was."""
        with self._releasing_ranks():
            fetched = self.averager.join(deadline_s=deadline_s, lengths=self._lengths)
            adopted = fetched is not None and fetched.state.work > self.outer_state.work
            if fetched is not None and (adopted or not self.steps):
                self._adopt(fetched, keep_work=self.keep_local_work)
        self._agree_on_phase()
        self._digest = self.averager.serve(self.outer_state, step=self.steps, phase=self.phase)
        self.joined = True
        return adopted

    def count_samples(self, num_samples: float) -> None:
        """Counts samples behind this site's next pseudo-gradient. Their number is its weight in the average."""
        self._samples += num_samples

    def step(self, closure: Any = None) -> Any:
        """Takes an inner step, and starts or completes a round when one is due."""
        if not self.joined:
            self.join(deadline_s=self.schedule.deadline_s)
        loss = self.inner.step(closure)
        self.steps += 1
        self.phase += 1
        self.averager.progress(phase=self.phase, step=self.steps)
        with self._releasing_ranks():
            if self._in_flight is not None and self.phase >= self.schedule.overlap_steps:
                self._complete_round()
            if self.phase >= self.schedule.interval:
                self._start_round()
                if not self.schedule.overlap_steps:
                    self._complete_round()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything but the model's weights. Completes a round in flight first, or abandons it after `stop`."""
        with self._releasing_ranks():
            if self._in_flight is not None:
                with contextlib.suppress(Stopped):
                    self._complete_round()
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
        """Restores a `state_dict`. Call it before `join`, with the model's weights of the same step loaded."""
        theirs = tuple(len(base) for base in state_dict["bases"])
        if theirs != self._lengths:
            raise ValueError(
                f"the checkpoint has fragments of {theirs} values, this model {self._lengths}: another model, or another number of "
                "fragments; use those of the checkpoint, or start in another folder"
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
        self.keep_local_work = False

    @property
    def in_flight(self) -> bool:
        """Returns whether a round has started and is not completed."""
        return self._in_flight is not None

    def close(self) -> None:
        """Leaves the swarm. What was trained since the last round stays in the model."""
        self.stop.set()
        self.averager.leave()

    @contextlib.contextmanager
    def _releasing_ranks(self) -> Iterator[None]:
        """Tells the site's other ranks at the end of the outermost operation to continue, or to stop as this rank does."""
        self._operations += 1
        try:
            yield
        except Stopped:
            self._end_operation(RankCommand(SiteCommand.STOPPED))
            raise
        self._end_operation(RankCommand(SiteCommand.RELEASE, steps=self.steps))

    def _end_operation(self, command: RankCommand) -> None:
        self._operations -= 1
        if not self._operations:
            self._ranks.broadcast(command)

    # -- rounds ---------------------------------------------------------------------------------------------

    def pseudo_gradient(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Returns how far this site has moved the fragment of the next round, with the sign of a gradient."""
        at = self.outer_state.fragment
        fragment = self._fragments[at]
        return fragment.as_stored(self.outer_state.bases[at]) - fragment.read()

    def _start_round(self) -> None:
        delta_N = self.pseudo_gradient()
        if not is_finite(delta_N):
            # In an average these values would destroy the weights of every site.
            raise ValueError(
                f"the weights are not finite after {self.steps} inner steps, so they are not sent to the other sites; "
                "lower the inner learning rate and restart from the last checkpoint"
            )
        state, weight = self.outer_state, self._samples or float(self.schedule.interval)
        ready = Ready(round=state.round, work=state.work, digest=self._digest, weight=weight)
        self.phase, self._samples = 0, 0.0

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

        self._in_flight = BackgroundTask("round", run), weight

    def _complete_round(self) -> None:
        assert self._in_flight is not None, "no round is in flight"
        task, weight = self._in_flight
        self._in_flight = None
        started_s = time.monotonic()
        try:
            task.wait()
            result = task.result()
            del task  # frees the pseudo-gradient, so that the outer step needs one vector less of main memory
        except Stopped:
            # The round counts as not started: its steps and samples stay, and the next step starts it again.
            self.phase, self._samples = self.phase + self.schedule.interval, self._samples + weight
            raise
        if result.outcome is RoundOutcome.ADOPTED:
            assert result.fetched is not None
            self._adopt(result.fetched, keep_work=True)
            self._samples += weight
        else:
            self._apply(result)
        self._agree_on_phase()
        self._digest = self.averager.serve(self.outer_state, step=self.steps, phase=self.phase)
        self.on_round(
            RoundReport(
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

    def _adopt(self, fetched: FetchedState, *, keep_work: bool) -> None:
        """Replaces this site's state by the swarm's. `keep_work`: what was trained since the last round is added to it."""
        theirs = tuple(len(base) for base in fetched.state.bases)
        if theirs != self._lengths:
            raise ValueError(
                f"the swarm trains another model: fragments of {theirs} values, here {self._lengths}; "
                "use the same model and the same number of fragments at every site"
            )
        for fragment, old_N, new_N in zip(
            self._fragments, self.outer_state.bases, fetched.state.bases, strict=True
        ):
            fragment.write(new_N + (fragment.read() - fragment.as_stored(old_N)) if keep_work else new_N)
        if not keep_work:
            self._samples = 0.0
        self.outer_state = fetched.state
        # The sender may be in its round already. This site joins that round after one more step, and must then have counted as
        # many steps as the sender: otherwise it ends the run a step too early and misses the last round.
        self.phase = min(fetched.phase, self.schedule.interval - 1)
        # An honest sender is less than two rounds past its state's round, which the digest binds. A liar could name the last step.
        step = min(fetched.step, (fetched.state.round + 2) * self.schedule.interval)
        self.steps = max(self.steps, step - (fetched.phase - self.phase))

    def _agree_on_phase(self) -> None:
        """Sets all ranks of the site to the same step. Otherwise one could start a round while another waits in a collective."""
        if self._site is None:
            return
        phase = torch.tensor([self.phase, self.steps])
        torch.distributed.all_reduce(phase, torch.distributed.ReduceOp.MAX, group=self._site)
        self.phase, self.steps = int(phase[0]), int(phase[1])
