"""Snapshots of a learner in host memory, and checkpoints that survive a crash at any moment.

    checkpoints/v000007/weights.safetensors   fp32 master weights            } written by a single process
                        optimizer.pt          AdamW moments, random state    }
                        state.json            version, and the report of the step that made it
                        manifest.json         size and BLAKE3 of each of the above; written last

With several ranks, each writes its own shards of weights and moments with torch.distributed.checkpoint: the folder
`shards/` replaces weights.safetensors, and optimizer.pt has no moments. Both layouts can be loaded by any number of ranks.

A checkpoint is written and flushed in a hidden folder, which is then renamed: it is complete or absent. On start, a folder
whose files do not match its manifest is skipped with a warning, and the one before it is used. docs/trainer.md has the
format.

Copying to host memory and writing happen in a thread: `Checkpoints.begin` returns at once, `wait_for_copy` returns when the
weights may change, `finish` when the checkpoint is on disk. Versions are published before they are covered by a checkpoint:
after a crash the versions since the last checkpoint are made again from the same batches (loop._TrainerRun._catch_up).
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.tensor import DTensor

from shoal.background import BackgroundTask
from shoal.diloco.ranks import Ranks
from shoal.files import DiskFull, explain_full_disk, flush_folder, replace_folder, restore_disk_error
from shoal.shardcast.manifest_files import hash_file
from shoal.telemetry import Log
from shoal.trainer.io.background_save import BackgroundSave
from shoal.trainer.io.weights_diff import on_stream
from shoal.trainer.optim.compact_adamw import decode_moment
from shoal.trainer.optim.learner import Learner
from shoal.wire.codes import Rejected
from shoal.wire.messages import StepReport
from shoal.wire.record import Record

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.pt"
STATE = "state.json"
SHARDS = "shards"
MANIFEST = "manifest.json"
Format = Literal["shoal/checkpoint/1", "shoal/sharded-checkpoint/1"]
MOMENTS = ("exp_avg", "exp_avg_sq")
DISK_REMEDY = "free some space there or use a larger disk, then start the trainer again: it continues from the last checkpoint"
_FOLDER = re.compile(r"v(\d{6,})")


class CheckpointState(Record):
    """The contents of state.json."""

    version: int
    report: StepReport | None
    """The report of the step that made this version; None for version 0. An announcement is repeated with it."""


class FileDigest(Record):
    """One line of a checkpoint's manifest."""

    name: str
    num_bytes: int
    blake3: str


class CheckpointManifest(Record):
    """The contents of manifest.json."""

    format: str
    files: tuple[FileDigest, ...]


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete or changed; the message says which file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint whose digests were checked."""

    folder: Path
    format: Format
    state: CheckpointState


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSnapshot:
    """A learner's state at one version, in host memory."""

    version: int
    weights: dict[str, Tensor]
    """Whole trained weights by name, float32; on rank 0 only, and empty if the ranks write shards."""
    optimizer: dict[str, Any]
    """torch's own state_dict. With several ranks without the moments, which are in the shards."""
    random: dict[str, Tensor]
    outer: dict[str, Any] | None = None
    """The state that is shared with other sites, if there are any (sites.Sites)."""
    saving: BackgroundTask[None] | None = None
    """With several ranks: the thread that writes this rank's shards."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that this process writes, without the shards of several ranks."""
        states: Iterable[dict[str, Tensor]] = self.optimizer["state"].values()
        moments = sum(tensor.nbytes for state in states for tensor in state.values())
        return moments + sum(weight.nbytes for weight in self.weights.values())


def take_snapshot(
    learner: Learner, shard_folder: Path | None = None, after: "torch.cuda.Event | None" = None
) -> LearnerSnapshot:
    """Copies what a later process needs to host memory. All ranks must call it.

    With several ranks and a `shard_folder`, it also starts a thread that writes this rank's shards to that folder. On a GPU
    the copies have their own stream, which begins after the event `after`.
    """
    ranks = learner.ranks
    stream = torch.cuda.Stream(learner.device) if after is not None else None
    with on_stream(stream, after):
        optimizer = learner.optimizer.state_dict()
        optimizer["state"] = {
            index: {
                name: tensor.to("cpu", copy=True)
                for name, tensor in state.items()
                if ranks.size == 1 or name == "step"
            }
            for index, state in optimizer["state"].items()
        }
        random = {"cpu": torch.get_rng_state()}
        if learner.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(learner.device)
        saving = None
        if ranks.size > 1 and shard_folder is not None:
            shards = {name: one.detach().to("cpu", copy=True) for name, one in _tensors(learner).items()}
            saving = BackgroundTask("checkpoint-shards", partial(_write_shards, shards, shard_folder, ranks))
        weights = (
            {name: ranks.gather(one) for name, one in learner.trained_parameters().items()}
            if saving is None
            else {}
        )
    return LearnerSnapshot(
        version=learner.version,
        weights=weights,
        optimizer=optimizer,
        random=random,
        outer=None if learner.sites is None else learner.sites.state_dict(),
        saving=saving,
    )


