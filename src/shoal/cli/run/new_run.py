"""`shoal init`: asks for model, data and machine, and writes a commented run file that runs.

At a terminal it asks for what the options do not say, with a guess that Enter accepts; elsewhere it takes the guesses.
"""

import argparse
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shoal.cli.run.overrides import to_toml
from shoal.cli.run.preflight import local_folder, try_run
from shoal.cli.run.runfile import load_run_file
from shoal.cli.run.supervise import EXIT_OK
from shoal.files import write_bytes_atomically
from shoal.tasks.datasets.question_answer import column_names, find_value, holds_rows
from shoal.tasks.datasets.row_index import Row, read_rows
from shoal.tasks.registry import task_origins

LOOKED_AT = 200
"""Rows of a data file that guesses are made from."""
QUESTIONS = ("question", "prompt", "problem", "instruction", "input", "query", "q")
ANSWERS = ("answer", "ground_truth", "solution", "target", "output", "label", "expected", "a")
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".gz", ".zst")
SHORT, THINKING = 16, 512
"""Tokens of an answer alone, and of one with a train of thought before it."""
SUPERVISED_STEPS = 100
"""Supervised steps of a model with random weights."""
ROWS_PER_SUPERVISED_STEP = 4
"""A small file gets one supervised step for so many rows. With more steps a random model knows all its answers by heart, and no group
has a signal: 99 of 100 groups after 100 steps on 80 sums, and a rising curve after 25."""
_NUMBER = re.compile(r"\s*-?[\d,]*\.?\d+\s*")
COMMENT_COLUMN = 32
_COMMENT = re.compile(r"^([^#\n]*\S) {2,}# ", re.MULTILINE)
"""A line's setting and the beginning of its comment."""
_LETTER = re.compile(r"\s*\(?[A-Za-z]\)?\.?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the run file says."""

    name: str
    model: str
    task: str
    options: Mapping[str, Any]
    steps: int
    max_new_tokens: int
    longest_prompt: int
    """Characters of the longest prompt that was looked at."""
    workers: int
    threads: int
    gpu: bool
    supervised_steps: int

    @property
    def is_random(self) -> bool:
        """Returns whether the model has random weights, which earn nothing without supervised steps."""
        return self.model == "tiny"


class Asker:
    """Asks at a terminal, or takes the guess."""

    def __init__(self, *, asks: bool) -> None:
        self._asks = asks

    def ask(self, what: str, given: Any, guess: str, option: str) -> str:
        """Returns what an option gave, else what the user types, else the guess. Raises ValueError if there is none of them."""
        if given is not None:
            return str(given)
        if self._asks:
            print(f"{what}{f' [{guess}]' if guess else ''}: ", end="", flush=True, file=sys.stderr)
            if typed := sys.stdin.readline().strip():
                return typed
        if not guess:
            raise ValueError(f"{what}: nothing was given; use {option}")
        return guess


def init(options: argparse.Namespace, stop: threading.Event) -> int:
    """Writes the run file and tries it."""
    path: Path = options.file
    if path.exists() and not options.force:
        raise ValueError(f"{path} exists already; choose another name, or --force to replace it")
    plan = make_plan(options, Asker(asks=sys.stdin.isatty() and not options.yes))
    write_bytes_atomically(path, write_run_file(plan).encode(), durable=False)
    try:
        warnings = try_run(load_run_file(path), path, starts=False)
    except ValueError:
        print(
            f"{path}: written, but it cannot run yet; correct the file, or repeat the command with --force",
            file=sys.stderr,
        )
        raise
    print(f"{path}: written and tried")
    if "question" in plan.options:
        print(
            f"  questions         column {plan.options['question']!r}; answers: column {plan.options['answer']!r}, "
            f"grader {plan.options['grader']!r}"
        )
    for warning in warnings:
        print(f"  WARNING: {warning}")
    device = " --device cuda" if plan.gpu else ""
    print(f"  what it implies   shoal run {path}{device} --dry-run")
    print(f"  start it          shoal run {path}{device}")
    return EXIT_OK


def make_plan(options: argparse.Namespace, asker: Asker) -> Plan:
    """Returns the plan that options, answers and guesses give."""
    words = "Model (a folder, org/name of the Hugging Face hub, smollm2-135m, or tiny)"
    model = asker.ask(words, options.model, "tiny", "--model")
    words = "Data (a file with questions and answers, or a task that `shoal tasks` lists)"
    source = asker.ask(words, options.data, "", "--data")
    is_file = Path(source).exists() or source.endswith(DATA_SUFFIXES)
    if is_file:
        task, values, answer_chars, longest, rows = _plan_file(options, asker, Path(source), model)
    else:
        if source not in task_origins() and ":" not in source:
            raise ValueError(f"{source!r} is neither a file nor a task; `shoal tasks` lists the tasks")
        task, values, answer_chars, longest, rows = source, {}, SHORT, 200, LOOKED_AT
    think = model != "tiny" and is_file and values.get("style") == "chat"
    name = re.sub(r"[^a-z0-9-]+", "-", (options.name or options.file.stem).lower()).strip("-")[:40] or "own"
    gpu = options.device == "cuda" or (options.device is None and has_gpu())
    cores = os.cpu_count() or 2
    workers = options.workers or (1 if gpu else max(1, min(4, cores // 2)))
    shortest = answer_chars + 2 if model == "tiny" else max(SHORT, answer_chars)
    return Plan(
        name=name,
        model=model,
        task=task,
        options=values,
        steps=options.steps,
        max_new_tokens=options.max_new_tokens or (THINKING if think else shortest),
        longest_prompt=longest,
        workers=workers,
        threads=max(1, cores // (workers + 2)),
        gpu=gpu,
        supervised_steps=SUPERVISED_STEPS if rows >= LOOKED_AT else -(-rows // ROWS_PER_SUPERVISED_STEP),
    )


def _plan_file(
    options: argparse.Namespace, asker: Asker, path: Path, model: str
) -> tuple[str, dict[str, Any], int, int, int]:
    """Returns task, options, the longest answer and question of a data file, and its number of rows up to LOOKED_AT."""
    if not path.exists():
        raise ValueError(f"no file {path}; give --data the path of your questions and answers")
    rows = [row for _, row in islice(read_rows(path), LOOKED_AT) if isinstance(row, dict)]
    if not rows:
        raise ValueError(f"{path} has no rows that can be read")
    columns = column_names(rows[0])
    if len(rows) == 1 and (outer := next((name for name in QUESTIONS if holds_rows(rows[0], name)), "")):
        raise ValueError(
            f"{path} is one JSON object; its rows are the list {holds_rows(rows[0], outer)!r}: write that list alone into a file"
        )
    guesses = _first(QUESTIONS, columns), _first(ANSWERS, columns)
    if not any(guesses) and len(columns) == 2:
        guesses = columns[0], columns[1]
    listed = ", ".join(columns)
    question = asker.ask(f"Column with the question ({listed})", options.question, guesses[0], "--question")
    answer = asker.ask(f"Column with the answer ({listed})", options.answer, guesses[1], "--answer")
    for column in (question, answer):
        if column not in columns:
            raise ValueError(f"{path} has no column {column!r}; it has {listed}")
    answers = [_text(row, answer) for row in rows]
    longest = max(len(_text(row, question)) for row in rows)
    if (question, answer) == ("question", "answer") and all("####" in text for text in answers):
        style = "bare" if model == "tiny" else "chat"
        return "gsm8k", {"path": str(path), "style": style}, THINKING, longest, len(rows)
    words = "Grader (exact, number, math, choice, regex, or FILE.py:FUNCTION)"
    grader = asker.ask(words, options.grader, guess_grader(answers), "--grader")
    values: dict[str, Any] = {"path": str(path), "question": question, "answer": answer, "grader": grader}
    if grader == "regex":
        values["pattern"] = asker.ask(
            "Regular expression; its first group in a reply is the answer", options.pattern, "", "--pattern"
        )
    elif options.pattern:
        values["pattern"] = options.pattern
    values |= _style(options, asker, model)
    return "qa", values, max(len(text) for text in answers), longest, len(rows)


def _style(options: argparse.Namespace, asker: Asker, model: str) -> dict[str, Any]:
    """Returns the options of `qa` that say how a question is put."""
    if model == "tiny":
        return {"template": "{question}", "style": "bare"}
    think = (
        options.think
        or asker.ask("Should the model think before it answers? y or n", None, "n", "--think") == "y"
    )
    return {"style": "chat" if think else "direct"}


def guess_grader(answers: Sequence[str]) -> str:
    """Returns the grader that fits these answers."""
    if all(_NUMBER.fullmatch(text) for text in answers):
        return "number"
    if all(_LETTER.fullmatch(text) for text in answers):
        return "choice"
    return "math" if any("\\" in text for text in answers) else "exact"


def has_gpu() -> bool:
    """Returns whether torch finds a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def write_run_file(plan: Plan) -> str:
    """Returns the run file with a comment for each choice."""
    needed = _row_tokens(plan)
    dtype = trains = warm = ""
    if plan.gpu:
        dtype = 'compute_dtype = "bfloat16"  # of workers and validators; the run calibrates itself first\n'
        trains = 'compute_dtype = "bfloat16"\n'
    if plan.is_random:
        warm = f"supervised_steps = {plan.supervised_steps}  # random weights earn nothing before a few steps on the task's own answers\n"
    rate = "3e-4" if plan.is_random else "1e-6" if plan.gpu else "5e-6"
    groups, samples = (16, 16) if plan.gpu else (8, 8)
    options = f"options = {to_toml(dict(plan.options))}\n" if plan.options else ""
    text = f"""# Written by `shoal init`. `shoal docs run-file` lists every key; `shoal run FILE --dry-run` prints what this implies.

[run]
name = {to_toml(plan.name)}
model = {to_toml(plan.model)}
{dtype}last_version = {plan.steps}  # training steps; can be raised later, with --resume

[task]
name = {to_toml(plan.task)}
{options}
[sampling]
max_new_tokens = {plan.max_new_tokens}  # longer answers are cut
samples_per_prompt = {samples}  # answers to a prompt are compared with each other

[trainer]
learning_rate = {rate}  # lower it if reward rises and then falls
{warm}{trains}row_tokens = {needed}  # the longest prompt and its answer must fit

[coordinator]
groups_per_step = {groups}  # prompts of one step, {groups * samples} answers
eval_every = 10  # versions between two evaluations on held-out problems

[local]
workers = {plan.workers}  # processes on this machine that generate
trainer_threads = {plan.threads}
worker_threads = {plan.threads}
"""
    return _COMMENT.sub(lambda found: f"{found[1]:<{COMMENT_COLUMN}}# ", text)


def _row_tokens(plan: Plan) -> int:
    """Returns a row length for the longest prompt, measured with the model's tokenizer if it is on this machine."""
    # The instruction that a style adds has up to 100 characters; a token has at least two in most languages.
    tokens = plan.longest_prompt + (2 if plan.is_random else 100)
    if not plan.is_random:
        folder = local_folder(plan.model)
        tokens = tokens if (folder / "tokenizer.json").exists() else tokens // 2 + 100
    return -(-(tokens + plan.max_new_tokens + 8) // 64) * 64


def _first(names: Sequence[str], columns: Sequence[str]) -> str:
    lowered = {column.lower().rpartition(".")[2]: column for column in columns if "." in column}
    lowered |= {column.lower(): column for column in columns}
    return next((lowered[name] for name in names if name in lowered), "")


def _text(row: Row, column: str) -> str:
    try:
        value = find_value(row, column)
    except KeyError:
        return ""
    return str(value[0] if isinstance(value, list) and value else value)
