"""Mathematics in words: GSM8K, SVAMP and MATH, from files as their authors publish them."""

from decimal import Decimal

from shoal.tasks.datasets.data_set import Format, Row, Style
from shoal.tasks.datasets.math_problems import (
    find_bad_expression,
    find_bad_number,
    grade_expression,
    grade_plain_number,
)
from shoal.tasks.task import Problem

ASK_NUMBER: dict[Style, str] = {
    "chat": "{}\nThink step by step, then give the answer as a number after ####.",
    "direct": "{} Reply with the number only.",
    "bare": "Question: {}\nAnswer:",
}
ASK_BOXED: dict[Style, str] = {
    "chat": "{}\nThink step by step, then put the final answer within \\boxed{{}}.",
    "direct": "{}\nReply with the final answer within \\boxed{{}} only.",
    "bare": "Question: {}\nAnswer:",
}


def read_gsm8k(row: Row, style: Style) -> Problem:
    """`question`, and `answer`: worked lines, then `#### 1,234`."""
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"the answer has no ####: {row['answer'][-80:]!r}")
    return Problem(ASK_NUMBER[style].format(row["question"].strip()), answer.strip().replace(",", ""))


def read_svamp(row: Row, style: Style) -> Problem:
    """`Body`, `Question` and the number `Answer`."""
    body = row["Body"].strip()
    question = f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {row['Question'].strip()}"
    return Problem(ASK_NUMBER[style].format(question), _plain(row["Answer"]))


def read_math(row: Row, style: Style) -> Problem:
    """`problem` and the expression `answer`."""
    if not isinstance(row["answer"], str) or not row["answer"].strip():
        raise ValueError(f"the answer is {row['answer']!r}, expected a text")
    return Problem(
        ASK_BOXED[style].format(row["problem"].strip()),
        f"\\boxed{{{row['answer'].strip()}}}",
        check=row["answer"].strip(),
    )


def _plain(number: int | float) -> str:
    """51.0 is `51`: without a point where none is needed, and never with an exponent."""
    return f"{Decimal(repr(float(number))).normalize():f}"


GSM8K = Format(name="gsm8k", read=read_gsm8k, grade=grade_plain_number, find_bad=find_bad_number)
SVAMP = Format(name="svamp", read=read_svamp, grade=grade_plain_number, find_bad=find_bad_number)
MATH = Format(name="math", read=read_math, grade=grade_expression, find_bad=find_bad_expression)
