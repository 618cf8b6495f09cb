"""Which rows have ended, learned from the device without making it wait."""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class _Note(NamedTuple):
    step: int
    ended_S: Tensor
    """On the host; complete once `written` has happened."""
    written: torch.cuda.Event | None


class Watch:
    """After each step a copy of `ended` sets out; it is read when `lookahead` more steps have been launched."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._notes: deque[_Note] = deque()
        self._spare: list[_Note] = []
        """Read ones, whose pinned memory and event are used again: both take longer to make than a copy takes."""

    def note(self, step: int, ended_S: Tensor) -> None:
        if ended_S.device.type == "cpu":
            self._notes.append(_Note(step, ended_S.clone(), None))
            return
        host_S, written = self._pinned(ended_S)
        host_S.copy_(ended_S, non_blocking=True)
        written.record()
        self._notes.append(_Note(step, host_S, written))

    def read(self) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """(step, ended) of every step that is old enough."""
        found: list[tuple[int, npt.NDArray[np.int64]]] = []
        while len(self._notes) > self._lookahead:
            note = self._notes.popleft()
            if note.written is None:
                found.append((note.step, note.ended_S.numpy()))
                continue
            note.written.synchronize()
            found.append((note.step, note.ended_S.numpy().copy()))
            self._spare.append(note)
        return found

    def _pinned(self, ended_S: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        while self._spare:
            _, host_S, written = self._spare.pop()
            if host_S.shape == ended_S.shape and written is not None:
                return host_S, written
        host_S = torch.empty(ended_S.shape, dtype=ended_S.dtype, pin_memory=True)
        return host_S, torch.cuda.Event()  # type: ignore[no-untyped-call]
