"""Problems from a file of rows: JSON Lines, one JSON array, or Parquet.

A Format says what a row asks and what an answer is worth; a DataSet is a format over a file. Held out is either the data
set's own test file (`eval_path`), or one row in five by the hash of its question. Questions of the test file that also
stand in the training file are left out of training.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shoal.tasks.task import Problem, Reward, Split, check_style, check_whole, is_held_out

Row = dict[str, Any]
Style = Literal["chat", "direct", "bare"]

SHOWN = 50
"""Bad rows that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What one data set's rows mean."""

    name: str
    read: Callable[[Row, Style], Problem]
    """The problem of a row; KeyError or ValueError if it has none."""
    grade: Callable[[Problem, str], Reward]
    find_bad: Callable[[Sequence[Problem]], dict[int, str]] = lambda problems: {}
    """Which problems no answer can be graded by, and why: looked at when the file is loaded, so never a reward."""
    evaluation_only: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a file, its number there, and what it asks."""

    number: int
    row: Row
    problem: Problem
    question: str
    """What it asks in whichever style: held out in one, held out in all."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """style "chat" asks as a user's turn, to think first where that helps; "direct" for the answer and nothing else, which a
    small model needs few tokens for; "bare" is plain text for a model without a chat template."""

    format: Format
    path: str
    eval_path: str = ""
    style: Style = "chat"
    max_chars: int = 0
    """Longer prompts are left out; 0 leaves none. A prompt and its answer must fit the trainer's row_tokens."""
    skip_rows: str = ""
    """Numbers of rows of `path` to leave out, as `671,902`: known to be bad."""

    def __post_init__(self) -> None:
        check_style(self.format.name, self.style, ("chat", "direct", "bare"))
        if self.format.evaluation_only and self.eval_path:
            raise ValueError(f"{self.format.name} is for evaluation only: all of `path` is; drop eval_path")
        check_whole(f"{self.format.name}: max_chars", self.max_chars, least=0, most=1 << 30)
        if not re.fullmatch(r"(\s*\d+\s*(,|$))*", self.skip_rows):
            raise ValueError(f"{self.format.name}: skip_rows={self.skip_rows!r} must be numbers: '671,902'")

    @property
    def chat(self) -> bool:
        return self.style != "bare"

    def problem(self, split: Split, seed: int) -> Problem:
        return self.entry(split, seed).problem

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return self.format.grade(problem, text)

    def size(self, split: Split) -> int:
        return len(self._entries[split])

    def entry(self, split: Split, seed: int) -> Entry:
        entries = self._entries[split]
        if not entries:
            raise ValueError(self._why_empty(split))
        return entries[seed % len(entries)]

    @cached_property
    def _entries(self) -> dict[Split, list[Entry]]:
        skipped = {int(number) for number in self.skip_rows.split(",") if number.strip()}
        entries = self._load(self.path, skipped)
        if self.format.evaluation_only:
            return {"train": [], "eval": entries}
        if self.eval_path:
            held_out = self._load(self.eval_path, set())
            asked = {entry.question for entry in held_out}
            return {"train": [e for e in entries if e.question not in asked], "eval": held_out}
        by_hash = [is_held_out(entry.question) for entry in entries]
        return {
            "train": [entry for entry, held in zip(entries, by_hash, strict=True) if not held],
            "eval": [entry for entry, held in zip(entries, by_hash, strict=True) if held],
        }

    def _load(self, path: str, skipped: set[int]) -> list[Entry]:
        entries: list[Entry] = []
        bad: dict[int, str] = {}
        for number, row in read_rows(Path(path)):
            if number in skipped:
                continue
            try:
                question = self.format.read(row, "chat").prompt
                entries.append(Entry(number, row, self.format.read(row, self.style), question))
            except KeyError as error:
                bad[number] = f"no field {error}, as {self.format.name} has; it has {sorted(row)[:12]}"
            except (ValueError, TypeError, AttributeError) as error:
                bad[number] = str(error)
        for place, reason in self.format.find_bad([entry.problem for entry in entries]).items():
            bad[entries[place].number] = reason
        if bad:
            raise ValueError(_complaint(path, bad))
        return [e for e in entries if not self.max_chars or len(e.problem.prompt) <= self.max_chars]

    def _why_empty(self, split: Split) -> str:
        if self.format.evaluation_only:
            return f"{self.format.name} is for evaluation only; train on another task"
        if split == "eval" and not self.eval_path:
            return f"{self.path}: too few rows to hold any out; give a test file as eval_path"
        return f"{self.eval_path or self.path} has no rows to {'hold out' if split == 'eval' else 'train on'}"


def _complaint(path: str, bad: dict[int, str]) -> str:
    first = min(bad)
    numbers = ",".join(map(str, sorted(bad)[:SHOWN])) + (",..." if len(bad) > SHOWN else "")
    return (
        f"{path}, row {first}: {bad[first]}. Rows that cannot be used: {len(bad)}; correct the file, or leave them out "
        f'with skip_rows = "{numbers}"'
    )


def read_rows(path: Path) -> list[tuple[int, Row]]:
    """Every row with its number, from 1: the line in a JSON Lines file, else the place in the list."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"no data file at {path}; the task's options name it") from None
    if data[:4] == b"PAR1":
        return list(enumerate(_parquet_rows(path), start=1))
    if data.lstrip()[:1] == b"[":
        return _checked(path, enumerate(_parse(data, f"{path}"), start=1))
    lines = ((number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip())
    return _checked(path, ((number, _parse(line, f"{path}, line {number}")) for number, line in lines))


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None


def _checked(path: Path, rows: Any) -> list[tuple[int, Row]]:
    found: list[tuple[int, Row]] = []
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: {type(row).__name__}, expected an object")
        found.append((number, row))
    return found


def _parquet_rows(path: Path) -> list[Row]:
    import pyarrow.parquet

    rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    return rows
