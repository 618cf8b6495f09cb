"""Samples and grades a model's answers to problems, for `shoal eval` and `shoal data filter`.

The results are deterministic: the task and the seed choose the problems; the seed, the problem's place and the sample's number
choose the random numbers.
"""

import argparse
import contextlib
import hashlib
import random
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import use_device
from shoal.model.stop_strings import text_before_stop
from shoal.model.tokenizer import ChatSetting, Tokenizer
from shoal.tasks import CannotGrade, Finite, Outcome, Problem, Reward, Split, Task, make_task
from shoal.tasks.code_files import allow_code
from shoal.tasks.datasets.hub_files import with_hub_files
from shoal.tasks.datasets.judged_answers import JudgedAnswers
from shoal.tasks.grading.pool import Answer
from shoal.tasks.task_errors import conversation_before, grade_answer, pose_problem, pose_twice
from shoal.tasks.wrapped_tasks import choose_problems
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec, Sampling, TaskSpec
from shoal.wire.seeded_draw import sample_seed

if TYPE_CHECKING:
    from shoal.rollout.engine.api import Engine, FinishedRow

TRIES = 1000
"""Seeds tried without a new problem before a task that generates its problems counts as exhausted."""


@dataclass(frozen=True, slots=True)
class PosedProblem:
    """A problem, and its place in the list, which its random numbers depend on."""

    place: int
    seed: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """One answer and its reward."""

    outcome: Outcome
    value: float
    num_tokens: int
    cut: bool
    """Whether it reached max_new_tokens before an end token."""
    off_budget: int | None
    """Number of tokens above or below the budget, if the prompt asked for a length."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawSettings:
    """Settings for sampling answers."""

    samples: int
    temperature: float
    max_new_tokens: int
    seed: int


def task_spec(options: argparse.Namespace) -> TaskSpec:
    """Returns the task of the command line, with local files. A Python file that it names may be executed."""
    spec = TaskSpec(
        name=options.task,
        options=dict(options.option),
        budgets=tuple(options.budgets),
        budget_alpha=options.budget_alpha,
    )
    allow_code(spec)
    return with_hub_files(spec)


def make_draw(options: argparse.Namespace, samples: int, sampling: Sampling) -> DrawSettings:
    """Returns the settings of the command line, with defaults from `sampling`."""
    return DrawSettings(
        samples=samples,
        temperature=options.temperature or sampling.temperature,
        max_new_tokens=options.max_new_tokens or sampling.max_new_tokens,
        seed=options.seed,
    )


def pose(task: Task, split: Split, count: int | None, seed: int) -> list[PosedProblem]:
    """Returns `count` different problems, or fewer if the task has fewer. None takes all problems of a task that reads a file."""
    if isinstance(task, Finite):
        size = task.size(split)
        if not size:
            pose_problem(task, split, 0)  # raises an error that says why there are none
        chosen = choose_problems(size, count, seed)
        return [
            PosedProblem(place, index, pose_problem(task, split, index)) for place, index in enumerate(chosen)
        ]
    if count is None:
        raise ValueError("this task generates problems without end; give --problems, how many are wanted")
    found: dict[str, PosedProblem] = {}
    rng = random.Random(f"pose/{seed}")
    misses = 0
    while len(found) < count and misses < TRIES:
        number = rng.getrandbits(63)
        problem = pose_problem(task, split, number) if found else pose_twice(task, split, number)
        misses = misses + 1 if problem.prompt in found else 0
        found.setdefault(problem.prompt, PosedProblem(len(found), number, problem))
    return list(found.values())


def posed_split(task: Task) -> Split:
    """Returns the split to take problems from: `train`, but `eval` of a data set for evaluation only."""
    return "eval" if isinstance(task, Finite) and not task.size("train") else "train"


@contextlib.contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """Yields the folder called `name`, or a temporary folder with the model of that name.

    A folder whose weights transformers has to convert is written to a temporary one too, as the first version of a run is.
    """
    from shoal.model.builtin import create_model
    from shoal.model.load_model import stores_other_names

    folder = Path(name)
    if folder.is_dir() and not ((folder / "config.json").exists() and stores_other_names(folder)):
        yield folder
        return

    with tempfile.TemporaryDirectory() as into:
        with progress(f"writing {name} to a temporary folder"):
            create_model(name, Path(into) / "model", 0)
        yield Path(into) / "model"


def load_engine(folder: Path, options: argparse.Namespace, proof: ProofSpec | None = None) -> "Engine":
    from shoal.rollout.engine.drafting import DraftSettings
    from shoal.rollout.engine.selection import make_engine

    use_device(options)
    engine = make_engine(
        options.engine,
        compute_dtype=options.dtype,
        proof=proof or ProofSpec(),
        max_rows=options.max_rows,
        device=options.device,
        tensor_parallel=options.tensor_parallel,
        draft=DraftSettings.parse(options.draft, options.draft_rows, options.device),
    )
    with progress("loading the model"):
        engine.load(folder, 0)
    return engine


def answer(
    engine: "Engine",
    task: Task,
    posed: Sequence[PosedProblem],
    draw: DrawSettings,
    *,
    spec: TaskSpec,
    stop: threading.Event,
    advance: Callable[[int], None],
) -> Iterator[tuple[PosedProblem, tuple[GradedAnswer, ...]]]:
    """Yields each problem with its answers as soon as all are generated. Raises Stopped if `stop` is set."""
    from shoal.rollout.engine.api import generate

    by_place = {one.place: one for one in posed}
    requests = [request for one in posed for request in _requests(engine, task, one, draw, spec)]
    open_groups: dict[int, list[GradedAnswer | None]] = defaultdict(lambda: [None] * draw.samples)
    for rows in generate(engine, requests, stop):
        problems = [by_place[row.request.prompt_index].problem for row in rows]
        graded = _graded(engine, task, problems, rows, spec)
        for row, answer in zip(rows, graded, strict=True):
            place = row.request.prompt_index
            group = open_groups[place]
            group[row.request.sample_index] = answer
            advance(1)
            complete = tuple(one for one in group if one is not None)
            if len(complete) == draw.samples:
                del open_groups[place]
                yield by_place[place], complete


def _requests(
    engine: "Engine", task: Task, one: PosedProblem, draw: DrawSettings, spec: TaskSpec
) -> list[Any]:
    from shoal.rollout.engine.api import GenerationRequest

    prompt = encode_problem(engine.tokenizer, task, spec, one.problem)
    source = hashlib.sha256(f"draw/{draw.seed}".encode()).hexdigest()
    return [
        GenerationRequest(
            prompt_index=one.place,
            sample_index=sample,
            prompt_tokens=prompt,
            sample_seed=sample_seed(source, one.place, sample),
            max_new_tokens=draw.max_new_tokens,
            temperature=draw.temperature,
            stop=spec.stop,
        )
        for sample in range(draw.samples)
    ]


def encode_problem(tokenizer: Tokenizer, task: Task, spec: TaskSpec, problem: Problem) -> tuple[int, ...]:
    """Returns the tokens of a problem's prompt, as a worker that leases it encodes them."""
    turns = tuple((turn.role, turn.content) for turn in conversation_before(task, spec, problem))
    setting = ChatSetting(turns, spec.chat_template_kwargs)
    return tuple(tokenizer.encode_prompt(problem.prompt, chat=task.chat, setting=setting))


