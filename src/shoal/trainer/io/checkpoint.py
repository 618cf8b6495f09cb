"""Checkpoints that survive a crash at any moment: a folder is complete, or it does not exist.

    checkpoints/v000007/weights.safetensors   fp32 master weights
                        optimizer.pt          AdamW moments, the random state, what is shared with other sites
                        state.json            version, and the report of the step that made it
                        manifest.json         BLAKE3 of each of the above; written last

All of it is written and synced in a hidden folder, which is then renamed. A folder whose digests do not fit its
manifest is passed over with a warning, and the one before it is taken. docs/trainer.md has the format.

Writing goes on in a thread: `begin` returns at once, `finish` when the checkpoint is on the disk. Nothing that others can
see of a version may happen before its `finish`.
"""

import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from shoal.model.weights import disk_errors
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log
from shoal.trainer.io.weight_snapshot import Capture, take, trained
from shoal.trainer.optim.learner import Learner
from shoal.wire.codes import Rejected
from shoal.wire.messages import StepReport
from shoal.wire.record import Record

FileName = Literal["weights.safetensors", "optimizer.pt", "state.json"]
WEIGHTS: FileName = "weights.safetensors"
OPTIMIZER: FileName = "optimizer.pt"
STATE: FileName = "state.json"
FILES: tuple[FileName, ...] = (WEIGHTS, OPTIMIZER, STATE)
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"v(\d{6,})")


class State(Record):
    version: int
    report: StepReport | None
    """Of the step that made this version; None for version 0. Kept so that an announcement can be repeated."""


class FileDigest(Record):
    name: FileName
    num_bytes: int
    blake3: str


class CheckpointManifest(Record):
    format: Literal["shoal/checkpoint/1"]
    files: tuple[FileDigest, ...]


class Damaged(Exception):
    """A checkpoint that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: every digest was checked."""

    folder: Path
    state: State


class Checkpoints:
    """The newest `keep` checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, log: Log) -> None:
        self._folder = folder
        self._keep = keep
        self._log = log
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, capture: Capture, report: StepReport | None) -> None:
        """Start to write a version; the one before must be finished. `finish` says how it went."""
        assert self._writing is None, "finish the checkpoint before"
        self._writing = self._writer.submit(
            self._write, capture, State(version=capture.version, report=report)
        )

    def finish(self, deadline_s: float) -> None:
        """Wait until what `begin` began is on the disk; older ones may be gone then."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result(deadline_s)
        except TimeoutError:
            raise DeadlinePassed(
                f"waited {deadline_s:.0f} s for a checkpoint to be written to {self._folder}; is that disk slow or full?"
            ) from None

    def save(self, learner: Learner, report: StepReport | None, deadline_s: float = 900.0) -> None:
        """Write the learner's version and wait for it."""
        self.begin(take(learner), report)
        self.finish(deadline_s)

    def close(self) -> None:
        """Let a checkpoint that is being written be finished."""
        self._writer.shutdown()

    def _write(self, capture: Capture, state: State) -> None:
        partial = self._folder / f".v{state.version:06d}.partial"
        final = self._folder / f"v{state.version:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write_files(partial, capture, state)
        # Only a damaged checkpoint can stand here: a sound one would have been resumed from.
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        _sync(self._folder)
        self._drop_others(state.version)

    def newest(self) -> Checkpoint | None:
        """The newest one whose digests fit. Each damaged one that is passed over is named in the log."""
        for version in sorted(self._versions(), reverse=True):
            folder = self._folder / f"v{version:06d}"
            try:
                return Checkpoint(folder, _verify(folder, version))
            except Damaged as damaged:
                self._log.warning("checkpoint passed over", checkpoint=folder, reason=damaged)
        return None

    def _versions(self) -> list[int]:
        matches = (_FOLDER.fullmatch(path.name) for path in self._folder.iterdir())
        return [int(match[1]) for match in matches if match]

    def _drop_others(self, saved: int) -> None:
        # What is newer than a version just saved is damaged, else the run would have gone on from it.
        older = sorted((version for version in self._versions() if version <= saved), reverse=True)
        for version in set(self._versions()) - set(older[: self._keep]):
            shutil.rmtree(self._folder / f"v{version:06d}")


def read_capture(checkpoint: Checkpoint, learner: Learner) -> Capture:
    """What a checkpoint holds; ValueError if it is not for a learner of this shape."""
    weights = load_file(checkpoint.folder / WEIGHTS)
    own = trained(learner)
    if weights.keys() != own.keys() or any(weights[name].shape != own[name].shape for name in own):
        raise ValueError(
            f"{checkpoint.folder} holds another model than the run file names; "
            "give the run another folder, or name the model (and lora_rank) it was started with"
        )
    kept = torch.load(checkpoint.folder / OPTIMIZER, map_location="cpu", weights_only=True)
    random = {"cpu": kept["rng"]} | ({"cuda": kept["cuda_rng"]} if "cuda_rng" in kept else {})
    return Capture(
        version=checkpoint.state.version,
        weights=weights,
        optimizer=kept["optimizer"],
        random=random,
        outer=kept.get("outer"),
    )


def _write_files(folder: Path, capture: Capture, state: State) -> None:
    with disk_errors(folder / WEIGHTS):
        save_file(capture.weights, folder / WEIGHTS)
    random = {"rng": capture.random["cpu"]}
    if "cuda" in capture.random:
        random["cuda_rng"] = capture.random["cuda"]
    outer = {} if capture.outer is None else {"outer": capture.outer}
    with disk_errors(folder / OPTIMIZER):
        torch.save({"optimizer": capture.optimizer, **random, **outer}, folder / OPTIMIZER)
    (folder / STATE).write_text(state.model_dump_json(indent=1))
    for name in FILES:
        _sync(folder / name)
    manifest = CheckpointManifest(
        format="shoal/checkpoint/1",
        files=tuple(_digest(folder, name) for name in FILES),
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    _sync(folder / MANIFEST)
    _sync(folder)


def _verify(folder: Path, version: int) -> State:
    if missing := [name for name in (*FILES, MANIFEST) if not (folder / name).is_file()]:
        raise Damaged(f"{', '.join(missing)} is missing")
    try:
        manifest = CheckpointManifest.parse((folder / MANIFEST).read_bytes())
        if {entry.name for entry in manifest.files} != set(FILES):
            raise Damaged(f"its manifest names {[entry.name for entry in manifest.files]}")
        for entry in manifest.files:
            if _digest(folder, entry.name) != entry:
                raise Damaged(f"{entry.name} is not what the manifest says")
        state = State.parse((folder / STATE).read_bytes())
    except Rejected as error:
        raise Damaged(error.detail) from None
    if state.version != version:
        raise Damaged(f"it holds version {state.version}")
    return state


def _digest(folder: Path, name: FileName) -> FileDigest:
    path = folder / name
    digest = blake3()
    digest.update_mmap(path)
    return FileDigest(name=name, num_bytes=path.stat().st_size, blake3=digest.hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
