"""The ranks of one site: processes of torchrun that train one model together. Only rank 0 is connected to other sites.

    rank 0        DiLoCo:        inner step ──▶ read ──▶ round with the other sites ──▶ write ──▶ release
                                                 ▲                                        │
    other ranks   SiteFollower:  inner step ──▶ follow: take part in every read and write ┴──▶ released

Parameters are whole on every rank, or DTensors of which each rank has a shard (FSDP2). Rank 0 reads them whole, so that the
outer state and what is sent to other sites do not depend on the number of ranks.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from shoal.diloco.fragments import Fragment, fragments_of
from shoal.diloco.outer import Vector
from shoal.net.waiting import DeadlinePassed, Stopped


class SiteRankLost(DeadlinePassed):
    """Another rank of the site has ended, or did not answer in time."""


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
class ReceivedCommand:
    """A command of rank 0 as received."""

    command: SiteCommand
    fragment: int
    steps: int


class SiteRanks:
    """This process's rank in its site."""

    def __init__(self, rank: int, size: int, *, commands: "dist.ProcessGroup | None") -> None:
        """`commands` is a gloo group; its timeout must be longer than a round with the other sites."""
        self.rank, self.size, self._commands = rank, size, commands

    @property
    def leads(self) -> bool:
        """Returns whether this is rank 0."""
        return self.rank == 0

    def tell(self, command: SiteCommand, *, fragment: int = 0, steps: int = 0) -> None:
        """Sends a command to the other ranks."""
        with self.explain_lost_rank(f"rank 0 was sending {command.name}"):
            told = torch.tensor([command, fragment, steps])
            dist.broadcast(told, src=0, group=self._commands)

    def listen(self) -> ReceivedCommand:
        """Waits for rank 0's next command."""
        told = torch.zeros(3, dtype=torch.int64)
        with self.explain_lost_rank(f"rank {self.rank} was waiting for rank 0"):
            dist.broadcast(told, src=0, group=self._commands)
        command, fragment, steps = told.tolist()
        return ReceivedCommand(SiteCommand(command), fragment, steps)

    def release(self) -> None:
        """Destroys the process groups and waits for their threads. Call it when the site's work is done, not after an error.

        A gloo thread that releases its last tensor while Python exits aborts the process.
        """
        dist.destroy_process_group()
        self._commands = None
        gc.collect()  # the site refers to the groups too, and is part of reference cycles

    def wait_for_all(self) -> None:
        """Waits until every rank has called this."""
        with self.explain_lost_rank(f"rank {self.rank} was waiting for the other ranks"):
            dist.barrier(group=self._commands)

    @torch.no_grad()
    def add_gradients(self, model: nn.Module, loss: float) -> float:
        """Replaces the gradients of whole parameters by their sums over the ranks; returns the sum of the losses."""
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        total = torch.tensor([loss], dtype=torch.float64)
        with self.explain_lost_rank(f"rank {self.rank} was adding gradients"):
            for gradient in gradients:
                dist.all_reduce(gradient)
            dist.all_reduce(total, group=self._commands)
        return float(total[0])

    @contextlib.contextmanager
    def explain_lost_rank(self, doing: str) -> Iterator[None]:
        """Raises SiteRankLost for torch's RuntimeError, which it raises for a lost rank and for a timeout alike."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise SiteRankLost(
                f"{doing}, and one of the site's {self.size} ranks has ended or did not answer in time ({reason}); its own log "
                "says why. Start all ranks of the site again with the same command: they continue from the last checkpoint"
            ) from error


def join_site_ranks(*, rank: int, size: int, device: str, timeout_s: float) -> SiteRanks:
    """Connects to the site's other ranks at the address in torchrun's environment.

    `timeout_s` is the longest time between two commands of rank 0: a round, or the wait for other sites at the start.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size), "torchrun numbers the ranks"
    commands = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return SiteRanks(rank, size, commands=commands)


