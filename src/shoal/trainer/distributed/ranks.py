"""The processes that train one policy together, started by torchrun; or the one process, which is rank 0 of 1.

Rank 0 speaks: it takes batches, writes checkpoints and publishes. The others do what it says, in the same order, and
every collective has a deadline: a rank that is gone ends the others, with words.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from shoal.net.waiting import DeadlinePassed
from shoal.trainer.data.batch import Sample
from shoal.trainer.data.pack import MicroBatch, fit_rows, pack

T = TypeVar("T")

COLLECTIVE_S = 600.0
"""How long one rank may keep the others waiting inside a step."""


class RankLost(DeadlinePassed):
    """Another rank has ended, or did not come to a collective in time."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place. `mesh` and `speech` are None where there is only one."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    speech: "dist.ProcessGroup | None" = None
    """A group of its own for rank 0's words, on the CPU, so that they never stand in line behind tensors."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # -- words ------------------------------------------------------------------------------------------

    def tell(self, words: object) -> None:
        """From rank 0 to all others."""
        if self.size > 1:
            with _named(f"telling the other {self.size - 1} ranks"):
                dist.broadcast_object_list([words], src=0, group=self.speech)

    def listen(self) -> Any:
        """What rank 0 tells."""
        heard: list[Any] = [None]
        with _named("waiting for rank 0"):
            dist.broadcast_object_list(heard, src=0, group=self.speech)
        return heard[0]

    def share_words(self, words: Any) -> Any:
        """Rank 0's words, on every rank. All must call it."""
        if self.leads:
            self.tell(words)
            return words
        return self.listen()

    def agreed(self, stop: threading.Event) -> threading.Event:
        """A stop that is set on all ranks at the same moment, or on none: asked as often on each."""
        return _Agreed(self, stop) if self.size > 1 else stop

    # -- numbers ----------------------------------------------------------------------------------------

    def largest(self, value: float) -> float:
        """Over the ranks."""
        return float(self._reduce([value], dist.ReduceOp.MAX)[0])

    def total(self, value: float) -> float:
        """Over the ranks."""
        return float(self._reduce([value], dist.ReduceOp.SUM)[0])

    def add_up(self, record: T) -> T:
        """A record whose attributes are sums over micro-batches: on each rank the sums over all ranks, in place."""
        if self.size > 1:
            names = [name for name, value in sorted(vars(record).items()) if isinstance(value, int | float)]
            totals = self._reduce([float(getattr(record, name)) for name in names], dist.ReduceOp.SUM)
            for name, total in zip(names, totals.tolist(), strict=True):
                setattr(record, name, type(getattr(record, name))(total))
        return record

    def _reduce(self, values: list[float], op: Any) -> Tensor:
        sent = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            with _named("adding up over the ranks"):
                dist.all_reduce(sent, op=op, group=self.speech)
        return sent

    # -- work -------------------------------------------------------------------------------------------

    def share(
        self, samples: "tuple[Sample, ...] | list[Sample]", *, row_tokens: int, rows_per_micro_batch: int
    ) -> list[MicroBatch]:
        """This rank's micro-batches of a batch. As many on each rank: gathers and sums must meet their like.

        Rows go round the ranks, the fullest first. A rank with less to do ends with rows that hold no output token,
        whose loss and gradient are zero.
        """
        if self.size == 1:
            return pack(samples, row_tokens=row_tokens, rows_per_micro_batch=rows_per_micro_batch)
        rows = fit_rows(samples, row_tokens)
        mine = [sample for row in rows[self.rank :: self.size] for sample in row]
        micros = pack(mine or samples[:1], row_tokens=row_tokens, rows_per_micro_batch=rows_per_micro_batch)
        empty = _nothing(micros[0])
        micros = micros if mine else []
        wanted = round(self.largest(len(micros)))
        return micros + [empty] * (wanted - len(micros))

    # -- tensors ----------------------------------------------------------------------------------------

    def whole(self, tensor: Tensor) -> Tensor:
        """A sharded tensor's full value, on the CPU of rank 0; elsewhere what it returns says nothing. All must call it."""
        if isinstance(tensor, DTensor):
            with _named("gathering weights"):
                full: Tensor = tensor.full_tensor()
            return full.cpu() if self.leads else full[:0]
        return tensor.detach().to("cpu", copy=True)

    def spread(self, value: Tensor | None, into: Tensor) -> None:
        """Write rank 0's full `value` into `into`, sharded or not. All must call it."""
        with torch.no_grad():
            if not isinstance(into, DTensor):
                assert value is not None, "one rank has the value"
                into.copy_(value)
                return
            full = value if value is not None else torch.empty(into.shape)
            with _named("spreading weights"):
                full = full.to(device=into.device, dtype=into.dtype)
                into.copy_(distribute_tensor(full, into.device_mesh, into.placements))

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = Ranks()


def join_ranks(*, rank: int, size: int, device: str, speech_s: float) -> Ranks:
    """Meet the other ranks where torchrun's environment says. `speech_s`: the longest silence of rank 0."""
    if size == 1:
        return ALONE
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        timeout=timedelta(seconds=COLLECTIVE_S),
        device_id=torch.device(device) if kind == "cuda" else None,
    )
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size), "torchrun numbers the ranks"
    speech = dist.new_group(backend="gloo", timeout=timedelta(seconds=speech_s))
    return Ranks(rank, size, init_device_mesh(kind, (size,)), speech)


class _Agreed(threading.Event):
    def __init__(self, ranks: Ranks, stop: threading.Event) -> None:
        super().__init__()
        self._ranks, self._stop = ranks, stop

    def is_set(self) -> bool:
        return self._ranks.largest(float(self._stop.is_set())) > 0


def _nothing(like: MicroBatch) -> MicroBatch:
    """The first two tokens of a micro-batch, and none of them to be learnt from."""
    parts = {field.name: getattr(like, field.name) for field in fields(like)}
    return MicroBatch(
        **{name: value[:1, :2] if name.endswith("_BT") else value[:0] for name, value in parts.items()}
    )


@contextlib.contextmanager
def _named(doing: str) -> Iterator[None]:
    """Torch raises RuntimeError for a lost peer and a passed deadline alike."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(
            f"{doing}: another rank has ended or did not come in time; its own log says why "
            f"({str(error).strip().splitlines()[0]})"
        ) from error
