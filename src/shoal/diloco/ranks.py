"""The processes that train one policy together: started by torchrun, or a single process, which is rank 0 of 1.

Rank 0 decides: it fetches batches, writes checkpoints, publishes, and speaks to other sites. It broadcasts commands
(trainer/distributed/lockstep.py, site_ranks.py), and the other ranks execute them in the same order. Every collective has a timeout,
so that a rank that died ends the others with an error instead of a hang.
"""

import contextlib
import gc
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from shoal.net.waiting import DeadlinePassed

COLLECTIVE_TIMEOUT_S = 600.0
"""How long one rank may keep the others waiting inside a step or a checkpoint."""


class RankLost(DeadlinePassed):
    """Another rank has ended, or did not reach a collective before the timeout."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank and the groups it shares with the others. The groups are None in a single process."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    commands: "dist.ProcessGroup | None" = None
    """Carries rank 0's commands and small numbers, on the CPU: they never queue behind tensors."""
    checkpoints: "dist.ProcessGroup | None" = None
    """Used by the thread that writes a checkpoint while the next step uses the other groups."""

    @property
    def leads(self) -> bool:
        """Returns whether this is rank 0."""
        return self.rank == 0

    # -- commands ---------------------------------------------------------------------------------------

    def broadcast(self, command: object) -> None:
        """Sends rank 0's command to all other ranks. Does nothing in a single process."""
        if self.size > 1:
            with explain_lost_rank(f"sending a command to the other {self.size - 1} ranks"):
                dist.broadcast_object_list([command], src=0, group=self.commands)

    def receive(self) -> Any:
        """Waits for rank 0's next command and returns it."""
        received: list[Any] = [None]
        with explain_lost_rank("waiting for a command of rank 0"):
            dist.broadcast_object_list(received, src=0, group=self.commands)
        return received[0]

    def wait_for_all(self) -> None:
        """Waits until every rank has called this."""
        self.total(0.0)

    def shared_stop(self, stop: threading.Event) -> threading.Event:
        """Returns an event whose `is_set` gives the same answer on all ranks. Every rank must ask equally often."""
        return _SharedStop(self, stop) if self.size > 1 else stop

    # -- numbers ----------------------------------------------------------------------------------------

    def largest(self, value: float) -> float:
        """Returns the maximum over the ranks."""
        return float(self._reduce([value], dist.ReduceOp.MAX)[0])

    def total(self, value: float) -> float:
        """Returns the sum over the ranks."""
        return float(self._reduce([value], dist.ReduceOp.SUM)[0])

    def totals(self, values: list[float]) -> list[float]:
        """Returns the sum over the ranks of each value."""
        return [float(total) for total in self._reduce(values, dist.ReduceOp.SUM)]

    def _reduce(self, values: list[float], op: Any) -> Tensor:
        reduced = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            with explain_lost_rank("adding numbers over the ranks"):
                dist.all_reduce(reduced, op=op, group=self.commands)
        return reduced

    # -- tensors ----------------------------------------------------------------------------------------

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replaces tensors, which have the same shapes on every rank, by their sums over the ranks."""
        if self.size > 1:
            with explain_lost_rank("adding gradients"):
                for tensor in tensors:
                    dist.all_reduce(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a sharded tensor's full value on the CPU of rank 0, and an empty tensor on the other ranks.

        All ranks must call it.
        """
        return self.full(tensor.detach()).to("cpu", copy=not isinstance(tensor, DTensor))

    def full(self, tensor: Tensor) -> Tensor:
        """Returns a sharded tensor's full value on rank 0's device, and an empty tensor on the other ranks. All must call it."""
        with explain_lost_rank("gathering weights"):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole if self.leads else whole.new_empty(0)

    def scatter(self, value: Tensor | None, into: Tensor) -> None:
        """Writes rank 0's full `value` into `into`, sharded or not. All ranks must call it; the others may give None."""
        full = value if value is not None else torch.empty(into.shape)
        with torch.no_grad():
            if isinstance(into, DTensor):
                with explain_lost_rank("scattering weights"):
                    full = full.to(device=into.device, dtype=into.dtype)
                    into.copy_(distribute_tensor(full, into.device_mesh, into.placements))
                return
            into.copy_(full)
            if self.size > 1:
                with explain_lost_rank("sending weights to the other ranks"):
                    dist.broadcast(into.detach(), src=0)

    def leave(self) -> None:
        """Destroys the process groups."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def release(self) -> None:
        """Waits for the groups' threads, after `leave`, when nothing that refers to the groups is in use any more.

        A gloo thread that releases its last tensor while Python exits aborts the process, although its work is done. Not to be
        called after an error: a thread may then wait for a rank that is gone.
        """
        if self.size > 1:
            for name in ("mesh", "commands", "checkpoints"):
                object.__setattr__(self, name, None)
            gc.collect()  # the learner refers to the groups too, and is part of reference cycles


SINGLE_PROCESS = Ranks()


def join_ranks(*, rank: int, size: int, device: str, command_timeout_s: float) -> Ranks:
    """Connects to the other ranks at the address in torchrun's environment.

    `command_timeout_s` is the longest time between two commands of rank 0.
    """
    if size == 1:
        return SINGLE_PROCESS
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(torch.device(device))
    collective_timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        timeout=collective_timeout,
        device_id=torch.device(device) if kind == "cuda" else None,
    )
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size), "torchrun numbers the ranks"
    commands = dist.new_group(backend="gloo", timeout=timedelta(seconds=command_timeout_s))
    checkpoints = dist.new_group(backend="gloo", timeout=collective_timeout)
    return Ranks(rank, size, init_device_mesh(kind, (size,)), commands, checkpoints)


class _SharedStop(threading.Event):
    def __init__(self, ranks: Ranks, stop: threading.Event) -> None:
        super().__init__()
        self._ranks, self._stop = ranks, stop

    def is_set(self) -> bool:
        return self._ranks.largest(float(self._stop.is_set())) > 0


@contextlib.contextmanager
def explain_lost_rank(doing: str) -> Iterator[None]:
    """Raises RankLost for torch's RuntimeError, which it raises for a lost peer and for a timeout alike."""
    try:
        yield
    except RuntimeError as error:
        raise _rank_lost(doing, error) from error


def as_lost_rank(error: RuntimeError, ranks: Ranks) -> Exception:
    """Returns RankLost for a collective that failed inside a step, where torch's message names only sockets."""
    words = ("gloo", "nccl", "connection", "timed out")
    if ranks.size > 1 and any(word in _first_line(error).lower() for word in words):
        return _rank_lost(f"rank {ranks.rank} in a step", error)
    return error


def _rank_lost(doing: str, error: RuntimeError) -> RankLost:
    return RankLost(
        f"{doing}: another rank has ended or did not answer in time ({_first_line(error)}); its own log says why. Start all ranks "
        "again with the same command: they continue from the last checkpoint"
    )


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
