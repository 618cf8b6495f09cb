"""Plans which running rows attend to which part of a prompt together: the work list of the attention kernel. No torch."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

NUM_ITEM_FIELDS = 5
"""Lines of `PlanViews.items_5W`."""


class TileSize(NamedTuple):
    """The work of one kernel program."""

    rows: int
    """Rows of one prompt that attend to it together."""
    positions: int
    """Positions of the prompt."""


class PlanViews(NamedTuple):
    """The parts of a plan's table. Arrays of NumPy or tensors of torch, whichever the table is."""

    num_items_1: Any
    order_S: Any
    """Slots of running rows, sorted by prompt."""
    items_5W: Any
    """A column for each item. Lines: first row (an index into `order_S`), number of rows, block of the cache that holds
    these positions of their prompt, first position, number of positions."""


def split_table(table: Any, num_slots: int) -> PlanViews:
    """Returns views of the parts of a table that `AttentionPlan.table_if_changed` made."""
    first_item = 1 + num_slots
    return PlanViews(table[:1], table[1:first_item], table[first_item:].reshape(NUM_ITEM_FIELDS, -1))


class AttentionPlan:
    """Knows which prompt the row in each slot has, and divides their attention into items of `size`."""

    def __init__(self, num_slots: int, max_prompt: int, size: TileSize) -> None:
        self._size = size
        self._max_splits = max(1, -(-max_prompt // size.positions))
        self._places_S = np.full(num_slots, -1)
        """Place of the prompt of the row in each slot; -1 where no row runs."""
        self._lengths_S = np.zeros(num_slots, dtype=np.int64)
        self._blocks_SB = np.zeros((num_slots, self._max_splits), dtype=np.int64)
        self._changed = False

    @property
    def table_size(self) -> int:
        num_slots = len(self._places_S)
        return 1 + num_slots + NUM_ITEM_FIELDS * num_slots * self._max_splits

    def add_rows(
        self,
        slots: Iterable[int],
        places: Sequence[int],
        lengths: Sequence[int],
        blocks: Sequence[Sequence[int]],
    ) -> None:
        """Adds rows with the places, lengths and blocks of their prompts; a block holds the positions of one item."""
        index = list(slots)
        self._places_S[index], self._lengths_S[index] = places, lengths
        for slot, row in zip(index, blocks, strict=True):
            self._blocks_SB[slot, : len(row)] = row
        self._changed = True

    def remove_rows(self, slots: Sequence[int]) -> None:
        self._places_S[slots] = -1
        self._changed = True

    def move_rows(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves rows from slot to slot."""
        sources, targets = (list(side) for side in zip(*moves, strict=True))
        for by_slot in (self._places_S, self._lengths_S, self._blocks_SB):
            by_slot[targets] = by_slot[sources]
        self.remove_rows(sources)

    def copy_from(self, old: "AttentionPlan") -> None:
        """Takes over the rows of a plan with fewer slots."""
        num_slots = len(old._places_S)
        self._places_S[:num_slots], self._lengths_S[:num_slots] = old._places_S, old._lengths_S
        self._blocks_SB[:num_slots, : old._max_splits] = old._blocks_SB
        self._changed = True

    def set_rows(self, plan: "AttentionPlan", slots: Sequence[int], num_tokens: int) -> None:
        """Replaces all rows: `num_tokens` rows for each of some slots of another plan, with its prompt."""
        sources = np.repeat(np.array(slots), num_tokens)
        self._places_S[:] = -1
        self._places_S[: len(sources)] = plan._places_S[sources]
        self._lengths_S[: len(sources)] = plan._lengths_S[sources]
        self._blocks_SB[: len(sources)] = plan._blocks_SB[sources]
        self._changed = True

    def table_if_changed(self) -> IntArray | None:
        """Returns the work list if rows were added or removed since the last call; `split_table` names its parts."""
        if not self._changed:
            return None
        self._changed = False
        table = np.zeros(self.table_size, dtype=np.int64)
        views = split_table(table, len(self._places_S))
        slots = np.flatnonzero(self._places_S >= 0)
        if len(slots) > 0:
            slots = slots[np.argsort(self._places_S[slots], kind="stable")]
            items = self._items(slots)
            views.num_items_1[0] = items.shape[1]
            views.order_S[: len(slots)] = slots
            views.items_5W[:, : items.shape[1]] = items
        return table

    def _items(self, slots: IntArray) -> IntArray:
        places, index = self._places_S[slots], np.arange(len(slots))
        prompt_starts = np.maximum.accumulate(np.where(np.diff(places, prepend=-1) != 0, index, 0))
        starts = np.flatnonzero((index - prompt_starts) % self._size.rows == 0)
        counts = np.diff(starts, append=len(slots))
        lengths = self._lengths_S[slots[starts]]
        num_splits = -(-lengths // self._size.positions)
        tile = np.repeat(np.arange(len(starts)), num_splits)
        split = np.arange(len(tile)) - np.repeat(np.cumsum(num_splits) - num_splits, num_splits)
        first = split * self._size.positions
        num = np.minimum(lengths[tile] - first, self._size.positions)
        blocks = self._blocks_SB[slots[starts[tile]], split]
        return np.stack((starts[tile], counts[tile], blocks, first, num))
