"""Programs that must pass tests: MBPP and HumanEval, from files as their authors publish them.

The program is the last ```python block of the reply. Every test must pass: partial credit teaches to write for the tests.
"""

import json
import re
from typing import Any

from shoal.tasks.datasets.data_set import Format, Row, Style
from shoal.tasks.grading.sandbox import Limits, passes, run_script
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, Problem, Reward, reply_of

LIMITS = Limits()
"""Of all of a program's calls together."""
SCRIPT_LIMITS = Limits(cpu_s=5, wall_s=30.0)
"""Of one run of a script, as the report has it."""
MAX_PROGRAM_CHARS = 100_000

_BLOCK = re.compile(r"```(?:python|py)\s*\n(.*?)```", re.DOTALL)
_ASK = "{}\nReply with the whole program in one ```python block."


def read_mbpp(row: Row, style: Style) -> Problem:
    """`prompt` (or `text`), `test_list`, `test_imports` (or `test_setup_code`); `code` is one right answer."""
    tests = [_text(test) for test in row["test_list"]]
    if not tests:
        raise ValueError("test_list is empty: any program would pass")
    setup = "\n".join(row.get("test_imports", [])) or row.get("test_setup_code", "")
    question = f"{row['prompt'] if 'prompt' in row else row['text']}\nIt must pass:\n" + "\n".join(tests)
    return Problem(_ask(question, style), in_block(row["code"]), json.dumps({"tests": [setup, *tests]}))


def read_humaneval(row: Row, style: Style) -> Problem:
    """`prompt` is the head of a function, `test` defines `check(candidate)`, `entry_point` names the candidate."""
    prompt, entry = row["prompt"], row["entry_point"]
    before = prompt[: prompt.rindex(f"def {entry}(")]
    question = f"Complete this function.\n```python\n{prompt.rstrip()}\n```"
    check = {"before": before, "tests": [row["test"], f"check({entry})"]}
    return Problem(
        _ask(question, style), in_block(prompt + _text(row["canonical_solution"])), json.dumps(check)
    )


def in_block(program: str) -> str:
    return f"```python\n{program.rstrip()}\n```"


def program_in(text: str) -> str | None:
    """The last ```python block of the reply."""
    blocks: list[str] = _BLOCK.findall(reply_of(text))
    return blocks[-1] if blocks and len(blocks[-1]) <= MAX_PROGRAM_CHARS else None


def grade_program(problem: Problem, text: str) -> Reward:
    """`check` is JSON: `tests` call the program's functions, `scripts` are pairs of input and expected output."""
    program = program_in(text)
    if program is None:
        return UNPARSEABLE
    check: dict[str, Any] = json.loads(problem.check)
    program = check.get("before", "") + program
    tests, scripts = check.get("tests", []), check.get("scripts", [])
    good = not tests or passes(program, tests, limits=LIMITS)
    good = good and all(_prints(program, stdin, wanted) for stdin, wanted in scripts)
    return RIGHT if good else WRONG


def _prints(program: str, stdin: str, wanted: str) -> bool:
    """Line by line, spaces at the ends left out: nobody's program should fail for a newline."""
    ended = run_script(program, stdin.encode(), limits=SCRIPT_LIMITS)
    return ended.status == 0 and _lines(ended.output.decode(errors="replace")) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _ask(question: str, style: Style) -> str:
    return _ASK.format(question) if style != "bare" else f"{_ASK.format(question)}\n\n"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


MBPP = Format(name="mbpp", read=read_mbpp, grade=grade_program)
HUMANEVAL = Format(name="humaneval", read=read_humaneval, grade=grade_program, evaluation_only=True)