class WholeFragment(Fragment):
    """A fragment that rank 0 reads and writes whole, while the other ranks take part (`SiteFollower.follow`)."""

    def __init__(self, fragment: Fragment, index: int, ranks: SiteRanks) -> None:
        self._parameters, self._index, self._ranks = fragment._parameters, index, ranks
        self.num_values = sum(parameter.numel() for parameter in self._parameters)

    @torch.no_grad()
    def read(self) -> Vector:
        self._ranks.tell(SiteCommand.READ, fragment=self._index)
        values_N = np.empty(self.num_values, np.float32)
        into, at = torch.from_numpy(values_N), 0
        for parameter in self._parameters:
            into[at : at + parameter.numel()].copy_(self.gather(parameter).reshape(-1))
            at += parameter.numel()
        return values_N

    @torch.no_grad()
    def write(self, values_N: Vector) -> None:
        self._ranks.tell(SiteCommand.WRITE, fragment=self._index)
        at = 0
        for parameter in self._parameters:
            value = torch.from_numpy(values_N[at : at + parameter.numel()]).view(parameter.shape)
            self.scatter(value, parameter)
            at += parameter.numel()

    def _size(self, parameter: nn.Parameter) -> int:
        return parameter.numel()

    @torch.no_grad()
    def take_part(self, command: SiteCommand) -> None:
        """Does a rank's part of rank 0's `read` or `write`."""
        for parameter in self._parameters:
            if command is SiteCommand.READ:
                self.gather(parameter)
            else:
                self.scatter(torch.empty(parameter.shape), parameter)

    def gather(self, parameter: nn.Parameter) -> Tensor:
        """Returns a parameter's whole value. All ranks must call it."""
        held = parameter.detach()
        if not isinstance(held, DTensor):
            return held
        with self._ranks.explain_lost_rank(f"rank {self._ranks.rank} was gathering weights"):
            return held.full_tensor()

    def scatter(self, value: Tensor, into: nn.Parameter) -> None:
        """Writes rank 0's whole `value` into a parameter of every rank. All ranks must call it."""
        with self._ranks.explain_lost_rank(f"rank {self._ranks.rank} was receiving merged weights"):
            if isinstance(into, DTensor):
                whole = value.to(device=into.device, dtype=into.dtype)
                into.copy_(distribute_tensor(whole, into.device_mesh, into.placements))
                return
            if self._ranks.leads:
                into.copy_(value)
            dist.broadcast(into.detach(), src=0)


def whole_fragments(fragments: Sequence[Fragment], ranks: SiteRanks) -> list[WholeFragment]:
    """Returns the fragments that a site of several ranks averages."""
    return [WholeFragment(fragment, index, ranks) for index, fragment in enumerate(fragments)]


class SiteFollower:
    """The optimizer of a rank other than 0: the inner steps, and its part of what rank 0's DiLoCo does with the parameters.

    Every method that DiLoCo has too must be called when rank 0 calls it.
    """

    def __init__(
        self, model: nn.Module, *, inner: Optimizer, ranks: SiteRanks, num_fragments: int = 1
    ) -> None:
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
        self.inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]

    def close(self) -> None:
        """Does nothing: rank 0 leaves the swarm."""

    def follow_to_end(self) -> None:
        """Takes part in the remaining operations of rank 0, until it ends the run."""
        while self.follow() is not SiteCommand.END:
            pass

    def follow(self) -> SiteCommand:
        """Takes part in reads and writes until rank 0 gives another command, and returns that. Raises Stopped if rank 0 does."""
        while (told := self._ranks.listen()).command in (SiteCommand.READ, SiteCommand.WRITE):
            self._fragments[told.fragment].take_part(told.command)
        if told.command is SiteCommand.STOPPED:
            raise Stopped("rank 0 was stopped")
        if told.command is SiteCommand.RELEASE:
            self.steps = told.steps
        return told.command
