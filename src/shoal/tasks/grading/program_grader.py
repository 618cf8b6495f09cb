"""Grades programs by tests, in a sandbox.

The program is the last ```python block of the reply. All tests must pass: partial credit would teach to write for the tests.
"""

import json
import re
import time
from typing import Any

from shoal.tasks.grading.sandbox import SandboxLimits, passes, run_script
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, Problem, Reward, reply_of

LIMITS = SandboxLimits()
"""Limits of all calls of a program together."""
SCRIPT_LIMITS = SandboxLimits(cpu_s=5, wall_s=10.0)
"""Limits of one run of a script. The INTELLECT-2 report gives each test 5 s."""
SCRIPTS_S = 120.0
"""Seconds of wall-clock time for all scripts of an answer together; beyond it the answer is wrong."""
MAX_PROGRAM_CHARS = 100_000

_BLOCK = re.compile(r"```(?:python|py)\s*\n(.*?)```", re.DOTALL)


def in_block(program: str) -> str:
    """Returns the program in a ```python block, as an answer has it."""
    return f"```python\n{program.rstrip()}\n```"


def program_in(text: str) -> str | None:
    """Returns the last ```python block of the reply, or None."""
    blocks: list[str] = _BLOCK.findall(reply_of(text))
    return blocks[-1] if blocks and len(blocks[-1]) <= MAX_PROGRAM_CHARS else None


def grade_program(problem: Problem, text: str) -> Reward:
    """Runs the program in the reply against the tests of `problem.check`.

    `check` is JSON: `tests` call the program's functions, `entry_points` maps names in the tests to functions that are called like
    a builtin or a module, `before` is code of the data set that comes before the program, and `scripts` are pairs of standard input
    and expected output.
    """
    program = program_in(text)
    if program is None:
        return UNPARSEABLE
    check: dict[str, Any] = json.loads(problem.check)
    before = check.get("before", "")
    tests, scripts = check.get("tests", []), check.get("scripts", [])
    program = before + program
    if tests and before:
        # The tests use the data set's own helpers: the program may have redefined them.
        tests = [before, *tests]
    good = not tests or passes(program, tests, limits=LIMITS, entry_points=check.get("entry_points"))
    give_up_s = time.monotonic() + SCRIPTS_S
    good = good and all(
        time.monotonic() < give_up_s and _prints(program, stdin, wanted) for stdin, wanted in scripts
    )
    return RIGHT if good else WRONG


def _prints(program: str, stdin: str, wanted: str) -> bool:
    """Returns whether the script prints what is wanted, compared line by line without leading and trailing spaces."""
    ended = run_script(program, stdin.encode(), limits=SCRIPT_LIMITS)
    return ended.status == 0 and _lines(ended.output.decode(errors="replace")) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
