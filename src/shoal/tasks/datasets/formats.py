"""Formats of published data sets: how their rows become problems, and how answers are graded.

    gsm8k, svamp, math   mathematics in words
    mbpp, humaneval      programs that must pass tests

Files are read as their authors publish them. genesys.py has the format of SYNTHETIC-1 and of the INTELLECT-2 data set.
"""

import json
import re
from typing import Any

from shoal.tasks.datasets.data_set import ASK_BOXED, ASK_NUMBER, Format, Row, Style, plain_decimal
from shoal.tasks.grading.entry_points import is_reserved
from shoal.tasks.grading.math_grader import (
    find_bad_expression,
    find_bad_number,
    grade_expression,
    grade_plain_number,
)
from shoal.tasks.grading.program_grader import grade_program, in_block
from shoal.tasks.task import Problem

ASK_PROGRAM = "{}\nReply with the whole program in one ```python block."


def read_gsm8k(row: Row, style: Style) -> Problem:
    """Reads `question`, and `answer`: worked lines, then `#### 1,234`."""
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"the answer has no ####: {row['answer'][-80:]!r}")
    question = _asked(row, "question").strip()
    return Problem(ASK_NUMBER[style].replace("{question}", question), answer.strip().replace(",", ""))


def read_svamp(row: Row, style: Style) -> Problem:
    """Reads `Body`, `Question` and the number `Answer`."""
    body = _asked(row, "Body").strip()
    question = f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {_asked(row, 'Question').strip()}"
    return Problem(ASK_NUMBER[style].replace("{question}", question), plain_decimal(row["Answer"]))


def read_math(row: Row, style: Style) -> Problem:
    """Reads `problem` and the expression `answer`."""
    if not isinstance(row["answer"], str) or not row["answer"].strip():
        raise ValueError(f"the answer is {row['answer']!r}, expected a string")
    return Problem(
        ASK_BOXED[style].replace("{question}", _asked(row, "problem").strip()),
        f"\\boxed{{{row['answer'].strip()}}}",
        check=row["answer"].strip(),
    )


def read_mbpp(row: Row, style: Style) -> Problem:
    """Reads `prompt` (or `text`), `test_list`, `test_imports` (or `test_setup_code`), and the right answer `code`."""
    if not isinstance(row["test_list"], list):
        raise ValueError(f"test_list is {row['test_list']!r}, expected a list of tests")
    tests = [_text(test) for test in row["test_list"]]
    if not any(test.strip() for test in tests):
        raise ValueError("test_list is empty: any program would pass")
    setup = "\n".join(row.get("test_imports", [])) or row.get("test_setup_code", "")
    question = f"{_asked(row, 'prompt' if 'prompt' in row else 'text')}\nIt must pass:\n" + "\n".join(tests)
    check: dict[str, Any] = {"tests": [setup, *tests]}
    # Row 126 asks for a function named `sum`. Only the reference program can say so, never an answer.
    defined = re.findall(r"^def (\w+)\(", row["code"], re.MULTILINE)
    if builtin := {name: name for name in defined if is_reserved(name) and f"{name}(" in "".join(tests)}:
        check["entry_points"] = builtin
    return Problem(_ask_program(question, style), in_block(row["code"]), json.dumps(check))


def read_humaneval(row: Row, style: Style) -> Problem:
    """Reads `prompt`, the head of a function; `test`, which defines `check(candidate)`; and `entry_point`, the candidate's name."""
    prompt, entry = row["prompt"], row["entry_point"]
    before = prompt[: prompt.rindex(f"def {entry}(")]
    question = f"Complete this function.\n```python\n{prompt.rstrip()}\n```"
    check = {"before": before, "tests": [_text(row["test"]), f"check({entry})"]}
    return Problem(
        _ask_program(question, style), in_block(prompt + _text(row["canonical_solution"])), json.dumps(check)
    )


def _ask_program(question: str, style: Style) -> str:
    return ASK_PROGRAM.format(question) if style != "bare" else f"{ASK_PROGRAM.format(question)}\n\n"


def _asked(row: Row, field: str) -> str:
    """Returns the question in a field. Raises ValueError if there is none."""
    if not isinstance(row[field], str) or not row[field].strip():
        raise ValueError(f"{field} is {row[field]!r}, expected a text")
    return str(row[field])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value


GSM8K = Format(
    name="gsm8k",
    read=read_gsm8k,
    grade=grade_plain_number,
    find_bad=find_bad_number,
    question=lambda row: str(row["question"]),
)
SVAMP = Format(
    name="svamp",
    read=read_svamp,
    grade=grade_plain_number,
    find_bad=find_bad_number,
    question=lambda row: f"{row['Body']} {row['Question']}",
)
MATH = Format(
    name="math",
    read=read_math,
    grade=grade_expression,
    find_bad=find_bad_expression,
    question=lambda row: str(row["problem"]),
)
MBPP = Format(
    name="mbpp",
    read=read_mbpp,
    grade=grade_program,
    question=lambda row: str(row["prompt"] if "prompt" in row else row["text"]),
)
HUMANEVAL = Format(
    name="humaneval",
    read=read_humaneval,
    grade=grade_program,
    question=lambda row: str(row["prompt"]),
    evaluation_only=True,
)
