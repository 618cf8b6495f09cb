"""From a file of questions and answers to a curve, with a run file of at most 15 lines; then everything one does with the result."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.run.addresses import free_ports
from shoal.model.builtin import create_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RUN_FILE = """[run]
name = "mine"
model = "tiny"
last_version = 6
[task]
name = "qa"
options = { path = "questions.jsonl", question = "q", answer = "a", grader = "number", template = "{question}" }
[sampling]
max_new_tokens = 4
[trainer]
supervised_steps = 30
row_tokens = 64
[coordinator]
groups_per_step = 4
eval_every = 3
"""
"""15 lines."""


def shoal(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a finished run of the file above."""
    folder = tmp_path_factory.mktemp("own-data")
    rng = random.Random(0)
    pairs = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(400)]
    rows = [json.dumps({"q": f"{a}+{b}=", "a": (a + b) % 10}) for a, b in pairs]
    (folder / "questions.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (folder / "mine.toml").write_text(RUN_FILE)
    port = str(free_ports(1)[0])
    done = shoal(folder, "run", "mine.toml", "--set", "trainer.learning_rate=1e-3", "--port", port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"an answer of version \d+: '\d\+\d=' -> '.*', expected '\d'", done.stdout), done.stdout
    assert "best version" in done.stdout
    return folder


def test_fifteen_lines_give_a_curve(finished: Path) -> None:
    assert len(RUN_FILE.splitlines()) <= 15
    lines = (finished / "out" / "mine" / "trainer" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["version"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert {event["version"] for event in events if event["event"] == "evaluation"} == {0, 3, 6}
    assert "learning_rate = 0.001" in (finished / "out" / "mine" / "run.toml").read_text()


def test_the_folder_can_be_verified_and_audited(finished: Path) -> None:
    done = shoal(finished, "ledger", "verify", "out/mine")
    assert done.returncode == 0 and done.stdout.startswith("good: "), done.stdout + done.stderr
    done = shoal(finished, "audit", "out/mine", "--sample", "6", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["checked"], found["good"], found["gone"]) == (6, 6, 0)


def test_the_newest_and_the_best_version_can_be_used(finished: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(finished / "out" / "mine" / "model")
    assert model.num_parameters() > 100_000
    assert (finished / "out" / "mine" / "model").resolve().name == "v6"
    done = shoal(finished, "export", "out/mine", "--version", "best", "--out", "best")
    assert done.returncode == 0, done.stderr
    assert "| version | task | held-out reward |" in (finished / "best" / "README.md").read_text()
    done = shoal(finished, "export", "out/mine", "--version", "2", "--out", "second")
    assert done.returncode == 0, done.stderr
    done = shoal(finished, "chat", "out/mine", "--prompt", "1+2=", "--max-new-tokens", "4")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_a_sweep_compares_its_runs(finished: Path) -> None:
    words = ("--set", "trainer.learning_rate=1e-3,1e-4", "--set", "run.last_version=2", "--port", "0")
    done = shoal(finished, "run", "mine.toml", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((finished / "out" / "mine-sweep.json").read_text())
    assert [row["settings"] for row in rows] == [
        "trainer.learning_rate=0.001 run.last_version=2",
        "trainer.learning_rate=0.0001 run.last_version=2",
    ]
    assert all(row["best"] is not None and not row["failure"] for row in rows)
    assert "held-out: first" in done.stdout


JUDGED_FILE = """[run]
name = "judged"
model = "tiny"
last_version = 2
[[task]]
name = "judge"
[task.options]
path = "open.jsonl"
judge_path = "judge"
judge_prompt = "Q: {question} A: {answer} Score: "
score_pattern = "([0-9])"
judge_tokens = 6
style = "bare"
[[task]]
name = "sort"
[task.sampling]
temperature = 0.7
samples_per_prompt = 4
[sampling]
max_new_tokens = 8
samples_per_prompt = 8
[trainer]
row_tokens = 64
[coordinator]
groups_per_step = 4
eval_prompts = 4
[local]
relays = 1
workers = 1
"""


def test_a_judge_and_a_task_with_its_own_temperature_in_one_run(tmp_path: Path) -> None:
    """Every submission is accepted, trainer and workers agree on log-probs, and an audit gets the judge's scores again."""
    create_model("tiny", tmp_path / "judge", seed=1)
    rows = [json.dumps({"question": f"What is {n}?"}) for n in range(10, 99)]
    (tmp_path / "open.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (tmp_path / "judged.toml").write_text(JUDGED_FILE)
    done = shoal(tmp_path, "run", "judged.toml", "--dry-run")
    assert "sampling of sort" in done.stdout and "temperature 0.7, 4 samples of up to 8 tokens" in done.stdout
    done = shoal(tmp_path, "run", "judged.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"submissions +\d+ accepted, 0 refused, 0 void", done.stdout), done.stdout
    lines = (tmp_path / "out" / "judged" / "trainer" / "metrics.jsonl").read_text().splitlines()
    (first,) = (one for one in map(json.loads, lines) if one["event"] == "step" and one["version"] == 1)
    assert first["logprob_gap"] < 0.02, "another temperature would differ by more than 0.1"
    done = shoal(tmp_path, "audit", "out/judged", "--sample", "8", "--json")
    found = json.loads(done.stdout)
    assert found["good"] == found["checked"] == 8, done.stdout
