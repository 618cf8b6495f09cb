"""Tasks whose problems are rows of a file: JSON Lines, one JSON array, Parquet, or CSV with a line of column names.

    DataSet   a published data set; a Format (formats.py, genesys.py) reads its rows and grades answers
    Listed    problems of another task, listed in a file that `shoal data filter` wrote

A DataSet holds out its own test file (`eval_path`), or one row in five by the hash of its question. Questions that are held out
are not trained on, even if they are written with other spaces, case or typesetting. Unusable rows are skipped, unless there are
too many.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.tasks.datasets.row_index import Array, IndexedFormat, RowIndex, read_rows
from shoal.tasks.datasets.row_index import Row as Row
from shoal.tasks.task import (
    Problem,
    Reward,
    Split,
    Task,
    check_style,
    check_whole,
    is_held_out,
    prompt_chars,
)
from shoal.wire.run_spec import TaskSpec

Style = Literal["chat", "direct", "bare"]

ASK_NUMBER: dict[Style, str] = {
    "chat": "{question}\nThink step by step, then give the answer as a number after ####.",
    "direct": "{question} Reply with the number only.",
    "bare": "Question: {question}\nAnswer:",
}
ASK_BOXED: dict[Style, str] = {
    "chat": "{question}\nThink step by step, then put the final answer within \\boxed{}.",
    "direct": "{question}\nReply with the final answer within \\boxed{} only.",
    "bare": ASK_NUMBER["bare"],
}
"""Prompts by style."""

SHOWN = 20
"""Maximum number of bad rows that an error lists."""
MOST_REASON = 100
"""Characters of a reason in an error with several of them."""
MAX_LITERAL_CHARS = 2 << 20
"""Longest text that is read as a Python literal. Python needs up to 260 bytes of memory for each of its characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Functions that read the rows of one data set and grade answers to them."""

    name: str
    read: Callable[[Row, Style], Problem]
    """Returns the problem of a row; raises KeyError or ValueError if the row is unusable."""
    grade: Callable[[Problem, str], Reward]
    find_bad: Callable[[Sequence[Problem]], dict[int, str]] = lambda problems: {}
    """Returns the problems whose answers cannot be graded, and why. Called when the file is loaded, so none is ever asked."""
    question: Callable[[Row], str] | None = None
    """Returns the question of a row without instructions; None: it is the prompt."""
    evaluation_only: bool = False
    is_held_out: Callable[[str], bool] = is_held_out
    """Returns whether the row with this question is held out, in a file without a test file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a file, its number in the file, its problem, and its question without instructions."""

    number: int
    row: Row
    problem: Problem
    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRows:
    """The rows of both splits, as places in the indices of their files, and how many were left out."""

    places: dict[Split, Array]
    indices: dict[Split, RowIndex]
    left_out: dict[str, int]
    """Number of rows that are usable but not in a split, by the reason."""


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
    max_bad_share: float = 0.02
    """Largest share of unusable rows of a file. They are skipped; with more of them the file is refused."""
    task_types: str = ""
    """The values of `task_type` whose rows are used, as `verifiable_math,prime_rl_code`; empty uses all."""
    min_solve_rate: float = 0.0
    max_solve_rate: float = 1.0
    """Trains on rows whose column `solve_rate_field` is within these."""
    solve_rate_field: str = ""
    """The column with the solve rates. Empty takes the only one whose name begins with solve_rate."""
    checks_path: str = ""
    eval_checks_path: str = ""
    """Files with the unusable rows of `path` and `eval_path`, so that all machines of a run use the same rows. The coordinator
    writes them."""

    def __post_init__(self) -> None:
        name = self.format.name
        check_style(name, self.style, ("chat", "direct", "bare"))
        if self.format.evaluation_only and self.eval_path:
            raise ValueError(f"{name} is for evaluation only, with all rows of `path`; remove eval_path")
        check_whole(f"{name}: max_chars", self.max_chars, least=0, most=1 << 30)
        if not re.fullmatch(r"(\s*\d+\s*(,|$))*", self.skip_rows):
            raise ValueError(f"{name}: skip_rows={self.skip_rows!r} must be row numbers, as in '671,902'")
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"{name}: max_bad_share={self.max_bad_share!r} must be from 0 to 1")
        if not 0 <= self.min_solve_rate <= self.max_solve_rate <= 1:
            raise ValueError(
                f"{name}: min_solve_rate={self.min_solve_rate!r} and max_solve_rate={self.max_solve_rate!r} must be from 0 to 1, "
                "the smaller one first"
            )

    @property
    def chat(self) -> bool:
        return self.style != "bare"

    def problem(self, split: Split, seed: int) -> Problem:
        return self.entry(split, seed).problem

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return self.format.grade(problem, text)

    def size(self, split: Split) -> int:
        return len(self.split_rows.places[split])

    def prompt_chars(self, split: Split) -> Sequence[int]:
        found: list[int] = self.split_rows.indices[split].chars[self.split_rows.places[split]].tolist()
        return found

    def entry(self, split: Split, seed: int) -> Entry:
        """Returns the row of this seed; raises ValueError if the split is empty."""
        places, index = self.split_rows.places[split], self.split_rows.indices[split]
        if not len(places):
            raise ValueError(self._empty_message(split))
        place = int(places[seed % len(places)])
        row = index.row(place)
        problem = self.format.read(row, self.style)
        question = problem.prompt if self.format.question is None else self.format.question(row)
        return Entry(int(index.numbers[place]), row, problem, question)

    @cached_property
    def indices(self) -> dict[str, RowIndex]:
        """The index of each file, by its option. Reading it for the first time takes minutes for a large file."""
        files = [("path", self.path, self.checks_path), ("eval_path", self.eval_path, self.eval_checks_path)]
        return {
            option: RowIndex.load(
                Path(path), self.indexed_format(), known_bad=_read_checks(checks) if checks else None
            )
            for option, path, checks in files
            if path
        }

    def indexed_format(self) -> IndexedFormat:
        """Returns the functions that the index of a file needs. The fields of a subclass may change what they return."""
        names = ["task_types"] + [one.name for one in fields(self) if one.name not in _DATA_SET_FIELDS]
        return IndexedFormat(
            self.format.name,
            json.dumps({name: str(getattr(self, name)) for name in names}),
            lambda row: self.format.read(row, "chat"),
            self.format.is_held_out,
            self.format.find_bad,
            frozenset(kind.strip() for kind in self.task_types.split(",") if kind.strip()),
        )

    @cached_property
    def split_rows(self) -> SplitRows:
        """The rows of each split. Raises ValueError if too many rows of a file are unusable."""
        train = self.indices["path"]
        skipped = {int(number) for number in self.skip_rows.split(",") if number.strip()}
        self._check_bad("path", skipped)
        all_rows, left_out = np.arange(len(train)), dict[str, int]()
        all_rows = self._short(train, all_rows[~np.isin(train.numbers, sorted(skipped))], left_out)
        if self.format.evaluation_only:
            return SplitRows(
                places={"train": all_rows[:0], "eval": all_rows},
                indices={"train": train, "eval": train},
                left_out=left_out,
            )
        if self.eval_path:
            self._check_bad("eval_path", set())
            held_out = self.indices["eval_path"]
            held_rows, held_keys = self._short(held_out, np.arange(len(held_out)), {}), held_out.keys
        else:
            held_out, held_rows = train, all_rows[train.held_out[all_rows]]
            held_keys = train.keys[held_rows]
            all_rows = all_rows[~train.held_out[all_rows]]
        asked = np.isin(train.keys[all_rows], held_keys)
        left_out["asked in the held-out rows too"] = int(asked.sum())
        chosen = self._in_solve_rate(train, all_rows[~asked], left_out)
        return SplitRows(
            places={"train": chosen, "eval": held_rows},
            indices={"train": train, "eval": held_out},
            left_out={reason: count for reason, count in left_out.items() if count},
        )

    def _short(self, index: RowIndex, places: Array, left_out: dict[str, int]) -> Array:
        if not self.max_chars:
            return places
        short = index.chars[places] <= self.max_chars
        left_out[f"longer than max_chars = {self.max_chars}"] = int((~short).sum())
        kept: Array = places[short]
        return kept

    def _in_solve_rate(self, index: RowIndex, places: Array, left_out: dict[str, int]) -> Array:
        if (self.min_solve_rate, self.max_solve_rate) == (0.0, 1.0):
            return places
        rates = index.rates[self._solve_rate_column(index)][places]
        kept = (rates >= np.float32(self.min_solve_rate)) & (rates <= np.float32(self.max_solve_rate))
        left_out["outside min_solve_rate and max_solve_rate"] = int((~kept).sum())
        chosen: Array = places[kept]
        return chosen

    def _solve_rate_column(self, index: RowIndex) -> str:
        known = sorted(index.rates)
        if self.solve_rate_field in known:
            return self.solve_rate_field
        if not self.solve_rate_field and len(known) == 1:
            return known[0]
        raise ValueError(
            f"{self.path}: solve_rate_field={self.solve_rate_field!r} must be a column with solve rates; it has: "
            f"{', '.join(known) or 'none'}. Remove min_solve_rate and max_solve_rate to use all rows"
        )

    def _check_bad(self, option: str, skipped: set[int]) -> None:
        index, path = self.indices[option], self.path if option == "path" else self.eval_path
        bad = {number: reason for number, reason in index.bad.items() if number not in skipped}
        if len(bad) > self.max_bad_share * index.num_rows:
            raise ValueError(_bad_rows_message(path, bad, index.num_rows, self.max_bad_share))

    def _empty_message(self, split: Split) -> str:
        if self.format.evaluation_only:
            return f"{self.format.name} is for evaluation only; train on another task"
        if split == "eval" and not self.eval_path:
            return f"{self.path}: too few rows to hold any out; set eval_path to a test file"
        left_out = "; ".join(f"{count} {reason}" for reason, count in self.split_rows.left_out.items())
        wanted = "hold out" if split == "eval" else "train on"
        return f"{self.eval_path if split == 'eval' else self.path} has no rows to {wanted}" + (
            f": {left_out}" if left_out else ""
        )


_DATA_SET_FIELDS = frozenset(one.name for one in fields(DataSet))


def plain_decimal(number: int | float) -> str:
    """Formats 51.0 as `51`: without a needless decimal point, and never with an exponent."""
    return f"{Decimal(repr(float(number))).normalize():f}"


def object_in(value: Any, field: str) -> dict[str, Any]:
    """Returns the object in a field: itself, or what `read_value` reads. Raises ValueError for anything else."""
    value = read_value(value, field) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError(f"{field} is {type(value).__name__}, expected an object")
    return value


def read_value(text: str, field: str) -> Any:
    """Returns the value of a text that is JSON or, as in SYNTHETIC-1, a Python literal. Raises ValueError for another."""
    try:
        return json.loads(text)
    except ValueError as error:
        not_json = f"{field} is not JSON ({error})"
    if len(text) > MAX_LITERAL_CHARS:
        raise ValueError(
            f"{not_json}, and with {len(text)} characters too long to be read as a Python literal"
        )
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError):
        raise ValueError(f"{not_json} and not a Python literal") from None


def checks_text(index: RowIndex) -> bytes:
    """Returns the content of a file for `checks_path`: the unusable rows, so that all machines leave out the same ones."""
    return json.dumps({"unusable_rows": sorted(index.bad)}).encode() + b"\n"


def _read_checks(path: str) -> frozenset[int]:
    try:
        found = json.loads(Path(path).read_bytes())["unusable_rows"]
        return frozenset(int(number) for number in found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of unusable rows: {error}; remove checks_path") from None


def listed_row(problem: Problem, spec: TaskSpec) -> dict[str, Any]:
    """Returns the row of a problem for a file that Listed reads."""
    row = {"prompt": problem.prompt, "answer": problem.answer, "task": spec.model_dump(mode="json")}
    # Without them the task could not grade an answer, or would ask without the turns before the prompt.
    row |= {"check": problem.check} if problem.check else {}
    return row | ({"messages": [list(one) for one in problem.messages]} if problem.messages else {})


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Trains on all problems of `path`. Held-out problems are those of the task that grades them, so the two never overlap.

    Each row has a problem and its task: {"prompt": ..., "answer": ..., "task": {"name": ..., "options": ...}}, and `check` and
    `messages` if the problem has them.
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

    def prompt_chars(self, split: Split) -> Sequence[int]:
        if split == "eval":
            return prompt_chars(self._task, "eval")
        return [problem.num_chars for problem in self._problems]

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return self._task.reward(problem, text, num_tokens)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        rows: list[Row] = []
        for number, row in read_rows(Path(self.path)):
            if (
                isinstance(row, str)
                or set(row) - {"check", "messages"} != {"prompt", "answer", "task"}
                or (rows and row["task"] != rows[0]["task"])
            ):
                raise ValueError(
                    f"{self.path}, row {number}: expected prompt, answer and the same task in every row"
                )
            rows.append(row)
        if not rows:
            raise ValueError(f"{self.path} has no rows")
        return rows

    @cached_property
    def _problems(self) -> list[Problem]:
        return [
            Problem(
                row["prompt"],
                row["answer"],
                check=row.get("check", ""),
                messages=tuple((role, text) for role, text in row.get("messages", ())),
            )
            for row in self._rows
        ]

    @cached_property
    def _task(self) -> Task:
        try:
            spec = TaskSpec.model_validate_json(json.dumps(self._rows[0]["task"]))
        except ValueError as error:
            raise ValueError(f"{self.path}, row 1: the task is invalid: {error}") from None
        if spec.budgets:
            raise ValueError(
                f"{self.path}, row 1: the task has budgets; set budgets on the task 'listed' instead"
            )
        if spec.name == "listed":
            raise ValueError(f"{self.path}, row 1: a list of problems cannot be graded by another list")
        return self.make_task(spec)


def _bad_rows_message(path: str, bad: dict[int, str], num_rows: int, max_share: float) -> str:
    first = min(bad)
    # Reasons that differ only in the row's own values are one kind.
    kind_of = {reason: re.sub(r"'[^']*'|\d+", "", reason) for reason in bad.values()}
    kinds = Counter(kind_of[reason] for reason in bad.values())
    if len(bad) == num_rows and len(kinds) == 1:
        return f"{path}, row {first}: {bad[first]}. No row can be used, for the same reason; correct the options or the file"
    numbers = ",".join(map(str, sorted(bad)[:SHOWN])) + (",..." if len(bad) > SHOWN else "")
    example = {kind: reason for reason, kind in reversed(kind_of.items())}
    common = "; ".join(f"{count} times: {_shortened(example[kind])}" for kind, count in kinds.most_common(3))
    reasons = "all for this reason" if len(kinds) == 1 else common
    choose = " choose task_types," if any(kind.startswith("task_type ") for kind in kinds) else ""
    return (
        f"{path}, row {first}: {bad[first]}. {len(bad)} of {num_rows} rows are unusable, more than max_bad_share = {max_share:g} "
        f'({reasons}). Correct the file, raise max_bad_share,{choose} or skip them with skip_rows = "{numbers}"; '
        "`shoal data check` lists them all"
    )


def _shortened(reason: str) -> str:
    return reason if len(reason) <= MOST_REASON else f"{reason[:MOST_REASON]}..."
