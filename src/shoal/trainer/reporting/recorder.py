"""Writes steps, warnings and held-out results to the metrics, each once, and measures when training stood still."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.telemetry import Log, Metrics
from shoal.wire.messages import Stats, StepReport, TaskFigures


@dataclass(slots=True)
class ExposedTime:
    """Seconds that training stood still since the last report, by cause."""

    publish_s: float = 0.0
    checkpoint_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.publish_s + self.checkpoint_s

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Adds the seconds of the block to those of publications."""
        started_s = time.monotonic()
        yield
        self.publish_s += time.monotonic() - started_s

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Adds the seconds of the block to those of checkpoints."""
        started_s = time.monotonic()
        yield
        self.checkpoint_s += time.monotonic() - started_s


class StepRecorder:
    """Writes what a run reports to its metrics, without what a process before this one has written."""

    def __init__(self, path: Path, metrics: Metrics, client: SignedClient, log: Log) -> None:
        self._metrics, self._client, self._log = metrics, client, log
        self._last_step = max((one["version"] for one in written_events(path, "step")), default=0)
        self.evaluated = {
            (one["version"], str(one.get("task", ""))) for one in written_events(path, "evaluation")
        }
        """Versions and labels whose held-out results are in the metrics."""

    def record(self, report: StepReport) -> None:
        """Writes a step and its warnings, and held-out results that are new."""
        if report.version <= self._last_step:
            return
        self._last_step = report.version
        own = flat_figures(report.tasks) if len(report.tasks) > 1 else {}
        self._metrics.write("step", **report.model_dump(exclude={"warnings", "tasks"}), **own)
        for warning in report.warnings:
            kind, _, sentence = warning.partition(": ")
            self._log.warning(sentence, version=report.version, kind=kind)
            self._metrics.write("warning", version=report.version, kind=kind, sentence=sentence)
        self.write_evaluations()

    def has_all(self, version: int, titles: Iterable[str]) -> bool:
        """Returns whether the results of these evaluations of a version are in the metrics."""
        return all((version, title) in self.evaluated for title in titles)

    def write_evaluations(self) -> None:
        """Adds new held-out results to the metrics: those of evaluations that were completed since the last call."""
        try:
            known = self._client.call("GET", "/v1/stats", None, Stats).evaluations
        except (Refused, Unreachable):
            return  # the next version asks again
        for one in known:
            if one.complete and (one.version, one.task) not in self.evaluated:
                self.evaluated.add((one.version, one.task))
                figures = {
                    "held_out_reward": one.reward_mean,
                    "held_out_rollouts": one.rollouts,
                    "held_out_answer_tokens": one.answer_tokens_mean,
                    "held_out_pass_at_1": one.pass_at_1,
                    "held_out_pass_at_k": one.pass_at_k,
                    "held_out_majority": one.majority,
                }
                # With one evaluation the names are plain, so that plots of other runs fit.
                several = len({other.task for other in known}) > 1
                names = {f"{name}/{one.task}" if several else name: value for name, value in figures.items()}
                self._metrics.write("evaluation", version=one.version, task=one.task, **names)


def flat_figures(tasks: Mapping[str, TaskFigures]) -> dict[str, float | int]:
    """Returns the figures of a step's tasks as `reward_mean/LABEL` and so on, without those that are unknown."""
    return {
        f"{name}/{title}": value
        for title, figures in tasks.items()
        for name, value in figures.model_dump().items()
        if value is not None
    }


def written_events(metrics: Path, event: str) -> list[dict[str, Any]]:
    """Returns the events of one kind in a metrics.jsonl that have a version, so that a resumed run does not repeat them."""
    found: list[dict[str, Any]] = []
    if not metrics.exists():
        return found
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if f'"{event}"' in line:
                with suppress(ValueError, KeyError):  # a kill may have cut the last line
                    values = json.loads(line)
                    if values["event"] == event and isinstance(values["version"], int):
                        found.append(values)
    return found
