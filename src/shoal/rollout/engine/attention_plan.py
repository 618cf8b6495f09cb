"""Which running rows look at which part of a prompt together, as a list of work for the kernel that does it. No torch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int64]


class PieceSize(NamedTuple):
    rows: int
    """Rows of one prompt that look at it together."""
    positions: int
    """Of the prompt, looked at by one program."""


class Pieces:
    def __init__(self, num_slots: int, max_prompt: int, size: PieceSize) -> None:
        self._size = size
        self._max_splits = max(1, -(-max_prompt // size.positions))
        self._places_S, self._lengths_S = np.full(num_slots, -1), np.zeros(num_slots, dtype=np.int64)
        """Of the prompt of the row in each slot; place -1 where none runs."""
        self._is_new = False

    @property
    def max_items(self) -> int:
        return len(self._places_S) * self._max_splits

    @property
    def width(self) -> int:
        """Of the table."""
        return 1 + len(self._places_S) + 5 * self.max_items

    def enter(self, slots: Iterable[int], places: Sequence[int], lengths: Sequence[int]) -> None:
        index = list(slots)
        self._places_S[index], self._lengths_S[index] = places, lengths
        self._is_new = True

    def leave(self, slots: Sequence[int]) -> None:
        self._places_S[slots] = -1
        self._is_new = True

    def take_over(self, old: "Pieces") -> None:
        num_slots = len(old._places_S)
        self._places_S[:num_slots], self._lengths_S[:num_slots] = old._places_S, old._lengths_S
        self._is_new = True

    def changed(self) -> Table | None:
        """The table, if rows came or went since it was last asked for: how many items there are; the slots by prompt; and
        for each item, a line each: where among those slots its rows begin, how many they are, their prompt's place, the
        first position to look at, how many positions."""
        if not self._is_new:
            return None
        self._is_new = False
        table = np.zeros(self.width, dtype=np.int64)
        slots = np.flatnonzero(self._places_S >= 0)
        if len(slots) > 0:
            slots = slots[np.argsort(self._places_S[slots], kind="stable")]
            items = self._items(slots)
            table[0] = items.shape[1]
            table[1 : 1 + len(slots)] = slots
            table[1 + len(self._places_S) :].reshape(5, -1)[:, : items.shape[1]] = items
        return table

    def _items(self, slots: Table) -> Table:
        places, index = self._places_S[slots], np.arange(len(slots))
        family_starts = np.maximum.accumulate(np.where(np.diff(places, prepend=-1) != 0, index, 0))
        starts = np.flatnonzero((index - family_starts) % self._size.rows == 0)
        counts = np.diff(starts, append=len(slots))
        lengths = self._lengths_S[slots[starts]]
        num_splits = -(-lengths // self._size.positions)
        piece = np.repeat(np.arange(len(starts)), num_splits)
        split = np.arange(len(piece)) - np.repeat(np.cumsum(num_splits) - num_splits, num_splits)
        begin = split * self._size.positions
        num = np.minimum(lengths[piece] - begin, self._size.positions)
        return np.stack((starts[piece], counts[piece], places[starts[piece]], begin, num))
