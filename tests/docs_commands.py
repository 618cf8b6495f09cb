"""Every command that the docs show, where it stands, and what runs it.

A command in a block must be one of three things: run by `tests/e2e/test_docs_live.py` (LIVE), run by a test that is
named here (ELSEWHERE), or marked in the page itself with `# not tested` and why. Anything else fails.
"""

import argparse
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROGRAMS = (
    "shoal",
    "make",
    "python",
    "pip",
    "pytest",
    "torchrun",
    "git",
    "nginx",
    "systemctl",
    "curl",
    "apt-get",
)
"""First words that make a line of a block without a language a command; in ```sh blocks every line is one."""

NOT_TESTED = "# not tested"

LIVE: tuple[str, ...] = (
    "shoal --help",
    "shoal explain",
    "shoal run runs/demo.toml --dry-run",
    "shoal run reverse.toml --dry-run",
    "shoal run runs/intellect-2.toml --dry-run",
    "shoal run own.toml",
    "shoal eval tiny",
    "shoal eval http",
    "shoal data filter --task count",
    "shoal doctor http",
    "shoal join http",
    "shoal status",
    "shoal whoami",
    "shoal check-local",
    "shoal pause",
    "shoal leave",
    "shoal remove",
    "shoal identity",
    "shoal ledger verify http",
    "shoal audit http",
    "shoal audit out/own",
    "shoal ledger verify out/own",
    "shoal chat out/own",
    "shoal export out/own",
    "shoal top http",
    "shoal report",
    "shoal worker --coordinator http://127.0.0.1:8700 --dir liar",
    "shoal toploc prove --model tiny",
    "shoal toploc calibrate rows.parquet",
)
"""How commands begin that are run as they stand against a live run, in the order of the page."""

ELSEWHERE: dict[str, str] = {
    "shoal arena": "tests/cli/test_arena.py",
    "shoal tasks show sort": "tests/cli/test_tasks_command.py",
    "shoal rollouts": "tests/swarm/coordinator/test_run_commands.py",
    "shoal compare": "tests/swarm/coordinator/test_run_commands.py",
    "make demo": "tests/e2e/test_demo.py",
    "shoal demo": "tests/cli/test_first_steps.py",
    "shoal completion": "tests/cli/test_first_steps.py",
    "make test": ".ci/run",
    "make check": ".ci/run",
    "make integration": ".ci/run",
    "make e2e": ".ci/run",
    "make browser": ".ci/run",
    "make s3": ".ci/run",
    "make docs": ".ci/run",
    "make hivemind": ".ci/run",
    "shoal run runs/demo.toml": "tests/e2e/test_demo.py",
    "shoal run reverse.toml": "tests/e2e/test_tutorial.py",
    "shoal coordinator runs/demo.toml": "tests/e2e/test_docs_live.py",
    "shoal trainer runs/demo.toml": "tests/e2e/test_docs_live.py",
    "shoal identity relay": "tests/e2e/test_docs_live.py",
    "shoal relay --coordinator": "tests/e2e/test_docs_live.py",
    "shoal validator --coordinator": "tests/e2e/test_docs_live.py",
    "shoal worker --coordinator": "tests/e2e/test_docs_live.py",
}
"""How commands begin that another test runs, and which."""


@dataclass(frozen=True)
class Command:
    page: Path
    line: int
    text: str
    """Without the prompt before it and the comment behind it."""
    comment: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"

    @property
    def is_marked(self) -> bool:
        return self.comment.startswith(NOT_TESTED)

    @property
    def runs_live(self) -> bool:
        return not self.is_marked and len(self._longest_start(LIVE)) > len(self._longest_start(ELSEWHERE))

    @property
    def runs_elsewhere(self) -> str | None:
        if self.is_marked or self.runs_live:
            return None
        return ELSEWHERE.get(self._longest_start(ELSEWHERE))

    def _longest_start(self, starts: Iterable[str]) -> str:
        """Returns the longest of `starts` that the command begins with, "" if none: the more exact entry decides."""
        return max((start for start in starts if self.text.startswith(start)), key=len, default="")


