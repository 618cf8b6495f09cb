"""The ranks of one site: processes of torchrun that train one model together. Only rank 0 is connected to other sites.

    rank 0        DiLoCo:        inner step ──▶ read ──▶ round with the other sites ──▶ write ──▶ release
                                                 ▲                                        │
    other ranks   SiteFollower:  inner step ──▶ follow: take part in every read and write ┴──▶ released

Parameters are whole on every rank, or DTensors of which each rank has a shard (FSDP2). Rank 0 reads them whole, so that the
outer state and what is sent to other sites do not depend on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.diloco.fragments import Fragment, fragments_of
from shoal.diloco.outer import Vector
from shoal.diloco.ranks import Ranks
from shoal.net.waiting import Stopped


class SiteCommand(IntEnum):
    """What rank 0 tells the other ranks to do next."""

    READ = 0
    """Take part in reading a fragment."""
    WRITE = 1
    """Take part in writing a fragment."""
    RELEASE = 2
    """Continue: the operation is complete."""
    STOPPED = 3
    """Raise Stopped, as rank 0 does."""
    STEP = 4
    """Take one more inner step (site.py)."""
    END = 5
    """The run is over (site.py)."""


@dataclass(frozen=True, slots=True)
class RankCommand:
    """A command of rank 0 with its arguments."""

    command: SiteCommand
    fragment: int = 0
    steps: int = 0


class WholeFragment(Fragment):
    """A fragment that rank 0 reads and writes whole, while the other ranks take part (`SiteFollower.follow`)."""

    def __init__(self, fragment: Fragment, index: int, ranks: Ranks) -> None:
        self._index, self._ranks = index, ranks
        super().__init__(fragment.parameters)

    def read(self) -> Vector:
        self._ranks.broadcast(RankCommand(SiteCommand.READ, fragment=self._index))
        return super().read()

    def write(self, values_N: Vector) -> None:
        self._ranks.broadcast(RankCommand(SiteCommand.WRITE, fragment=self._index))
        super().write(values_N)

    def _size(self, parameter: nn.Parameter) -> int:
        return parameter.numel()

    def _value(self, parameter: nn.Parameter) -> Tensor:
        return self._ranks.full(parameter.detach())

    def _set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        self._ranks.scatter(value.view(parameter.shape), parameter)

    def take_part(self, command: SiteCommand) -> None:
        """Does a rank's part of rank 0's `read` or `write`."""
        for parameter in self.parameters:
            if command is SiteCommand.READ:
                self._ranks.full(parameter.detach())
            else:
                self._ranks.scatter(None, parameter)


def whole_fragments(fragments: Sequence[Fragment], ranks: Ranks) -> list[WholeFragment]:
    """Returns the fragments that a site of several ranks averages."""
    return [WholeFragment(fragment, index, ranks) for index, fragment in enumerate(fragments)]


class SiteFollower:
    """The optimizer of a rank other than 0: the inner steps, and its part of what rank 0's DiLoCo does with the parameters.

    Every method that DiLoCo has too must be called when rank 0 calls it.
    """

    def __init__(self, model: nn.Module, *, inner: Optimizer, ranks: Ranks, num_fragments: int = 1) -> None:
        self.inner, self._ranks = inner, ranks
        self._fragments = whole_fragments(fragments_of(model, num_fragments), ranks)
        self.steps = 0
        """Inner steps of the run so far, as rank 0 counts them."""
        self.follow()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def join(self) -> None:
        self.follow()

    def count_samples(self, num_samples: float) -> None:
        """Does nothing: rank 0 counts the samples of all ranks."""

    def step(self) -> None:
        self.inner.step()
        self.follow()

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state: rank 0 writes the checkpoint."""
        self.follow()
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores rank 0's `state_dict`. That of a trainer has no "inner": the learner restores the moments."""
        if "inner" in state_dict:
            self.inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]

    def close(self) -> None:
        """Does nothing: rank 0 leaves the swarm."""

    def follow(self) -> SiteCommand:
        """Takes part in reads and writes until rank 0 gives another command, and returns that. Raises Stopped if rank 0 does."""
        while True:
            told: RankCommand = self._ranks.receive()
            if told.command not in (SiteCommand.READ, SiteCommand.WRITE):
                break
            self._fragments[told.fragment].take_part(told.command)
        if told.command is SiteCommand.STOPPED:
            raise Stopped("rank 0 was stopped")
        if told.command is SiteCommand.RELEASE:
            self.steps = told.steps
        return told.command
