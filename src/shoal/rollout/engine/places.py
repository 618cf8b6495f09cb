"""Which prompt stands where: prompts are kept once for all rows that start from them, as long as one of them runs."""

import heapq
from collections.abc import Container, Iterable

from shoal.rollout.engine.rows import Prompt


class Places:
    """Places 0 .. num_places-1 for prompts. Plain Python."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._place: dict[Prompt, int] = {}
        self._num_rows: dict[Prompt, int] = {}
        self._free = list(range(num_places))

    def __getitem__(self, prompt: Prompt) -> int:
        return self._place[prompt]

    def holds(self, place: int) -> bool:
        """Whether a prompt stands there."""
        return place in self._place.values()

    def grow(self, num_places: int) -> None:
        for place in range(self.num_places, num_places):
            heapq.heappush(self._free, place)
        self.num_places = max(self.num_places, num_places)

    def seat(self, prompts: Iterable[Prompt], *, keep: Container[Prompt] = ()) -> dict[Prompt, int]:
        """Make room for the prompts of a new shelf: those that no row runs from go, but for those in `keep`.

        Returns the places of those that did not stand somewhere already.
        """
        gone = [prompt for prompt, rows in self._num_rows.items() if rows == 0 and prompt not in keep]
        for prompt in gone:
            heapq.heappush(self._free, self._place.pop(prompt))
            del self._num_rows[prompt]
        seated: dict[Prompt, int] = {}
        for prompt in prompts:
            if prompt not in self._place:
                assert self._free, "the shelf is larger than what was set aside for it"
                seated[prompt] = self._place[prompt] = heapq.heappop(self._free)
                self._num_rows[prompt] = 0
        return seated

    def enter(self, prompts: Iterable[Prompt]) -> None:
        """Rows start from these."""
        for prompt in prompts:
            self._num_rows[prompt] += 1

    def leave(self, prompts: Iterable[Prompt]) -> None:
        """Rows have ended."""
        for prompt in prompts:
            self._num_rows[prompt] -= 1
