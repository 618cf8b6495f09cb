"""Started by test_trainer_kill.py: kills trainers with SIGKILL at chosen points, resumes each, and compares what was announced.

Points are the calls that change a file's name, flush one, make a step, or announce a version: before each and after it. The
parent serves the coordinator and never trains itself, because torch's gradients do not work in a process that was forked from
one that has computed some.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_coordinator import SmallCoordinator

from shoal.trainer.config import TrainerConfig
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io.publisher import OriginAddress, Publisher
from shoal.trainer.loop import TrainerSite, run_trainer

LAST_VERSION = 3
CONFIG = TrainerConfig(learning_rate=1e-3, row_tokens=32, rows_per_micro_batch=4)


class Killer:
    """Counts points in all threads, and kills this process at number `at`; 0 only counts."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self._lock = at, 0, threading.Lock()

    def point(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **keys: Any) -> Any:
            self.point()
            result = real(*arguments, **keys)
            self.point()
            return result

        setattr(owner, name, call)


def train(coordinator: SmallCoordinator, folder: Path, minutes: float, killer: Killer | None) -> None:
    """Runs a trainer to the end of the run, or until it is killed."""
    if killer is not None:
        for owner, name in (
            (os, "rename"),
            (os, "replace"),
            (os, "fsync"),
            (Path, "rename"),
            (shutil, "rmtree"),
            (Lockstep, "step"),
            (Publisher, "serve"),
            (Publisher, "announce"),
        ):
            killer.around(owner, name)
    site = TrainerSite(
        folder=folder,
        model="tiny",
        coordinator_url=coordinator.url,
        key=coordinator.trainer_key,
        run_key=coordinator.run_key,
        address=OriginAddress(),
        deadline_s=60.0,
    )
    config = CONFIG.model_copy(update={"checkpoint_minutes": minutes})
    run_trainer(config, site, stop=threading.Event())


def in_child(action: Callable[[], None]) -> int:
    """Forks a process that runs `action`; returns its exit status, or the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001 - this process ends here, whatever it is
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def run_killed(at: int, minutes: float, scratch: Path) -> dict[str, Any]:
    """Kills a run at point `at` and finishes it with a second process; at 0 counts the points of a whole run."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    with SmallCoordinator(last_version=LAST_VERSION).serving() as coordinator:

        def first() -> None:
            killer = Killer(at)
            train(coordinator, folder, minutes, killer)
            (folder / "count").write_text(str(killer.count))

        ended = in_child(first)
        announced = sorted(coordinator.digests())
        if ended == signal.SIGKILL:
            ended = in_child(lambda: train(coordinator, folder, minutes, None))
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found = {
            "at": at,
            "ended": ended,
            "announced_before": announced,
            "digests": {str(version): digest for version, digest in coordinator.digests().items()},
            "steps": sorted(event["version"] for event in events if event["event"] == "step"),
            "differing": sum(one.rederived.differing_words for one in coordinator.announced if one.rederived),
            "points": int((folder / "count").read_text()) if (folder / "count").exists() else 0,
        }
    shutil.rmtree(folder)
    return found


def main(scratch: str, minutes: str, every: str) -> None:
    torch.set_num_threads(1)
    results = [run_killed(0, float(minutes), Path(scratch))]
    for at in range(1, results[0]["points"] + 1, int(every)):
        results.append(run_killed(at, float(minutes), Path(scratch)))
    (Path(scratch) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