class Checkpoints(BackgroundSave[LearnerSnapshot]):
    """Writes checkpoints of one run in the background and keeps the newest `keep`. Used on rank 0 only."""

    def __init__(self, folder: Path, *, keep: int, log: Log) -> None:
        super().__init__("checkpoint", f"to be written to {folder}")
        self._folder = folder
        self._keep = keep
        self._log = log
        self.covered: int | None = None
        """The newest version that is on disk, as far as this process knows."""
        folder.mkdir(parents=True, exist_ok=True)

    def shard_folder(self, version: int) -> Path:
        """Creates the hidden folder of a new checkpoint and returns where the ranks write their shards."""
        partial_folder = self._partial(version)
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir()
        return partial_folder / SHARDS

    def begin(self, version: int, take: Callable[[], LearnerSnapshot], report: StepReport | None) -> None:
        """Starts to copy and write a checkpoint. The one before must be finished."""
        state = CheckpointState(version=version, report=report)
        self.start(version, take, lambda snapshot: self._write(snapshot, state))

    def newest(self) -> Checkpoint | None:
        """Returns the newest checkpoint whose digests match, or None. Each damaged one is named in the log and skipped.

        Raises ValueError for a checkpoint in a format that this release does not read.
        """
        for version in sorted(self._versions(), reverse=True):
            folder = self._folder / f"v{version:06d}"
            try:
                found = _verify(folder, version)
                self.covered = found.state.version
                self._delete_older()  # the process before was killed before it did, and a finished run saves no other
                return found
            except DamagedCheckpoint as damaged:
                self._log.warning("damaged checkpoint skipped", checkpoint=folder, reason=damaged)
        return None

    def _write(self, snapshot: LearnerSnapshot, state: CheckpointState) -> None:
        partial_folder, final = self._partial(state.version), self._folder / f"v{state.version:06d}"
        # A process that was killed while it wrote a checkpoint leaves a folder of another version than its successor writes.
        for unfinished in set(self._folder.glob(".v*.partial")) - {partial_folder}:
            shutil.rmtree(unfinished, ignore_errors=True)
        try:
            with explain_full_disk(self._folder, remedy=DISK_REMEDY):
                if snapshot.saving is None:
                    shutil.rmtree(partial_folder, ignore_errors=True)
                    partial_folder.mkdir()
                else:
                    snapshot.saving.wait()
                    snapshot.saving.result()
                free = shutil.disk_usage(self._folder).free
                if free < snapshot.num_bytes:  # found before anything is written
                    raise DiskFull(
                        errno.ENOSPC,
                        f"a checkpoint in {self._folder} needs {snapshot.num_bytes / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free; "
                        f"{DISK_REMEDY}",
                    )
                _write_files(partial_folder, snapshot, state)
        except DiskFull:
            # The other processes of the run need the space.
            shutil.rmtree(partial_folder, ignore_errors=True)
            raise
        # A sound checkpoint of this version would have been resumed from, so what is here is damaged.
        shutil.rmtree(final, ignore_errors=True)
        replace_folder(partial_folder, final)
        self.covered = state.version
        # Checkpoints newer than the one just saved are damaged, or the run would have continued from them.
        for version in self._versions():
            if version > state.version:
                shutil.rmtree(self._folder / f"v{version:06d}")
        self._delete_older()

    def _delete_older(self) -> None:
        """Deletes all but the newest `keep` of the checkpoints up to the one that is known to be sound."""
        assert self.covered is not None, "no checkpoint is known to be sound"
        older = sorted((version for version in self._versions() if version <= self.covered), reverse=True)
        for version in older[self._keep :]:
            shutil.rmtree(self._folder / f"v{version:06d}")

    def _partial(self, version: int) -> Path:
        return self._folder / f".v{version:06d}.partial"

    def _versions(self) -> list[int]:
        matches = (_FOLDER.fullmatch(path.name) for path in self._folder.iterdir())
        return [int(match[1]) for match in matches if match]


