"""Grades programs by tests, in a sandbox.

The program is the last ```python block of the reply, or its last block without a label if there is none. All tests must pass:
partial credit would teach to write for the tests.
"""

import json
import math
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.tasks.grading.sandbox import SandboxLimits, best_level, passes, run_script
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, CannotGrade, Problem, Reward, reply_of

LIMITS = SandboxLimits()
"""Limits of all calls of a program together."""
SCRIPT_LIMITS = SandboxLimits(cpu_s=5, wall_s=10.0)
"""Limits of one run of a script. The INTELLECT-2 report gives each test 5 s."""
SCRIPTS_S = 120.0
"""Seconds of wall-clock time for all scripts of an answer together; beyond it the answer is wrong."""
MAX_PROGRAM_CHARS = 100_000
TOLERANCE = 1e-6
"""How far a printed number with a fraction may be from the expected one, absolutely or relative to it."""

# (?>...) never gives characters back: without it, an answer of many newlines after ```python would take quadratic time.
_BLOCK = re.compile(r"```(?:python|py)3?(?>\s*\n)(.*?)```", re.DOTALL | re.IGNORECASE)
_ANY_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
_FRACTION = re.compile(r"[-+]?\d{1,40}\.\d{1,40}(?:[eE][-+]?\d{1,3})?")
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)

JUDGE_IMPORTS = """
from typing import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys, time
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, floor, gcd, inf, log2, sqrt
exit = quit = sys.exit
"""
"""Names that programs for contest problems use without importing them, because the judges of those sites provide them."""

_FIND_METHOD = """
if {name!r} not in globals():
    for _class in [globals().get("Solution"), *globals().values()]:
        if isinstance(_class, type) and _class.__module__ == __name__ and callable(getattr(_class, {name!r}, None)):
            {name} = getattr(_class(), {name!r})
            break
"""
"""Code after a program that should define a function: takes a method of that name, of the class Solution or else of the first class."""


def in_block(program: str) -> str:
    """Returns the program in a ```python block, as an answer has it."""
    return f"```python\n{program.rstrip()}\n```"


def program_in(text: str) -> str | None:
    """Returns the last ```python block of the reply, else its last block without a label, or None."""
    reply = reply_of(text)
    blocks: list[str] = _BLOCK.findall(reply)
    if not blocks:
        blocks = [body for label, body in _ANY_BLOCK.findall(reply) if not label.strip()]
    return blocks[-1] if blocks and len(blocks[-1]) <= MAX_PROGRAM_CHARS else None


def grade_program(problem: Problem, text: str) -> Reward:
    """Runs the program in the reply against the tests of `problem.check`.

    `check` is JSON: `tests` call the program's functions, `entry_points` maps names in the tests to functions that are called like
    a builtin or a module, `before` is code of the data set that comes before the program, and `scripts` are pairs of standard input
    and expected output. With `judge_imports` the program has the names of JUDGE_IMPORTS; `methods` are functions that may also be
    methods of a class.
    """
    program = program_in(text)
    if program is None:
        return UNPARSEABLE
    check: dict[str, Any] = json.loads(problem.check)
    before = check.get("before", "")
    tests, scripts = check.get("tests", []), check.get("scripts", [])
    methods: list[str] = check.get("methods", [])
    head = before
    if check.get("judge_imports"):
        # The program must define these functions itself: one called `gcd` must not be the imported one.
        head = JUDGE_IMPORTS + "".join(f"globals().pop({name!r}, None)\n" for name in methods) + before
    # Imports from __future__ stay first, as Python demands.
    future = "".join(f"{line}\n" for line in _FUTURE.findall(program))
    program = f"{future}{head}{_FUTURE.sub('', program)}" if head else program
    program += "".join(_FIND_METHOD.format(name=name) for name in methods)
    if tests and before:
        # The tests use the data set's own helpers: the program may have redefined them.
        tests = [before, *tests]
    good = not tests or passes(program, tests, limits=LIMITS, entry_points=check.get("entry_points"))
    give_up_s = time.monotonic() + SCRIPTS_S
    good = good and all(
        time.monotonic() < give_up_s and _prints(program, stdin, wanted) for stdin, wanted in scripts
    )
    return RIGHT if good else WRONG


def readable_data_file(problem: Problem, paths: Sequence[str]) -> str:
    """Returns the first of these data files that a program to this problem could read in its sandbox, or an empty text.

    At level `user` programs see all files that every user may read. A program that finds the data set also finds its tests.
    """
    if not problem.check.startswith('{"tests": ') or not (open_paths := [*filter(_all_may_read, paths)]):
        return ""
    try:
        return open_paths[0] if best_level() == "user" else ""
    except CannotGrade:
        return ""  # no program runs here


def _all_may_read(path: str) -> bool:
    """Returns whether every user of this machine may read a file: its own mode and those of all folders above allow it."""
    try:
        real = Path(path).resolve(strict=True)
        folders_open = all(folder.stat().st_mode & stat.S_IXOTH for folder in real.parents)
        return folders_open and bool(real.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def _prints(program: str, stdin: str, wanted: str) -> bool:
    """Returns whether the script prints what is wanted, compared line by line without leading and trailing spaces.

    A number with a fraction may differ by rounding, since problems rarely say how many digits to print.
    """
    ended = run_script(program, stdin.encode(), limits=SCRIPT_LIMITS)
    if ended.status != 0:
        return False
    given, expected = _lines(ended.output.decode(errors="replace")), _lines(wanted)
    return given == expected or (
        len(given) == len(expected) and all(map(_same_words, map(str.split, given), map(str.split, expected)))
    )


def _same_words(given: list[str], expected: list[str]) -> bool:
    return len(given) == len(expected) and all(map(_same_word, given, expected))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if not (_FRACTION.fullmatch(given) and _FRACTION.fullmatch(expected)):
        return False
    return math.isclose(float(given), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]
