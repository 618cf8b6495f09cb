"""Calls a task's methods so that a mistake in them names the file and the line, and tries a task before a run depends on it."""

import functools
import math
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from shoal.tasks.datasets.judged_answers import JudgedAnswers
from shoal.tasks.grading.program_grader import readable_data_file
from shoal.tasks.task import THOUGHT_END, CannotGrade, Outcome, Problem, Reward, Split, Task
from shoal.wire.lease import Message
from shoal.wire.run_spec import TaskSpec

USUAL_REWARD = 10.0
"""Rewards beyond this are reported: tasks give 0 to 1, and plots and `expect_gain` assume such numbers."""
WRONG_ANSWERS = ("", "?")
"""Answers that are wrong for nearly every task; a reward must be able to grade them."""
GRADED_SEEDS = range(3)
POSED_SEEDS = range(16)
"""Seeds whose problems are posed twice: a task may be random in some of its problems only."""
SLOW_S = 0.2
"""Seconds for one answer beyond which a grader is reported: a step has hundreds of answers."""

_OURS = Path(__file__).parent.parent


class TaskError(ValueError):
    """A mistake in the code of a task. `trace` is the traceback as text; it is empty if nothing was raised."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class UnseededProblem(TaskError):
    """A problem differs when it is posed twice."""


def pose_problem(task: Task, split: Split, seed: int) -> Problem:
    """Returns the problem of a seed. Raises TaskError with file and line if the task's code fails."""
    try:
        problem = task.problem(split, seed)
    except Exception as error:
        raise _explained(task, f"problem({split!r}, {seed})", error) from error
    if not isinstance(problem, Problem):
        raise TaskError(
            f"task {_name(task)}: problem() returned {problem!r}; return shoal.tasks.Problem(prompt, answer)"
        )
    return problem


def pose_twice(task: Task, split: Split, seed: int) -> Problem:
    """Returns the problem of a seed. Raises UnseededProblem if posing it a second time gives another one."""
    problem, again = (pose_problem(task, split, seed) for _ in range(2))
    if problem != again:
        raise UnseededProblem(
            f"task {_name(task)}: problem({split!r}, {seed}) gave {problem.prompt[:80]!r} and then {again.prompt[:80]!r}; "
            "it must depend on the seed only: use shoal.tasks.problem_rng(seed, 0) instead of random"
        )
    return problem


def pose_prompts(task: Task, split: Split, seeds: Iterable[int]) -> tuple[str, ...]:
    """Returns the prompts of these seeds."""
    return tuple(pose_problem(task, split, seed).prompt for seed in seeds)


def conversation_before(task: Task, spec: TaskSpec, problem: Problem) -> tuple[Message, ...]:
    """Returns the turns before a problem's prompt: its own, and the task's system prompt if it has none.

    Raises TaskError if the task's prompts are plain text, or if a role is unknown.
    """
    own = problem.messages
    if spec.system and (not own or own[0][0] != "system"):
        own = (("system", spec.system), *own)
    if own and not task.chat:
        raise TaskError(
            f"task {_name(task)}: messages and `system` need prompts that are chat turns; set the task's style to chat"
        )
    for role, text in own:
        if role not in ("system", "user", "assistant") or not isinstance(text, str):
            raise TaskError(
                f"task {_name(task)}: message {(role, text)!r} of a problem must be ('system', 'user' or 'assistant', its text)"
            )
    return tuple(Message.model_validate({"role": role, "content": text}) for role, text in own)


def grade_answer(task: Task, problem: Problem, text: str, num_tokens: int, *, thinks: bool = False) -> Reward:
    """Returns the reward of an answer.

    Raises TaskError if the task's code fails or its value is not a finite number, and CannotGrade if the system fails (no memory
    or process left, a file that cannot be read). Any other exception would end a validator that grades a stranger's answer.

    With `thinks`, the model's chat template makes it think first: only what follows the thought is graded, and an answer that never
    closes its thought earns nothing. Otherwise it would pay to be cut off with a guess in the thought.
    """
    if thinks:
        closed, text = THOUGHT_END in text, text.rpartition(THOUGHT_END)[2]
        if not closed:
            nothing = grade_answer(task, problem, "", num_tokens)
            return Reward(min(0.0, nothing.value), Outcome.UNPARSEABLE)
    try:
        reward = task.reward(problem, text, num_tokens)
    except CannotGrade:
        raise
    except OSError as error:
        raise CannotGrade(f"task {_name(task)}: reward() raised {type(error).__name__}: {error}") from error
    except (Exception, SystemExit) as error:
        explained = _explained(task, "reward()", error)
        raise explained if isinstance(explained, TaskError) else TaskError(str(explained)) from error
    if not isinstance(reward, Reward):
        raise TaskError(
            f"task {_name(task)}: reward() returned {reward!r}; return shoal.tasks.Reward(value, Outcome.RIGHT or .WRONG)"
        )
    if not isinstance(reward.value, int | float) or not math.isfinite(reward.value):
        raise TaskError(
            f"task {_name(task)}: reward() gave {reward.value!r} for the answer {text[:60]!r}; return a finite number"
        )
    return reward


