"""The task `judge`: open questions of a file, whose answers a judge model scores.

    question, answer, reference ──▶ judge_prompt ──▶ the judge's text ──▶ score_pattern ──▶ score ──▶ reward 0 to 1

This module makes the judge's prompt and reads its text; it does not run the model. Validators do, greedily
(swarm/validator/answer_judge.py), so that the same answers get the same scores again. The run's terms contain the digest of the
judge's folder, the prompt and the scale.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shoal.tasks.datasets.data_set import DataSet, Format, Row, Style, object_in
from shoal.tasks.datasets.question_answer import check_asking, is_drawn
from shoal.tasks.datasets.row_index import IndexedFormat
from shoal.tasks.grading.pattern_grader import find_last
from shoal.tasks.task import UNPARSEABLE, CannotGrade, Outcome, Problem, Reward, check_whole, reply_of

JUDGE_PROMPT = """Judge an answer to a question.

Question: {question}

Answer: {answer}

Is the answer correct, complete and clear? Explain in one or two sentences, then write "Score: " and a whole number from 0 (useless) \
to 10 (perfect)."""
REFERENCE_PROMPT = """Judge an answer to a question by a reference answer.

Question: {question}

Reference answer: {reference}

Answer: {answer}

Does the answer agree with the reference answer? Explain in one or two sentences, then write "Score: " and a whole number from 0 \
(not at all) to 10 (fully)."""
SCORE_PATTERN = r"[Ss]core:\s*(\d+(?:\.\d+)?)"
_NEEDED = (("config.json",), ("model.safetensors", "model.safetensors.index.json"))
"""Files of a model folder, of each group at least one."""


@dataclass(frozen=True, kw_only=True)
class JudgedAnswers(DataSet):
    """Questions of a file, whose answers a judge model scores."""

    format: Format = field(init=False)
    judge_path: str
    """The folder of the judge model: config.json, safetensors, tokenizer."""
    question: str = "question"
    """Name of the column with the question. `info.question` is the field `question` of the column `info`."""
    reference: str = ""
    """Name of the column with a reference answer or a rubric; empty: there is none."""
    instructions: str = ""
    """Name of the column with instructions for the judge, which a row may leave empty; empty: there is none."""
    template: str = "{question}"
    """The prompt, with {question} in it."""
    judge_prompt: str = ""
    """The judge's prompt, with {question}, {answer} and, if there are such columns, {reference} and {instructions}. Empty: one of
    the two above."""
    judge_tokens: int = 256
    """Most tokens that the judge may write."""
    judge_dtype: Literal["float32", "bfloat16"] = "float32"
    score_pattern: str = SCORE_PATTERN
    """Finds the score in the judge's text: the first group of the last match is a number."""
    score_min: float = 0.0
    score_max: float = 10.0
    pass_score: float = math.nan
    """An answer with at least this score counts as right in pass rates; without it, one with score_max."""
    score_tolerance: float = 0.02
    """Largest mean difference of the rewards of a submission when they are computed again, for example on another processor."""
    eval_share: float = 0.2
    eval_seed: int = 0

    def __post_init__(self) -> None:
        columns = {"{reference}": self.reference, "{instructions}": self.instructions}
        for name in ("{question}", "{answer}", *(name for name, column in columns.items() if column)):
            if name not in self.prompt_of_judge:
                raise ValueError(f"judge: judge_prompt={self.judge_prompt!r} must contain {name}")
        self._check_scale()
        check_whole("judge: judge_tokens", self.judge_tokens, least=1, most=1 << 16)
        if self.judge_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"judge: judge_dtype={self.judge_dtype!r} must be float32 or bfloat16")
        check_asking("judge", self.template, self.eval_share)
        format = Format(
            name="judge",
            read=self._read,
            grade=_refuse_to_grade,
            is_held_out=lambda prompt: is_drawn(prompt, self.eval_share, self.eval_seed),
        )
        object.__setattr__(self, "format", format)
        super().__post_init__()

    def _check_scale(self) -> None:
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(f"judge: score_pattern={self.score_pattern!r}: {error}; correct it") from None
        if groups != 1:
            raise ValueError(
                f"judge: score_pattern={self.score_pattern!r} has {groups} groups; put parentheses around the score only"
            )
        if not self.score_min < self.score_max:
            raise ValueError(
                f"judge: score_min={self.score_min:g} must be below score_max={self.score_max:g}"
            )
        if not math.isnan(self.pass_score) and not self.score_min <= self.pass_score <= self.score_max:
            raise ValueError(
                f"judge: pass_score={self.pass_score:g} must be from {self.score_min:g} to {self.score_max:g}"
            )
        if not 0 <= self.score_tolerance < 1:
            raise ValueError(
                f"judge: score_tolerance={self.score_tolerance!r} must be at least 0 and below 1"
            )

    @staticmethod
    def pins(options: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError if the judge's folder is not one of a model. Its digest is added when the files are copied."""
        check_judge_folder(str(options.get("judge_path", "")))
        return {}

    @property
    def prompt_of_judge(self) -> str:
        default = REFERENCE_PROMPT if self.reference else JUDGE_PROMPT
        if self.instructions:
            default = default.replace("\n\nAnswer:", "\n\nInstructions: {instructions}\n\nAnswer:")
        return self.judge_prompt or default

    def indexed_format(self) -> IndexedFormat:
        # The judge and the scale do not change which rows are usable.
        names = ("task_types", "question", "reference", "instructions", "template", "eval_share", "eval_seed")
        key = json.dumps({name: str(getattr(self, name)) for name in names})
        return replace(super().indexed_format(), key=key)

    def ask_judge(self, problem: Problem, answer: str) -> str:
        """Returns the judge's prompt for an answer."""
        given = json.loads(problem.check) | {"answer": reply_of(answer).strip()}
        # All at once: an answer that contains `{reference}` must not be filled in.
        return re.sub(
            r"\{(question|answer|reference|instructions)\}",
            lambda match: given.get(match[1], ""),
            self.prompt_of_judge,
        )

    def read_score(self, judgement: str) -> Reward:
        """Returns the reward for the judge's text. Without a score within the scale it is 0 and counts as unparseable."""
        found = find_last(self.score_pattern, reply_of(judgement))
        try:
            score = float(found or "")
        except ValueError:
            return UNPARSEABLE
        if not self.score_min <= score <= self.score_max:
            return UNPARSEABLE
        needed = self.score_max if math.isnan(self.pass_score) else self.pass_score
        value = (score - self.score_min) / (self.score_max - self.score_min)
        return Reward(value, Outcome.RIGHT if score >= needed else Outcome.WRONG)

    def score_reader(self) -> DataSet:
        """Returns a task that grades the judge's texts instead of answers: the grading pool, with its limits, searches them for scores."""
        format = replace(self.format, grade=lambda problem, text: self.read_score(text))
        return DataSet(format=format, path=self.path)

    def _read(self, row: Row, style: Style) -> Problem:
        """Reads open questions whose answers a judge model scores."""
        asked = _text(row, self.question)
        reference = _text(row, self.reference) if self.reference else ""
        check = {"question": asked, "reference": reference}
        if self.instructions:
            check["instructions"] = _text(row, self.instructions, empty="none")
        return Problem(self.template.replace("{question}", asked), reference, check=json.dumps(check))


def check_judge_folder(path: str) -> None:
    """Raises ValueError unless `path` is a model folder, or the tar file of one that came from the coordinator."""
    folder = Path(path)
    if path.startswith("sha256:") or folder.is_file():
        return
    if not folder.is_dir():
        raise ValueError(
            f"judge: no folder at judge_path={path!r}; download a model to it, for example with hf download"
        )
    for names in _NEEDED:
        if not any((folder / name).is_file() for name in names):
            raise ValueError(
                f"judge: judge_path={path!r} has no {' or '.join(names)}; it must be a model folder"
            )


def _text(row: Row, column: str, empty: str = "") -> str:
    """Returns the text of a column, or `empty` instead of an empty one. Raises ValueError if that is empty too."""
    name, *fields = column.split(".")
    value: Any = row[name]
    for part in fields:
        value = object_in(value, name)[part]  # SYNTHETIC-1 has objects as text
    value = empty if value in ("", None) else value
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        raise ValueError(f"the column {column!r} has {value!r}, expected a text")
    return str(value).strip()


def _refuse_to_grade(problem: Problem, text: str) -> Reward:
    raise CannotGrade("an answer of the task 'judge' is graded by its judge model")