def _graded(
    engine: "Engine",
    task: Task,
    problems: "Sequence[Problem]",
    rows: "Sequence[FinishedRow]",
    spec: TaskSpec,
) -> list[GradedAnswer]:
    thinks = engine.tokenizer.thinks(chat=task.chat, setting=ChatSetting((), spec.chat_template_kwargs))
    answers = [
        Answer(
            problem,
            text_before_stop(engine.tokenizer.decode(row.output_tokens), spec.stop),
            len(row.output_tokens),
            thinks,
        )
        for problem, row in zip(problems, rows, strict=True)
    ]
    try:
        rewards = grade_answers(task, answers)
    except CannotGrade as error:
        raise ValueError(f"an answer could not be graded: {error}") from None
    return [
        GradedAnswer(
            reward.outcome,
            reward.value,
            one.num_tokens,
            row.finish is Finish.LENGTH,
            None if one.problem.budget is None else abs(one.problem.budget - one.num_tokens),
            one.text,
        )
        for one, row, reward in zip(answers, rows, rewards, strict=True)
    ]


def grade_answers(task: Task, answers: Sequence[Answer]) -> list[Reward]:
    """Returns the reward of each answer. A task's judge model runs on the CPU. Raises CannotGrade."""
    if answers and isinstance(task, JudgedAnswers):
        from shoal.swarm.validator.answer_judge import judge_answers

        return [judgement.reward for judgement in judge_answers(task, answers, device="cpu")]
    return [grade_answer(task, one.problem, one.text, one.num_tokens, thinks=one.thinks) for one in answers]


def load_task(spec: TaskSpec) -> Task:
    """Returns the task. Shows progress, because reading a large data set takes a while."""
    with progress(f"reading the problems of {spec.name}"):
        return make_task(spec)
