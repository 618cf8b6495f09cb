"""Chooses the drafts that running rows are fed: how long, from which source, and whether they are worth it. No torch.

DraftSource   proposes tokens: PromptLookup (prompt_lookup.py) or DraftModel (draft_model.py)
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

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt_tokens


class DraftSource(Protocol):
    """Proposes what rows may draw next."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Returns at most `num` tokens for each row. Rows that are left out of a call have ended or were preempted."""


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
