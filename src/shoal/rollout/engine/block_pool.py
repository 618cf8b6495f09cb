"""Blocks of the cache of keys and values: which are free, and which prompt is stored in which. No torch.

BlockPool     hands out blocks of BLOCK positions and takes them back
PromptPlaces  the place and the blocks of each prompt, stored once for all rows that start from it
"""

import heapq
from collections.abc import Container, Iterable
from typing import NamedTuple

Prompt = tuple[int, ...]

BLOCK = 128
"""Positions of a block. The CUDA kernels read this many positions of a prompt together (decode_attention.PROMPT_SPLIT)."""


def blocks_for(num_positions: int) -> int:
    """Returns the number of blocks that hold this many positions."""
    return -(-num_positions // BLOCK)


class BlockPool:
    """Blocks 0 .. num_blocks-1, each free or taken. The lowest free block is taken first."""

    def __init__(self, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grow(self, num_blocks: int) -> None:
        """Adds free blocks up to `num_blocks`."""
        for block in range(self.num_blocks, num_blocks):
            heapq.heappush(self._free, block)
        self.num_blocks = max(self.num_blocks, num_blocks)

    def take(self, num: int) -> list[int]:
        """Takes blocks. The caller has checked that as many are free."""
        assert num <= len(self._free), f"{num} blocks were taken, {len(self._free)} are free"
        return [heapq.heappop(self._free) for _ in range(num)]

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)


class PlacedPrompts(NamedTuple):
    """Result of `PromptPlaces.place`."""

    added: dict[Prompt, int]
    """Places of the prompts that were not stored before. Their keys and values must be computed."""
    freed: list[int]
    """Places whose prompt was evicted. Some may be in `added` again."""


class PromptPlaces:
    """Assigns places 0 .. num_places-1 and blocks to prompts. A prompt keeps both while a running row uses it."""

    def __init__(self, pool: BlockPool, num_places: int = 0) -> None:
        self._pool, self._num_places = pool, num_places
        self._place: dict[Prompt, int] = {}
        self._blocks: dict[Prompt, list[int]] = {}
        self._num_rows: dict[Prompt, int] = {}
        self._free = list(range(num_places))
        self._evicted: list[int] = []
        """Places that were freed since the last call of `place`."""

    def __contains__(self, prompt: object) -> bool:
        return prompt in self._place

    @property
    def num_free(self) -> int:
        """Returns how many places are free."""
        return len(self._free)

    def blocks(self, prompt: Prompt) -> list[int]:
        """Returns the blocks of a stored prompt, in the order of its positions."""
        return self._blocks[prompt]

    def grow(self, num_places: int) -> None:
        for place in range(self._num_places, num_places):
            heapq.heappush(self._free, place)
        self._num_places = max(self._num_places, num_places)

    def evict(self, *, keep: Container[Prompt] = ()) -> int:
        """Evicts the prompts that no running row uses, except those in `keep`. Returns how many blocks that freed."""
        unused = [prompt for prompt, rows in self._num_rows.items() if rows == 0 and prompt not in keep]
        before = self._pool.num_free
        for prompt in unused:
            place = self._place.pop(prompt)
            heapq.heappush(self._free, place)
            self._evicted.append(place)
            self._pool.give_back(self._blocks.pop(prompt))
            del self._num_rows[prompt]
        return self._pool.num_free - before

    def place(self, prompts: Iterable[Prompt], *, keep: Container[Prompt] = ()) -> PlacedPrompts:
        """Gives each prompt a place and blocks. Evicts prompts that no running row uses first, except those in `keep`."""
        self.evict(keep=keep)
        added: dict[Prompt, int] = {}
        for prompt in prompts:
            if prompt not in self._place:
                assert self._free, "more prompts are computed at once than CacheSize.prompts allows for"
                added[prompt] = self._place[prompt] = heapq.heappop(self._free)
                self._blocks[prompt] = self._pool.take(blocks_for(len(prompt)))
                self._num_rows[prompt] = 0
        freed, self._evicted = self._evicted, []
        return PlacedPrompts(added, freed)

    def acquire(self, prompt: Prompt) -> int:
        """Counts one more running row of the prompt and returns its place."""
        self._num_rows[prompt] += 1
        return self._place[prompt]

    def release(self, prompt: Prompt) -> None:
        """Subtracts one running row of the prompt."""
        self._num_rows[prompt] -= 1
