"""The tutorial of docs/guides/researcher.md, run to its result: a task of one's own is trained on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_processes import SHOAL

from shoal.cli.run.addresses import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "researcher.md").read_text(encoding="utf-8")


def file_of_guide(name: str) -> str:
    found = re.search(rf'^```\w+ title="{re.escape(name)}"\n(.*?)\n```$', GUIDE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the guide has no {name}"
    return found[1]


def write_tutorial(folder: Path, source: str) -> None:
    """Writes the tutorial's files."""
    (folder / "reverse_words.py").write_text(source)
    (folder / "reverse.toml").write_text(file_of_guide("reverse.toml"))


def run_tutorial(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SHOAL, "run", "reverse.toml", "--port", str(free_ports(1)[0])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_the_own_task_tutorial_trains(tmp_path: Path) -> None:
    write_tutorial(tmp_path, file_of_guide("reverse_words.py"))
    done = run_tutorial(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run reverse: finished" in done.stdout
    assert re.search(r"others|only this machine can join", done.stdout)
    lines = (tmp_path / "out" / "reverse" / "trainer" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert max(event["version"] for event in events if event["event"] == "step") == 20
    held_out = {
        event["version"]: event["held_out_reward"] for event in events if event["event"] == "evaluation"
    }
    assert set(held_out) == {0, 10, 20}
    assert held_out[20] > 0.2, held_out


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            'raise ValueError("my bug in reward")',
            r"reward\(\) raised ValueError: my bug in reward .*reverse_words\.py:\d+",
        ),
        ("return 0.5", r"reward\(\) returned 0\.5; return shoal\.tasks\.Reward"),
    ],
)
def test_a_broken_reward_ends_the_run_with_its_cause(tmp_path: Path, broken: str, words: str) -> None:
    source = file_of_guide("reverse_words.py")
    line = "        right = text.strip() == problem.answer"
    assert line in source
    write_tutorial(tmp_path, source.replace(line, f"        {broken}\n{line}"))
    done = run_tutorial(tmp_path)
    assert done.returncode == 2
    assert re.search(words, done.stderr), done.stderr


def test_ten_lines_of_python_train(tmp_path: Path) -> None:
    source = file_of_guide("ten_lines.py")
    assert len([line for line in source.splitlines() if line.strip()]) <= 10
    (tmp_path / "ten_lines.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "ten_lines.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run python: finished" in done.stdout
    assert re.search(r"^\{0: [\d.]+, 4: [\d.]+\} [04] out/python/model$", done.stdout, re.MULTILINE), (
        done.stdout
    )