def _tensors(learner: Learner) -> dict[str, Tensor]:
    """Returns this rank's shards of weights and moments in float32, as KIND.PARAMETER.

    Before the first step AdamW has no moments; zeros are equal to that, and every checkpoint has the same names.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in learner.trained_parameters().items():
        found[f"weights.{name}"] = parameter
        state = learner.optimizer.state.get(parameter, {})
        for moment in MOMENTS:
            found[f"{moment}.{name}"] = _moment(parameter, state, moment)
    return found


def _moment(parameter: Tensor, state: dict[str, Tensor], moment: str) -> Tensor:
    if moment in state:
        return state[moment]
    if "mean_codes" not in state:
        return torch.zeros_like(parameter, requires_grad=False)
    if not isinstance(parameter, DTensor):
        return decode_moment(state, moment, parameter.shape)
    local = decode_moment(state, moment, parameter.to_local().shape)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _write_shards(shards: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Writes this rank's shards together with the other ranks. `folder` must be on a disk that all ranks share."""
    try:
        save_sharded(shards, checkpoint_id=folder, process_group=ranks.checkpoints)
    except CheckpointException as error:  # a BaseException, which names the first error of each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        what = f"rank {rank} cannot write its shards to {folder}: {cause}"
        if isinstance(cause, OSError):
            raise OSError(cause.errno, what) from error
        with restore_disk_error(folder, RuntimeError):
            raise RuntimeError(what) from error


def _write_files(folder: Path, snapshot: LearnerSnapshot, state: CheckpointState) -> None:
    """Writes the files of rank 0 and flushes them; the manifest is last."""
    if snapshot.saving is None:
        with restore_disk_error(folder / WEIGHTS, SafetensorError):
            save_file(snapshot.weights, folder / WEIGHTS)
    stored: dict[str, Any] = {"optimizer": snapshot.optimizer, "rng": snapshot.random["cpu"]}
    if "cuda" in snapshot.random:
        stored["cuda_rng"] = snapshot.random["cuda"]
    if snapshot.outer is not None:
        stored["outer"] = snapshot.outer
    with restore_disk_error(folder / OPTIMIZER, RuntimeError):
        torch.save(stored, folder / OPTIMIZER)
    (folder / STATE).write_text(state.model_dump_json(indent=1))
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if snapshot.saving is not None:
        _check_all_shards(folder, names)
    for name in names:
        _flush_file(folder / name)
    kind: Format = "shoal/checkpoint/1" if snapshot.saving is None else "shoal/sharded-checkpoint/1"
    manifest = CheckpointManifest(format=kind, files=tuple(_digest(folder, name) for name in names))
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    _flush_file(folder / MANIFEST)
    flush_folder(folder)


def _check_all_shards(folder: Path, names: Iterable[str]) -> None:
    """Raises ValueError if rank 0 does not see a file that another rank wrote."""
    metadata = FileSystemReader(folder / SHARDS).read_metadata()
    written = {f"{SHARDS}/{place.relative_path}" for place in metadata.storage_data.values()}
    if missing := sorted(written - set(names)):
        raise ValueError(
            f"rank 0 does not see {missing[0]} in {folder}, which another rank wrote; "
            "with ranks on several machines, --dir must be on a disk that all of them share"
        )


def _verify(folder: Path, version: int) -> Checkpoint:
    """Compares every file with the manifest. Raises DamagedCheckpoint if one is missing or differs."""
    try:
        manifest = CheckpointManifest.parse((folder / MANIFEST).read_bytes())
        if manifest.format not in get_args(Format):
            raise ValueError(
                f"{folder} has checkpoint format {manifest.format!r}, this release reads {', '.join(get_args(Format))}; "
                "continue with the release that wrote it, or start a new run in another folder"
            )
        weights = WEIGHTS if manifest.format == "shoal/checkpoint/1" else f"{SHARDS}/.metadata"
        names = {entry.name for entry in manifest.files}
        if missing := {weights, OPTIMIZER, STATE} - names:
            raise DamagedCheckpoint(f"its manifest does not name {', '.join(sorted(missing))}")
        for entry in manifest.files:
            if not (folder / entry.name).is_file():
                raise DamagedCheckpoint(f"{entry.name} is missing")
            if _digest(folder, entry.name) != entry:
                raise DamagedCheckpoint(f"{entry.name} does not match the manifest")
        state = CheckpointState.parse((folder / STATE).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST} is missing") from None
    except Rejected as error:
        raise DamagedCheckpoint(error.detail) from None
    if state.version != version:
        raise DamagedCheckpoint(f"it holds version {state.version}")
    checked: Format = manifest.format  # type: ignore[assignment]  # checked above
    return Checkpoint(folder, checked, state)


def _digest(folder: Path, name: str) -> FileDigest:
    # Not mapped: the pages of the file would count as this process's memory, beside the copy that was written to it.
    digest = hash_file(folder / name)
    return FileDigest(name=name, num_bytes=(folder / name).stat().st_size, blake3=digest)


def _flush_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
