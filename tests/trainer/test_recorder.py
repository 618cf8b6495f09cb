"""What the trainer writes to the metrics about tasks and evaluations, each once."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from shoal.telemetry import Log, Metrics
from shoal.trainer.reporting.recorder import StepRecorder, flat_figures
from shoal.wire.messages import Evaluation, TaskFigures


def evaluation(version: int, task: str, *, complete: bool = True) -> Evaluation:
    return Evaluation(
        version=version,
        task=task,
        reward_mean=0.5,
        rollouts=8,
        complete=complete,
        samples=4,
        pass_at_1=0.25,
        pass_at_k=0.75,
        majority=0.5,
    )


@contextmanager
def recorder(path: Path, known: list[Evaluation]) -> Iterator[StepRecorder]:
    client = SimpleNamespace(call=lambda *asked: SimpleNamespace(evaluations=tuple(known)))
    with closing(Metrics(path)) as metrics:
        yield StepRecorder(path, metrics, cast(Any, client), Log("test"))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_evaluation_is_written_once_and_under_its_label(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    known = [evaluation(2, "cold"), evaluation(2, "sort", complete=False)]
    with recorder(path, known) as first:
        first.write_evaluations()
        assert not first.has_all(2, ["cold", "sort"])
        known[1] = evaluation(2, "sort")
        first.write_evaluations()
        first.write_evaluations()
        assert first.has_all(2, ["cold", "sort"])
    events = written(path)
    assert [(event["version"], event["task"]) for event in events] == [(2, "cold"), (2, "sort")]
    assert events[0]["held_out_pass_at_k/cold"] == 0.75
    with recorder(path, known) as resumed:
        resumed.write_evaluations()
    assert len(written(path)) == 2, "a resumed trainer repeats nothing"


def test_a_single_evaluation_has_plain_names(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with recorder(path, [evaluation(0, "sort")]) as single:
        single.write_evaluations()
    (event,) = written(path)
    assert (event["held_out_reward"], event["held_out_majority"]) == (0.5, 0.5)


def test_figures_of_tasks_have_their_labels() -> None:
    none = TaskFigures(
        groups=0,
        reward_mean=None,
        accepted_groups=3,
        accepted_rollouts=12,
        accepted_reward_mean=0.0,
        dropped_groups=3,
    )
    flat = flat_figures({"sums": none})
    assert flat["accepted_rollouts/sums"] == 12
    assert "reward_mean/sums" not in flat, "an unknown mean is left out"
