"""A task of another package: the example of docs/guides/researcher.md, installed."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def example() -> str:
    text = (ROOT / "docs" / "guides" / "researcher.md").read_text(encoding="utf-8")
    match = re.search(r'^```python title="reverse_words.py"\n(.*?)\n```$', text, re.MULTILINE | re.DOTALL)
    assert match is not None, "docs/guides/researcher.md has no example"
    return match[1]


def install(folder: Path, source: str) -> None:
    """Writes the files that pip would install: the module and its metadata."""
    (folder / "reverse_words.py").write_text(source)
    info = folder / "reverse_words-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reverse-words\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shoal.tasks]\nreverse = reverse_words:Reverse\n")


def run(folder: Path, code: str) -> str:
    path = f"{folder}:{ROOT / 'src'}"
    return subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout


def test_the_example_is_short_and_works(tmp_path: Path) -> None:
    source = example()
    assert len(source.splitlines()) < 30
    install(tmp_path, source)
    code = """
from shoal.tasks import make_task, Outcome
from shoal.wire.run_spec import TaskSpec
task = make_task(TaskSpec(name="reverse", options={"letters": 5}))
problem = task.problem("train", 1)
print(task.reward(problem, problem.answer, 1).outcome.value, task.reward(problem, "x", 1).outcome.value, task.chat)
try: make_task(TaskSpec(name="reverse", options={"size": 5}))
except ValueError as error: print(error)
try: make_task(TaskSpec(name="revers"))
except ValueError as error: print("reverse" in str(error))
budgeted = make_task(TaskSpec(name="reverse", budgets=(10,)))
print(budgeted.problem("eval", 1).prompt.endswith("Think for 10 tokens before giving a response."))
"""
    first, *others = run(tmp_path, code).splitlines()
    assert first == "right wrong True"
    assert "'reverse'" in others[0] and others[1:] == ["True", "True"]


def test_without_the_package_the_error_names_the_task(tmp_path: Path) -> None:
    code = """
from shoal.tasks import make_task
from shoal.wire.run_spec import TaskSpec
try: make_task(TaskSpec(name="reverse"))
except ValueError as error: print(error)
"""
    assert "unknown task 'reverse'; known: add" in run(tmp_path, code)