def try_task(task: Task) -> list[str]:
    """Poses problems twice and grades a right and two wrong answers. Returns warnings; raises TaskError for what cannot work."""
    values: list[float] = []
    warnings: list[str] = []
    problems = [pose_twice(task, "train", seed) for seed in POSED_SEEDS]
    grade_s: list[float] = []
    if isinstance(task, JudgedAnswers):
        return []  # its answers are graded by a model, which not every machine has
    for seed in GRADED_SEEDS:
        problem, began_s = problems[seed], time.perf_counter()
        right = grade_answer(task, problem, problem.answer, max(1, len(problem.answer) // 4))
        wrong = [grade_answer(task, problem, text, 1) for text in WRONG_ANSWERS]
        grade_s.append((time.perf_counter() - began_s) / (1 + len(wrong)))
        values += [right.value, *(one.value for one in wrong)]
        if seed == GRADED_SEEDS[0]:
            warnings += _grade_again(task, problem, right)
        if not warnings and right.value <= max(one.value for one in wrong) and problem.budget is None:
            warnings.append(
                f"task {_name(task)}: reward() gives the right answer {problem.answer[:60]!r} {right.value:g}, no more than a "
                "wrong one; compare reward() with the answers that problem() returns"
            )
    if min(grade_s) > SLOW_S:  # the first answers may wait for a child process that is started once
        warnings.append(
            f"task {_name(task)}: reward() takes {min(grade_s):.1f} s for an answer, and validators grade every answer of a run; "
            "make it faster, or use more validators (local.validators) and fewer samples_per_prompt"
        )
    paths = [path for name in ("path", "eval_path") if (path := getattr(task, name, ""))]
    if found := next(filter(None, (readable_data_file(problem, paths) for problem in problems)), ""):
        warnings.append(
            f"task {_name(task)}: every user of this machine can read {found}, and so can the programs that its tests grade, at "
            f"sandbox level user; close it (chmod o-rwx {found}) or install bubblewrap"
        )
    largest = max(values, key=abs)
    if abs(largest) > USUAL_REWARD:
        warnings.append(
            f"task {_name(task)}: reward() gave {largest:g}; divide it so that rewards are from 0 to 1, as plots and expect_gain assume"
        )
    return warnings


def _grade_again(task: Task, problem: Problem, right: Reward) -> list[str]:
    """Returns a warning if the right answer gets another reward when it is graded a second time."""
    again = grade_answer(task, problem, problem.answer, max(1, len(problem.answer) // 4))
    if again.value == right.value:
        return []
    return [
        f"task {_name(task)}: reward() gave {right.value:g} and then {again.value:g} for the same answer {problem.answer[:60]!r}; "
        "every validator and audit must get the same number: use no random numbers and no clock"
    ]


@functools.lru_cache(maxsize=64)
def print_trace(trace: str) -> None:
    """Writes a traceback to standard error, which is a role's log; the same one only once."""
    if trace:
        sys.stderr.write(f"{trace.rstrip()}\n")
        sys.stderr.flush()


def _explained(task: Task, call: str, error: Exception | SystemExit) -> Exception | SystemExit:
    """Returns the error to raise: Shoal's own sentences unchanged, everything else as a TaskError with its place."""
    frames = traceback.extract_tb(_below_this_module(error.__traceback__))
    if isinstance(error, TaskError | OSError) or (
        isinstance(error, ValueError) and (not frames or _OURS in Path(frames[-1].filename).parents)
    ):
        return error
    own = [frame for frame in frames if not _is_library(frame.filename)] or list(frames)
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    trace = "".join(traceback.format_exception(type(error), error, _below_this_module(error.__traceback__)))
    return TaskError(
        f"task {_name(task)}: {call} raised {type(error).__name__}: {error}{place}; correct the task and start again",
        trace,
    )


def _below_this_module(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _is_library(filename: str) -> bool:
    return filename.startswith(("<", sys.base_prefix + "/lib")) or "site-packages" in filename


def _name(task: Task) -> str:
    return type(task).__name__
