"""Tasks whose problems are rows of a file: JSON Lines, one JSON array, or Parquet.

    DataSet   a published data set; a Format (formats.py) reads its rows and grades answers
    Listed    problems of another task, listed in a file that `shoal data filter` wrote

A DataSet holds out its own test file (`eval_path`), or one row in five by the hash of its question. Questions of the test file
that also occur in the training file are not trained on.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shoal.tasks.task import Problem, Reward, Split, Task, check_style, check_whole, is_held_out
from shoal.wire.run_spec import TaskSpec

Row = dict[str, Any]
Style = Literal["chat", "direct", "bare"]

SHOWN = 50
"""Maximum number of bad rows that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Functions that read the rows of one data set and grade answers to them."""

    name: str
    read: Callable[[Row, Style], Problem]
    """Returns the problem of a row; raises KeyError or ValueError if the row is unusable."""
    grade: Callable[[Problem, str], Reward]
    find_bad: Callable[[Sequence[Problem]], dict[int, str]] = lambda problems: {}
    """Returns the problems whose answers cannot be graded, and why. Called when the file is loaded, so none is ever asked."""
    evaluation_only: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a file, its number in the file, and its problem."""

    number: int
    row: Row
    problem: Problem
    question: str
    """The prompt in style "chat", by which rows are held out: the same rows in all styles."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Problems of a file in a known format.

    Style "chat" asks as a user's turn, and to think first where that helps; "direct" asks for the answer only, which takes a
    small model few tokens; "bare" is plain text for a model without a chat template.
    """

    format: Format
    path: str
    eval_path: str = ""
    style: Style = "chat"
    max_chars: int = 0
    """Leaves out longer prompts, if above 0. A prompt and its answer must fit the trainer's row_tokens."""
    skip_rows: str = ""
    """Numbers of rows of `path` to leave out because they are bad, as `671,902`."""

    def __post_init__(self) -> None:
        check_style(self.format.name, self.style, ("chat", "direct", "bare"))
        if self.format.evaluation_only and self.eval_path:
            raise ValueError(
                f"{self.format.name} is for evaluation only, with all rows of `path`; remove eval_path"
            )
        check_whole(f"{self.format.name}: max_chars", self.max_chars, least=0, most=1 << 30)
        if not re.fullmatch(r"(\s*\d+\s*(,|$))*", self.skip_rows):
            raise ValueError(
                f"{self.format.name}: skip_rows={self.skip_rows!r} must be row numbers, as in '671,902'"
            )

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
        """Returns the row of this seed; raises ValueError if the split is empty."""
        entries = self._entries[split]
        if not entries:
            raise ValueError(self._empty_message(split))
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
                bad[number] = f"no field {error}, which {self.format.name} needs; it has {sorted(row)[:12]}"
            except (ValueError, TypeError, AttributeError) as error:
                bad[number] = str(error)
        for place, reason in self.format.find_bad([entry.problem for entry in entries]).items():
            bad[entries[place].number] = reason
        if bad:
            raise ValueError(_bad_rows_message(path, bad))
        return [e for e in entries if not self.max_chars or len(e.problem.prompt) <= self.max_chars]

    def _empty_message(self, split: Split) -> str:
        if self.format.evaluation_only:
            return f"{self.format.name} is for evaluation only; train on another task"
        if split == "eval" and not self.eval_path:
            return f"{self.path}: too few rows to hold any out; set eval_path to a test file"
        return f"{self.eval_path or self.path} has no rows to {'hold out' if split == 'eval' else 'train on'}"


def listed_row(problem: Problem, spec: TaskSpec) -> dict[str, Any]:
    """Returns the row of a problem for a file that Listed reads."""
    return {"prompt": problem.prompt, "answer": problem.answer, "task": spec.model_dump(mode="json")}


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Trains on all problems of `path`. Held-out problems are those of the task that grades them, so the two never overlap.

    Each row has a problem and its task: {"prompt": ..., "answer": ..., "task": {"name": ..., "options": ...}}.
    The registry passes its own `make_task`.
    """

    path: str
    make_task: Callable[[TaskSpec], Task]

    @property
    def chat(self) -> bool:
        return self._task.chat

    def problem(self, split: Split, seed: int) -> Problem:
        if split == "eval":
            return self._task.problem("eval", seed)
        return self._problems[seed % len(self._problems)]

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return self._task.reward(problem, text, num_tokens)

    @cached_property
    def _rows(self) -> list[tuple[int, dict[str, Any]]]:
        rows = read_rows(Path(self.path))
        if not rows:
            raise ValueError(f"{self.path} has no rows")
        first = rows[0][1].get("task")
        for number, row in rows:
            if set(row) != {"prompt", "answer", "task"} or row["task"] != first:
                raise ValueError(
                    f"{self.path}, row {number}: expected prompt, answer and the same task in every row"
                )
        return rows

    @cached_property
    def _problems(self) -> list[Problem]:
        return [Problem(row["prompt"], row["answer"]) for _, row in self._rows]

    @cached_property
    def _task(self) -> Task:
        try:
            spec = TaskSpec.model_validate_json(json.dumps(self._rows[0][1]["task"]))
        except ValueError as error:
            raise ValueError(f"{self.path}, row 1: the task is invalid: {error}") from None
        if spec.budgets:
            raise ValueError(
                f"{self.path}, row 1: the task has budgets; set budgets on the task 'listed' instead"
            )
        if spec.name == "listed":
            raise ValueError(f"{self.path}, row 1: a list of problems cannot be graded by another list")
        return self.make_task(spec)


def _bad_rows_message(path: str, bad: dict[int, str]) -> str:
    first = min(bad)
    numbers = ",".join(map(str, sorted(bad)[:SHOWN])) + (",..." if len(bad) > SHOWN else "")
    return (
        f"{path}, row {first}: {bad[first]}. Rows that cannot be used: {len(bad)}; correct the file, or skip them "
        f'with skip_rows = "{numbers}"'
    )


def read_rows(path: Path) -> list[tuple[int, Row]]:
    """Reads all rows with their numbers, from 1: the line in a JSON Lines file, else the position in the list."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"no data file at {path}; check the path in the task's options") from None
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
