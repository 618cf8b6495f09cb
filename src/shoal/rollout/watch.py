"""Which rows have ended, learned from the device without making it wait."""

from collections import deque
from typing import NamedTuple

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

    def note(self, step: int, ended_S: Tensor) -> None:
        if ended_S.device.type == "cpu":
            self._notes.append(_Note(step, ended_S.clone(), None))
            return
        host_S = torch.empty(ended_S.shape, dtype=ended_S.dtype, pin_memory=True)
        host_S.copy_(ended_S, non_blocking=True)
        written = torch.cuda.Event()  # type: ignore[no-untyped-call]
        written.record()
        self._notes.append(_Note(step, host_S, written))

    def read(self) -> list[tuple[int, list[int]]]:
        """(step, ended) of every step that is old enough."""
        found: list[tuple[int, list[int]]] = []
        while len(self._notes) > self._lookahead:
            note = self._notes.popleft()
            if note.written is not None:
                note.written.synchronize()
            found.append((note.step, note.ended_S.tolist()))
        return found
