"""The language rules of CONTRIBUTING.md that a machine can check: verbless docstrings and phrases that hide the meaning."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = ["src", "tests", "bench", "examples", "docs", "runs", "deploy"]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "Makefile", "pyproject.toml"]

BANNED_PHRASES = re.compile(
    r"\bwhoever\b|\bwhosoever\b|\bnobody's\b|\bthe doing of\b|\banew\b|\bof its day\b|\bstands there\b|\bhas hung up\b"
    r"|\bsuch a one\b|\bwhat is none\b|\bfor want of\b|\bas ever\b|\blest\b|\bonly now is it\b|\bis no time\b"
    r"|\bkeep(s|ing)? house\b|\bhad its say\b|\bby and by\b|\bto and fro\b|\bholding the door\b|\bas far as is known\b"
    r"|\bnot asked for it\b|\bits own doing\b|\bnobody's doing\b|\bthe dearest\b|\bmended\b|\bwould that\b",
    re.IGNORECASE,
)
"""Phrases of the first release that readers had to read twice. CONTRIBUTING.md shows what to write instead."""

BAD_OPENERS = re.compile(
    r"(?:Of|By|As|For|In|On|At|From|To|With|Without|The same|Likewise|Ditto|Such|Also|And|But|Or|So|Then|Whoever|Whose|Whom)\b"
)
"""A docstring that begins so has no subject yet; nearly all of them never get one."""

VERB = re.compile(
    r"\b(?:is|are|was|were|be|been|has|have|had|do|does|did|can|cannot|may|might|must|shall|should|will|would|\w+(?:s|es|ed|en|ing))\b"
)


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:;])\s", " ".join(text.split()), maxsplit=1)[0]


def python_files(*places: str) -> list[Path]:
    return sorted(path for place in places for path in (ROOT / place).rglob("*.py"))


def is_imperative(word: str) -> bool:
    """Whether a sentence that begins with this word can be an imperative: a plain lower-case-able word, no article or pronoun."""
    return word.lower() not in {
        "a", "an", "the", "this", "that", "these", "those", "all", "each", "every", "no", "what", "who", "which", "how",
        "where", "when", "why", "whether", "one", "two", "three", "it", "its", "they", "their", "there", "here", "nothing",
        "some", "any", "both", "several", "many", "most", "more", "less", "not", "only", "same", "other", "another", "our",
    }  # fmt: skip


def test_docstrings_of_functions_begin_with_what_the_function_does() -> None:
    """The first sentence has a verb: an imperative, "Returns ...", or a subject with its verb."""
    wrong = []
    for path in python_files("src"):
        for node, text in docstrings(ast.parse(path.read_text())):
            sentence = first_sentence(text)
            if BAD_OPENERS.match(sentence):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {sentence[:90]}")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                word = re.match(r"[`\"']?(\w+)", sentence)
                if word and not is_imperative(word[1]) and not VERB.search(sentence[len(word[0]) :]):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {sentence[:90]}")
    assert wrong == [], f"{len(wrong)} docstrings"


def text_files() -> list[Path]:
    suffixes = {".py", ".md", ".toml", ".js", ".html", ".conf", ".service", ".yml"}
    found = [path for place in PLACES for path in (ROOT / place).rglob("*") if path.suffix in suffixes]
    return sorted([*found, *(ROOT / page for page in PAGES)])


def test_no_phrase_that_readers_had_to_read_twice() -> None:
    wrong = []
    for path in text_files():
        if path in (Path(__file__), ROOT / "CONTRIBUTING.md"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := BANNED_PHRASES.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r} in {line.strip()[:90]!r}")
    assert wrong == [], f"{len(wrong)} phrases"


@pytest.mark.parametrize(
    ("sentence", "bad"),
    [
        ("Of the table.", True),
        ("As far as is known.", True),
        ("The same, for a whole file.", True),
        ("Returns the rows including unflushed changes.", False),
        ("Flush pending rows.", False),
        ("A lease that has ended keeps its row.", False),
    ],
)
def test_the_rule_tells_verbless_sentences(sentence: str, bad: bool) -> None:
    word = re.match(r"\w+", sentence)
    assert word
    verbless = not is_imperative(word[0]) and not VERB.search(sentence[len(word[0]) :])
    assert (bool(BAD_OPENERS.match(sentence)) or verbless) is bad
