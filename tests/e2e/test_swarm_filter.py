"""`shoal data filter` over a swarm: the run is killed and continued, and every problem is answered once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TASK = (
    "--task",
    "qa",
    "--option",
    "path=q.jsonl",
    "--option",
    "grader=number",
    "--option",
    "template={question}",
)
BARE = (*TASK, "--option", "style=bare")


def shoal(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def accepted(folder: Path) -> int:
    """Returns the number of accepted submissions that the run's validator has logged."""
    logs = folder / "out" / "filter-qa" / "logs"
    return sum(path.read_text().count(" accepted ") for path in logs.glob("validator*"))


def test_a_killed_filter_continues_and_answers_every_problem_once(tmp_path: Path) -> None:
    rows = [{"question": f"{a}+{b}=", "answer": (a + b) % 10} for a in range(10) for b in range(10)]
    (tmp_path / "q.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shoal(
        tmp_path,
        "data",
        "filter",
        *BARE,
        "--model",
        "tiny",
        "--k",
        "4",
        "--max-new-tokens",
        "4",
        "--run-file",
        "f.toml",
    )
    running = start(tmp_path, "run", "f.toml", "--port", "0")
    try:
        while running.poll() is None and accepted(tmp_path) < 2:
            time.sleep(0.05)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    shoal(tmp_path, "run", "f.toml", "--resume", "--port", "0")
    filtering = ("data", "filter", *BARE, "--coordinator", "out/filter-qa", "--band", "0", "0.5")
    done = shoal(tmp_path, *filtering, "--out", "kept.jsonl")
    report = json.loads((tmp_path / "kept.jsonl.report.json").read_text())
    assert "kept" in done.stdout and report["looked_at"] == sum(report["histogram"]) > 70
    # The answers themselves say the same as the report.
    lines = shoal(tmp_path, "rollouts", "out/filter-qa", "--held-out", "--json").stdout.splitlines()
    groups = [json.loads(line) for line in lines]
    by_prompt = {group["prompt"]: sum(one["reward"] == 1 for one in group["samples"]) for group in groups}
    assert len(by_prompt) == report["looked_at"], "every problem was posed"
    kept = {json.loads(line)["question"] for line in (tmp_path / "kept.jsonl").read_text().splitlines()}
    assert {prompt for prompt, right in by_prompt.items() if right <= 2} <= kept
    assert not {prompt for prompt, right in by_prompt.items() if right > 2} & kept
    histogram = [sum(right == count for right in by_prompt.values()) for count in range(5)]
    assert histogram == report["histogram"]
    size = len((tmp_path / "log").read_text())
    again = start(tmp_path, "coordinator", "f.toml", "--dir", "out/filter-qa/coordinator", "--port", "0")
    try:
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", (tmp_path / "log").read_text()[size:])):
            assert again.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        by_url = (*filtering[: len(filtering) - 4], found[0], *filtering[-3:])
        shoal(tmp_path, *by_url, "--out", "by-url.jsonl")
    finally:
        again.send_signal(signal.SIGINT)
        again.wait()
    assert (tmp_path / "by-url.jsonl").read_text() == (tmp_path / "kept.jsonl").read_text()
