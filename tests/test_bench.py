"""Every benchmark starts: an option or a record that it uses may have been renamed, which mypy does not always see."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"
NEEDED = {"pictures": "pyte", "compile_kernels": "triton"}
"""Packages that no extra has, by the benchmark that imports them."""


def error_of(script: Path) -> str:
    # shardcast.py has the name of a package that it imports.
    safe_path = ["-P"] if script.stem == "shardcast" else []
    found = subprocess.run(
        [sys.executable, *safe_path, script, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return found.stderr if found.returncode else ""


@pytest.mark.integration
@pytest.mark.timeout(900)  # more than 40 processes that import torch
def test_every_benchmark_prints_its_help() -> None:
    scripts = [
        path
        for path in sorted(BENCH.glob("*.py"))
        if "__main__" in path.read_text() and (path.stem not in NEEDED or find_spec(NEEDED[path.stem]))
    ]
    with ThreadPoolExecutor(2) as pool:
        errors = dict(zip((path.name for path in scripts), pool.map(error_of, scripts), strict=True))
    assert {name: error for name, error in errors.items() if error} == {}


def lines_of(script: str, *arguments: object) -> list[dict[str, Any]]:
    """Runs a benchmark on a toy and returns the JSON lines that it prints."""
    run = subprocess.run(
        [sys.executable, BENCH / script, "--device", "cpu", "--shape", "toy", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.integration
@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: pip install 'shoal-rl[lora]'")
def test_one_whole_step_generates_checks_trains_publishes_and_merges() -> None:
    """The rows that version 1 generates after the merge are those that version 1's recomputation finds."""
    lines = lines_of(
        "whole_step.py", "--prompts", 1, "--samples", 2, "--prompt-tokens", 8, "--cap", 8, "--lora", 2
    )
    parts = {line["part"]: line for line in lines if "part" in line}
    assert list(parts) == [
        "weights", "generate", "check", "adapters", "train", "image", "publish", "merge", "again",
    ]  # fmt: skip
    assert parts["generate"]["rows"] == 2 and parts["generate"]["tokens"] > 2
    for part in ("check", "train", "again"):
        assert parts[part]["logprob_gap"] < 1e-4, part
    assert parts["publish"]["changed_words"] > 0
    whole_bytes = 2 * parts["weights"]["parameters"]
    assert 0 < parts["publish"]["bytes"] < whole_bytes / 4


@pytest.mark.integration
def test_the_sharded_path_on_one_rank_gives_the_plain_paths_losses_and_gradients() -> None:
    """By the report's recipe: KL, recomputed log-probs and layers, bfloat16. On a CPU both paths have the same bits."""
    lines = lines_of("sharded.py", "--layers", 1, "--tokens", 64, "--updates", 2, "--every", 1)
    last = lines[-1]
    assert last["loss_gap"] == last["kl_gap"] == 0.0
    assert last["grad_norm_relative_gaps"] == [0.0, 0.0]
    assert last["weights_equal_share"] == 1.0
    assert last["gradient_relative_gap"] == 0.0
    assert [line["sharded"] for line in lines[:-1]].count(True) == 3


@pytest.mark.integration
def test_whole_sites_in_processes_have_equal_states_after_each_round(tmp_path: Path) -> None:
    options = [
        "--peers",
        "2",
        "--every",
        "2",
        "--rounds",
        "2",
        "--mesh",
        "loopback",
        "--json",
        str(tmp_path / "found"),
    ]
    run = subprocess.run(
        [sys.executable, str(BENCH / "diloco.py"), "processes", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    first, second = json.loads((tmp_path / "found").read_text())["rounds"]
    for sites in (first, second):
        assert {one["outcome"] for one in sites} == {"COMMITTED"} and {one["peers"] for one in sites} == {2}
        assert len({one["digest"] for one in sites}) == 1
    assert first[0]["digest"] != second[0]["digest"]


def test_a_published_run_says_what_its_ledger_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The means over problems are those of the coordinator; every accepted token has one fate."""
    monkeypatch.syspath_prepend(str(BENCH))
    from publish import LEDGER, count_tokens, gain, held_out, interval, read_lines

    events = read_lines(BENCH / "results" / "demo" / LEDGER)
    curves = held_out(events)
    told = {
        (one["body"]["task"], one["body"]["version"]): one["body"]["reward_mean"]
        for one in events
        if one["type"] == "evaluation.completed"
    }
    means = {
        (task, version): scores.mean() for task, curve in curves.items() for version, scores in curve.items()
    }
    assert means == pytest.approx(told)
    tokens = count_tokens(events)
    parts = tokens.held_out + tokens.trained + tokens.dropped + tokens.unused
    assert tokens.checked == tokens.generated == pytest.approx(parts, abs=2)
    first, last = curves["sort"][0], curves["sort"][100]
    assert interval(first).high < interval(last).low and gain(first, last).mean == pytest.approx(
        last.mean() - first.mean()
    )
    assert interval((first > 0.5).astype(float)).low > 0


@pytest.mark.integration
def test_versions_are_published_beside_training() -> None:
    """The first of these versions has none before it, and nothing is trained beside the publication of the last."""
    lines = lines_of("step.py", "--tokens", 128, "--warm", 1, "--plain", 1, "--steps", 2, "--states", "int8")
    published = [line for line in lines if "publish_s" in line]
    assert [line["version"] for line in published] == [3, 4]
    assert all(0 < line["bytes"] < 2 * lines[-1]["parameters"] for line in published)
    assert len(lines[-1]["steps_s_with"]) == 2 and [len(one) for one in lines[-1]["steps_s_without"]] == [
        2,
        1,
    ]


@pytest.mark.integration
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_pictures_of_the_reproduction_page_can_be_drawn_again(tmp_path: Path) -> None:
    """`make figures` needs only what bench/results has."""
    page = (BENCH.parent / "docs" / "reproduction.md").read_text()
    wanted = set(re.findall(r"\(img/([\w.-]+\.png)\)", page))
    run = subprocess.run(
        [sys.executable, str(BENCH / "figures.py"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert wanted and wanted == {path.name for path in tmp_path.iterdir()}
    counts = re.findall(
        r"^  (?:generated|held out|trained|dropped|unused) +([\d,]+)", run.stdout, re.MULTILINE
    )
    assert counts
    for count in counts:
        assert count in page, f"{count} output tokens are not in docs/reproduction.md"
    assert all((BENCH.parent / "docs" / "img" / name).is_file() for name in wanted)
