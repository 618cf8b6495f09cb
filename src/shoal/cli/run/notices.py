"""Warnings in the logs of a run's roles, for the terminal, the page and the report.

`shoal run` follows the logs of the processes that it started and says each kind of warning once. It also writes them, and
restarts, to the coordinator's folder, from where they reach the page.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.cli.ui.view import duration
from shoal.files import write_bytes_atomically
from shoal.swarm.coordinator.config import NAMES_FILE, NOTICES_FILE
from shoal.wire.messages import RunWarning, Stats

FOLLOWED = ("coordinator", "trainer", "validator")
"""Roles whose warnings concern the owner of the run. Those of workers and relays are mostly about retries."""
_HELD_BACK = "waiting for a lease: leases of "
"""How a worker says that it gets no lease because too many of its leases ended without valid work: the run may stand still."""
MAX_BYTES = 1 << 20
"""Most bytes of a log that are read at a time."""
_LINE = re.compile(
    r"^\d\d:\d\d:\d\d (?:[WE]|I(?= \w+ +waiting for (?:disk space|a lease: leases of ))) \w+ +(.*)$"
)
"""Waits are no warnings, except those that may last until somebody acts: for disk space, and _HELD_BACK."""
_SAID_ELSEWHERE = re.compile(
    r"reject\.|node (quarantined|ejected)|refused:|signed requests for any host|the verdict came too late|.* kind=[a-z-]+$"
)
"""Warnings that the view says in other words, or that are normal on one machine."""
_TRAINING = re.compile(r"\S+ I trainer +training  version=(\d+) micro_batches=(\d+)/(\d+) left_s=(\d+)$")
"""How far a long step of the trainer is (trainer/optim/learner.py)."""
_VALUES = re.compile(r"  [a-z_]+=.*$")


class LogFollower:
    """Finds new warnings in the logs of a folder."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        # A resumed run says only what is new.
        self._read: dict[Path, int] = {path: path.stat().st_size for path in logs.glob("*.log")}
        self._reported: set[tuple[str, str]] = set()
        self._training = ("", "")
        """What the trainer trains, as in `Stats.waiting_for`, and how far it is."""

    def with_progress(self, stats: Stats) -> Stats:
        """Returns the stats with the trainer's progress, if the run is waiting for it."""
        waits_for, progress = self._training
        if stats.waiting_for != waits_for:
            return stats
        return stats.model_copy(update={"waiting_for": f"{waits_for} ({progress})"})

    def new_warnings(self) -> list[str]:
        """Returns a sentence for each kind of warning that appeared for the first time since the last call."""
        sentences = []
        for path in sorted(self._logs.glob("*.log")):
            followed = path.name.startswith(FOLLOWED)
            if not followed and not path.name.startswith("worker"):
                continue
            for message in self._new_messages(path):
                if not followed and not message.startswith(_HELD_BACK):
                    continue
                kind = (path.stem, re.sub(r"[0-9a-f]{6,}|\d+(\.\d+)?", "", message))
                if kind not in self._reported:
                    self._reported.add(kind)
                    sentences.append(f"warning, {path.stem}: {message} (log: {path})")
        return sentences

    def _new_messages(self, path: Path) -> Iterable[str]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read(MAX_BYTES)
        complete = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(complete)
        for line in complete.decode(errors="replace").splitlines():
            if training := _TRAINING.match(line):
                version, done, num, left_s = training.groups()
                progress = f"{done} of {num} micro-batches, about {duration(float(left_s))} left"
                self._training = f"the trainer: it is training version {version}", progress
            found = _LINE.match(line)
            if found and not _SAID_ELSEWHERE.match(found[1]):
                yield _VALUES.sub("", found[1])


class NoticeFiles:
    """Writes notices and the workers' names to the coordinator's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, str] = {}

    def add(self, sentence: str) -> None:
        """Appends one notice."""
        notice = RunWarning(source="shoal run", text=sentence, time_s=round(time.time(), 1))
        with (self._folder / NOTICES_FILE).open("a", encoding="utf-8") as file:
            file.write(notice.model_dump_json() + "\n")

    def set_names(self, names: Mapping[str, str]) -> None:
        """Writes the names of workers by node id, if they changed."""
        if dict(names) != self._names:
            self._names = dict(names)
            text = json.dumps(self._names)
            write_bytes_atomically(self._folder / NAMES_FILE, text.encode(), durable=False)
