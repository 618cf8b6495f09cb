"""Writes steps, warnings and held-out results to the metrics, each once, and measures when training stood still."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.telemetry import Log, Metrics
from shoal.wire.messages import Stats, StepReport


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
        self._last_step = max(written_versions(path, "step"), default=0)
        self.evaluated = written_versions(path, "evaluation")
        """Versions whose held-out results are in the metrics."""

    def record(self, report: StepReport) -> None:
        """Writes a step and its warnings, and held-out results that are new."""
        if report.version <= self._last_step:
            return
        self._last_step = report.version
        self._metrics.write("step", **report.model_dump(exclude={"warnings"}))
        for warning in report.warnings:
            kind, _, sentence = warning.partition(": ")
            self._log.warning(sentence, version=report.version, kind=kind)
            self._metrics.write("warning", version=report.version, kind=kind, sentence=sentence)
        self.write_evaluations()

    def write_evaluations(self) -> None:
        """Writes held-out results to the metrics that the coordinator has completed since the last call."""
        try:
            known = self._client.call("GET", "/v1/stats", None, Stats).evaluations
        except (Refused, Unreachable):
            return  # the next version asks again
        for one in known:
            if one.complete and one.version not in self.evaluated:
                self.evaluated.add(one.version)
                self._metrics.write(
                    "evaluation",
                    version=one.version,
                    held_out_reward=one.reward_mean,
                    held_out_rollouts=one.rollouts,
                    held_out_answer_tokens=one.answer_tokens_mean,
                )


def written_versions(metrics: Path, event: str) -> set[int]:
    """Returns the versions with an event of this kind in a metrics.jsonl, so that a resumed run does not repeat them."""
    found: set[int] = set()
    if not metrics.exists():
        return found
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if f'"{event}"' in line:
                with suppress(ValueError, KeyError):  # a kill may have cut the last line
                    values = json.loads(line)
                    if values["event"] == event:
                        found.add(int(values["version"]))
    return found
