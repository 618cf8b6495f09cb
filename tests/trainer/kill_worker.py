"""Started by test_trainer_kill.py: kills trainers with SIGKILL at chosen points, resumes each, and compares what was announced.

Points are the calls that create, write, link, rename, flush or delete a file or folder, update weights, make a step, serve or
announce a version: before each and after it. Also the middle of every file of a checkpoint and of a version, half of which is then
on the disk. The parent serves the coordinator and never trains itself, because torch's gradients do not work in a process that was forked from
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

from forked import in_child
from shoal.shardcast.file_image import FileImage
from shoal.trainer.config import TrainerConfig
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io import checkpoint
from shoal.trainer.io.publisher import Publisher
from shoal.trainer.loop import run_trainer

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

    def inside(self, owner: Any, name: str, path_argument: int) -> None:
        """Adds points around a function that writes a file, and one at which only half of the file is written."""
        real: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **keys: Any) -> Any:
            self.point()
            result = real(*arguments, **keys)
            path = Path(arguments[path_argument])
            os.truncate(path, path.stat().st_size // 2)
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
            (os, "link"),
            (os, "symlink"),
            (os, "mkdir"),
            (os, "unlink"),
            (Path, "rename"),
            (Path, "write_text"),
            (shutil, "rmtree"),
            (shutil, "copyfile"),
            (torch.optim.AdamW, "step"),
            (Lockstep, "step"),
            (Publisher, "serve"),
            (Publisher, "announce"),
        ):
            killer.around(owner, name)
        killer.inside(checkpoint, "save_file", 1)
        killer.inside(torch, "save", 1)
        killer.inside(FileImage, "write", 1)
    site = coordinator.site(folder, deadline_s=60.0)
    config = CONFIG.model_copy(update={"checkpoint_minutes": minutes})
    run_trainer(config, site, stop=threading.Event())


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
            "checkpoints": sorted(path.name for path in (folder / "checkpoints").iterdir()),
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
