"""Drafts by prompt lookup: what followed the last time that a row's newest tokens occurred in its prompt or output. No torch."""

from collections.abc import Sequence

from shoal.rollout.engine.drafting import DraftRow

LONGEST, SHORTEST = 4, 2
"""Tokens that are looked up: first the last four, then three, then two. A single token occurs too often to say what follows."""


class NgramIndex:
    """The tokens of one row, and where each run of SHORTEST to LONGEST of them last ended."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        """For each run, the index of the token that followed its last occurrence."""
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens. A run is entered when the token after it is known."""
        for token in tokens:
            end = len(self.tokens)
            for length in range(SHORTEST, LONGEST + 1):
                if end >= length:
                    self._ends[tuple(self.tokens[end - length : end])] = end
            self.tokens.append(token)

    def propose(self, num: int) -> list[int]:
        """Returns up to `num` tokens that followed the longest known run at the end of the row; none if there is no such run.

        What follows a run may reach the row's end: then it repeats from there, so that a loop is continued.
        """
        for length in range(LONGEST, SHORTEST - 1, -1):
            start = self._ends.get(tuple(self.tokens[-length:])) if len(self.tokens) >= length else None
            if start is not None:
                period = len(self.tokens) - start
                return [self.tokens[start + at % period] for at in range(num)]
        return []


class PromptLookup:
    """Proposes drafts for rows, each known by a number (a drafting.DraftSource)."""

    def __init__(self) -> None:
        self._rows: dict[int, NgramIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Returns a draft for each row, and removes all rows that are not among these."""
        known, self._rows = self._rows, {}
        for row in rows:
            index = known.get(row.number) or NgramIndex(row.prompt)
            index.extend(row.drawn[len(index.tokens) - len(row.prompt) :].tolist())
            self._rows[row.number] = index
        return [self._rows[row.number].propose(row.num) for row in rows]
