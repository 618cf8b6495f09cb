"""Chooses the drafts that running rows are fed: how long, from which source, and whether they are worth it. No torch.

DraftSource   proposes tokens: PromptLookup or DraftModel (draft_model.py)
PromptLookup  proposes what followed the last time that a row's newest tokens occurred in its prompt or output
Drafting      asks the source while few rows run, and learns from what was accepted
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shoal.rollout.engine.api import GenerationRequest

DRAFT_ROWS = 8
"""Drafts are used while at most this many rows run. With more rows, the device is busy without drafts."""
CPU_DRAFT_ROWS = 1
"""The limit on a CPU: with 8 rows of a 0.5B model, lookup halved the speed there."""
DRAFT_TOKENS = 7
"""Longest draft."""
LONGEST, SHORTEST = 4, 2
"""Tokens that are looked up: first the last four, then three, then two. A single token occurs too often to say what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Where drafts come from and when they are used."""

    source: str
    """`lookup`, or the folder of a small model with the same tokenizer."""
    rows: int = DRAFT_ROWS

    @classmethod
    def parse(cls, source: str | None, rows: int | None, device: str) -> "DraftSettings | None":
        """Returns the settings of --draft and --draft-rows; None without drafts. Raises ValueError if there is no such folder."""
        if source is None:
            return None
        if source != "lookup" and not (Path(source) / "config.json").is_file():
            raise ValueError(
                f"--draft {source}: no model folder there; give one with a config.json, or lookup"
            )
        return cls(source=source, rows=rows or (CPU_DRAFT_ROWS if device == "cpu" else DRAFT_ROWS))


class DraftRow(NamedTuple):
    """A row that wants a draft of `num` tokens."""

    number: int
    request: GenerationRequest
    drawn: npt.NDArray[np.int64]
    """All tokens drawn so far."""
    num: int


class DraftSource(Protocol):
    """Proposes what rows may draw next."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Returns at most `num` tokens for each row. Rows that are left out of a call have ended or were preempted."""


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
    """Proposes drafts for rows, each known by a number (a DraftSource)."""

    def __init__(self) -> None:
        self._rows: dict[int, NgramIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Returns a draft for each row, and removes all rows that are not among these."""
        known, self._rows = self._rows, {}
        for row in rows:
            prompt = row.request.prompt_tokens
            index = known.get(row.number) or NgramIndex(prompt)
            index.extend(row.drawn[len(index.tokens) - len(prompt) :].tolist())
            self._rows[row.number] = index
        return [self._rows[row.number].propose(row.num) for row in rows]


@dataclass(slots=True)
class DraftCounts:
    """Counts of verified drafts."""

    steps: int = 0
    """Verifications of a row."""
    proposed: int = 0
    accepted: int = 0
    """Draft tokens that were right. Each verification draws one token more than it accepts."""


class Drafting:
    """Asks for drafts and adapts their length: two tokens more than were accepted the last time."""

    def __init__(self, source: DraftSource, *, max_rows: int, max_tokens: int) -> None:
        self.max_rows, self._max_tokens = max_rows, max_tokens
        self.counts = DraftCounts()
        self._source = source
        self._last: dict[int, tuple[int, int]] = {}
        """Drawn tokens and length of the draft when a row was last fed one, by number."""

    def drafts(
        self, rows: Sequence[tuple[int, GenerationRequest, npt.NDArray[np.int64]]]
    ) -> npt.NDArray[np.int64]:
        """Returns drafts for rows given by number, request and drawn tokens: a line for each, -1 where it has no more tokens."""
        wanted = [DraftRow(*row, self._length(*row)) for row in rows]
        found = self._source.propose(wanted)
        self._last = {
            row.number: (len(row.drawn), len(draft)) for row, draft in zip(wanted, found, strict=True)
        }
        drafts_RT = np.full((len(rows), max((len(draft) for draft in found), default=0)), -1, dtype=np.int64)
        for line, draft in zip(drafts_RT, found, strict=True):
            line[: len(draft)] = draft
        return drafts_RT

    def _length(self, number: int, request: GenerationRequest, drawn: npt.NDArray[np.int64]) -> int:
        room = request.max_new_tokens - len(drawn) - 1  # each step draws one token more than the draft has
        before, proposed = self._last.get(number, (0, 0))
        if not proposed:
            return max(0, min(self._max_tokens, room))
        accepted = min(len(drawn) - before - 1, proposed)
        self.counts.steps += 1
        self.counts.proposed += proposed
        self.counts.accepted += max(0, accepted)
        return max(0, min(self._max_tokens, room, accepted + 2))