def pages() -> list[Path]:
    """Returns the pages with instructions. bench/log and CHANGELOG.md are histories, whose commands may no longer exist."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands_in_blocks() -> Iterator[Command]:
    for page in pages():
        yield from _commands_of(page)


def _commands_of(page: Path) -> Iterator[Command]:
    kind: str | None = None
    held = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence:
            kind = fence[1] if kind is None else None
            continue
        if kind is None:
            # A block by indentation.
            if not re.match(r" {4}\S", line) or line.split()[0] not in PROGRAMS:
                continue
        elif kind not in ("", "sh", "bash", "console"):
            continue
        line = held + line.strip()
        if line.endswith("\\"):
            held = line[:-1]
            continue
        held = ""
        command = _command(line, kind or "")
        if command is not None:
            yield Command(page, number, *command)


def _command(line: str, kind: str) -> tuple[str, str] | None:
    prompt = re.match(r"[\w-]*\$ ", line)
    text, _, comment = (line[prompt.end() :] if prompt else line).partition(" #")
    text, comment = text.strip(), f"#{comment}" if comment else ""
    if not text or text.startswith("#"):
        return None
    is_command = bool(prompt) or (kind in ("sh", "bash")) or _program(text) in PROGRAMS
    return (text, comment) if is_command else None


def _program(text: str) -> str:
    """The first word that is no setting of the environment."""
    words = [word for word in text.split() if not re.match(r"[A-Z_]+=", word)]
    return words[0] if words else ""


def commands_in_lines() -> Iterator[tuple[Path, str]]:
    """`shoal ...`, `python bench/...`, `make ...` inside sentences and tables."""
    for page in pages():
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for found in re.findall(r"`((?:shoal|python|make|pytest) [^`]+)`", text):
            yield page, " ".join(found.split())


# -- what there is to call --------------------------------------------------------------------------------


@cache
def shoal_parser() -> argparse.ArgumentParser:
    from shoal.cli.main import make_parser

    return make_parser()


def parser_of(words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of a command, and the words it would be given; ValueError for a command that is not there."""
    parser = shoal_parser()
    while True:
        actions = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        if not actions:
            return parser, words
        if not words or words[0].startswith("-"):
            return parser, words
        if words[0] not in actions[0].choices:
            raise ValueError(f"no command {words[0]!r}; there are {', '.join(actions[0].choices)}")
        parser, words = actions[0].choices[words[0]], words[1:]


def check_words(words: list[str]) -> None:
    """ValueError unless command, target or script are there, and every option of it."""
    look = {
        "shoal": _options_of_shoal,
        "make": _look_at_targets,
        "python": _options_of_script,
        "pytest": _look_at_tests,
    }
    if words[0] not in look:
        return
    known = look[words[0]](words[1:])
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    missing = [
        option for option in options if known is not None and option not in {*known, "--help", "--version"}
    ]
    if missing:
        raise ValueError(f"no option {', '.join(missing)}")


def _options_of_shoal(words: list[str]) -> set[str]:
    parser, _ = parser_of(words)
    return set(parser._option_string_actions)


def _look_at_targets(words: list[str]) -> None:
    for target in (word for word in words if not re.match(r"[A-Z_]+=", word)):
        if not re.search(rf"(?m)^{re.escape(target)}:", (ROOT / "Makefile").read_text()):
            raise ValueError(f"no target {target} in the Makefile")


def _options_of_script(words: list[str]) -> set[str] | None:
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None:
        return None
    if not (ROOT / script).exists():
        raise ValueError(f"no file {script}")
    return set(re.findall(r'"(--[a-z0-9-]+)"', _with_siblings(ROOT / script)))


def _look_at_tests(words: list[str]) -> None:
    for word in words:
        if word.startswith("tests/") and not (ROOT / word.split("::")[0]).exists():
            raise ValueError(f"no file {word}")


def _with_siblings(script: Path) -> str:
    """A script may leave its options to a module beside it."""
    text = script.read_text(encoding="utf-8")
    names = re.findall(r"(?m)^\s*(?:from|import) (\w+)", text)
    return text + "".join(
        path.read_text(encoding="utf-8") for name in names if (path := script.parent / f"{name}.py").exists()
    )
