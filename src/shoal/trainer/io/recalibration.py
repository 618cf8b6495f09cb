"""Repeats the calibration of a run: at versions 4, 8, 16, ..., when the weights have moved far, and when work is in doubt.

    main, publication   version 8 ── announced ── step 9 ── version 9 ── announced ── step 10 ── version 10, with the calibration
    background          └ 8 is due: copy of its weights ── generate, check (a process of its own) ───────┘

The noise of honest proofs depends on the model. Training a random one makes distributions sharper, and a calibration of the first
version then judges work that is much closer to the validator's numbers than the work it was measured on. Of a pretrained model the
noise rose by 7 % when the weights had moved by 0.01 %: a distance does not show that, so versions are measured again as well, at
intervals that grow because each step of training changes less than the ones before. If it rises faster, the coordinator says that
work is in doubt (rules/cumulative_evidence.py), and the newest version is measured at once.

Measurements and distances are taken after an announcement, so that it does not wait for them. Version 0 does, if supervised steps have
moved it far: there is no work of it yet. The result judges the work of the version that is announced next, or of the newest one if the
run waits for rollouts.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.background import BackgroundTask
from shoal.model.builtin import copy_all_but_weights
from shoal.net.waiting import Stopped
from shoal.telemetry import Log
from shoal.trainer.io.weights_diff import WeightsDiff
from shoal.wire.codes import Rejected
from shoal.wire.manifest import WEIGHTS_FILE
from shoal.wire.proof_noise import RISEN, LaterNoise, Noise, NoiseDoubt
from shoal.wire.run_spec import RunSpec

SAMPLED_WORDS = 1 << 24
"""Weights that are compared, evenly spread over the file. The distance of a large model is then known to a tenth of a percent."""
RETRY_FACTOR = 2.0
"""After a calibration failed, the next is tried when the weights have moved this many times as far."""

FIRST_REPEAT, REPEAT_FACTOR = 4, 2
"""The version at which a calibration is repeated first, and the factor from one such version to the next."""
LEAST_S = 60.0
"""Least time from the start of one repeated calibration to the next: it shares the GPU with everything else."""

MeasureNoise = Callable[[Path], Noise]
"""Measures the noise of the model in a folder, within a deadline of its own. Raises ValueError with the reason if that failed, Stopped
if the run stops."""


@dataclass(frozen=True, slots=True)
class _Measurement:
    """A calibration that is being measured in the background."""

    version: int
    moved: float
    doubt: NoiseDoubt | None
    began_s: float
    task: BackgroundTask[Noise]


class Recalibration:
    """Decides for each version whether to measure it, and measures. Call the methods from one thread at a time."""

    def __init__(
        self, spec: RunSpec, folder: Path, model_folder: Path, measure: MeasureNoise | None, log: Log
    ) -> None:
        """`measure` is None if this machine cannot repeat the calibration: its file covers other kinds of machines."""
        self._wanted = spec.recalibrate_at if spec.noise is not None else 0.0
        self._limit = self._wanted
        """Higher after a calibration that failed."""
        self._newest = spec.later_noise[-1].noise if spec.later_noise else spec.noise
        self._tried = spec.later_noise[-1].measured_version if spec.later_noise else 0
        """The version that was measured last, or failed to be."""
        self._measured = spec.later_noise[-1].measured_version if spec.later_noise else -1
        self._began_s = float("-inf")
        self._running: _Measurement | None = None
        self._model_folder, self._measure, self._log = model_folder, measure, log
        self._work = folder / "calibrating"
        self._reference = folder / "calibrated.safetensors"
        """The weights of the newest repeated calibration; the first one was measured with the run's model."""
        self._sample: dict[str, Tensor] | None = None
        """A sample of the calibrated weights, so that their file is not read again for every version."""
        self.close()

    def close(self) -> None:
        """Deletes the copy of a version that nobody needs: it is as large as the model. A killed process may have left one."""
        with suppress(OSError):
            (self._work / WEIGHTS_FILE).unlink(missing_ok=True)

    @property
    def repeats(self) -> bool:
        """Returns whether the run has a calibration that is ever repeated."""
        return bool(self._limit)

    def before_announcement(self, version: int, diff: WeightsDiff) -> LaterNoise | None:
        """Returns the calibration to announce with a version, if a new one is complete."""
        if not self.repeats:
            return None
        if version == 0:
            self.measure_if_due(version, diff, None)
            if self._running is not None:
                self._running.task.wait()
        return self.take(version)

    def after_announcement(self, version: int, diff: WeightsDiff, doubt: NoiseDoubt | None = None) -> float:
        """Returns how far a version is from the calibrated weights, and starts to measure it if that is due."""
        moved = self._distance(diff)
        self.measure_if_due(version, diff, doubt, moved)
        return moved

    def measure_if_due(
        self, version: int, diff: WeightsDiff, doubt: NoiseDoubt | None, moved: float | None = None
    ) -> None:
        """Starts to measure a version in the background if its distance, its number or doubtful work asks for it."""
        if self._running is not None or time.monotonic() < self._began_s + LEAST_S:
            return
        moved = self._distance(diff) if moved is None else moved
        is_far = moved > self._limit
        in_doubt = doubt is not None and version > self._measured
        if not is_far and not in_doubt and (self._measure is None or version < next_repeat(self._tried)):
            return
        what = f"version {version}: the weights are {moved:.2%} from those of the calibration"
        if is_far:
            what += f", more than recalibrate_at = {self._limit:g}"
        if doubt is not None and in_doubt:
            what = f"the calibration may be at fault: {_describe(doubt)}"
        self._began_s = time.monotonic()
        if self._measure is None:
            self._limit *= RETRY_FACTOR if is_far else 1.0
            self._log.warning(
                f"{what}; calibrate this version with rows of every kind of machine, and start another run from it",
                version=version,
            )
            return
        log = self._log.warning if in_doubt else self._log.info
        log(f"{what}: measuring the noise of version {version}, beside the run", version=version)
        self._tried = version
        try:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir(parents=True)
            copy_all_but_weights(self._model_folder, self._work)
            diff.image.write(self._work / WEIGHTS_FILE)
        except OSError as error:  # a full disk must not end the training
            self._failed(moved, version, error)
            return
        task = BackgroundTask(f"calibrate-{version}", partial(self._measure, self._work))
        self._running = _Measurement(version, moved, doubt if in_doubt else None, self._began_s, task)

    def take(self, version: int) -> LaterNoise | None:
        """Returns a calibration that has been measured, for the work of `version` and later ones; None if none is complete."""
        if self._running is None or not self._running.task.done:
            return None
        measured, self._running = self._running, None
        try:
            noise = measured.task.result()
        except Stopped:
            return None
        except (ValueError, OSError, Rejected) as error:
            self._failed(measured.moved, measured.version, error)
            return None
        self._measured = measured.version
        self._tell(measured, noise)
        return LaterNoise(from_version=version, measured=measured.version, moved=measured.moved, noise=noise)

    def announced(self, later: LaterNoise | None) -> None:
        """Keeps the weights of a new calibration, which the coordinator has recorded."""
        if later is not None:
            self._limit, self._newest = self._wanted, later.noise
            (self._work / WEIGHTS_FILE).replace(self._reference)
            self._sample = None
            shutil.rmtree(self._work, ignore_errors=True)

    def refused(self, later: LaterNoise, error: Exception) -> None:
        """Goes on with the old calibration: the coordinator has refused a new one."""
        self._failed(later.moved, later.measured_version, error)

    def _distance(self, diff: WeightsDiff) -> float:
        if self._sample is None:
            self._sample = self._sample_reference(diff)
        return relative_distance(diff, self._sample)

    def _sample_reference(self, diff: WeightsDiff) -> dict[str, Tensor]:
        if self._reference.exists():
            try:
                return sample_file(self._reference, diff)
            except SafetensorError as error:  # a power cut: it is not flushed to disk
                self._log.warning(
                    f"{self._reference} is damaged ({error}); distances are to the run's first model from now on"
                )
                self._reference.unlink()
        return sample_file(self._model_folder / WEIGHTS_FILE, diff)

    def _failed(self, moved: float, version: int, error: Exception) -> None:
        self.close()
        self._limit = RETRY_FACTOR * moved if moved > self._limit else self._limit
        self._log.warning(
            f"the calibration could not be repeated, the old one stays: {error}", version=version
        )

    def _tell(self, measured: _Measurement, noise: Noise) -> None:
        """Logs what a new calibration shows."""
        rises = {} if self._newest is None else noise.rise_since(self._newest)
        found = ", ".join(f"{name} {rise:.3f}" for name, rise in rises.items())
        took_s = time.monotonic() - measured.began_s
        said = f"calibrated again with version {measured.version} in {took_s:.0f} s; noise relative to the calibration before: {found}"
        if measured.doubt is None:
            self._log.info(said, version=measured.version)
            return
        risen = max(rises.get("mismatches", 1.0), rises.get("mantissas", 1.0))
        verdict = (
            "the model's noise has risen, so the doubtful work counts against nobody"
            if risen > RISEN
            else "that does not explain the doubtful work: the node computes something else (docs/toploc.md), or on a kind of machine "
            "that was not calibrated (`shoal toploc prove` there, `shoal toploc calibrate` here)"
        )
        self._log.warning(f"{said}; {verdict}", version=measured.version)


def _describe(doubt: NoiseDoubt) -> str:
    if not doubt.submissions:
        return f"the noise of accepted work up to version {doubt.version} is {doubt.ratio:.2f} times that of the calibration"
    return (
        f"{doubt.submissions} submissions of up to version {doubt.version} are void, because their noise is up to {doubt.ratio:.2f} times that "
        "of the calibration; until it is measured again they do not count against their nodes"
    )


def next_repeat(measured: int) -> int:
    """Returns the version from which on the calibration is repeated, however little the weights have moved."""
    repeat = FIRST_REPEAT
    while repeat <= measured:
        repeat *= REPEAT_FACTOR
    return repeat


def sampling_step(diff: WeightsDiff) -> int:
    """Returns n so that one in n words is compared."""
    return max(1, sum(place.num_words for place in diff.places.values()) // SAMPLED_WORDS)


def sample_file(path: Path, diff: WeightsDiff) -> dict[str, Tensor]:
    """Returns the words to compare of each tensor of the file that is also published."""
    step = sampling_step(diff)
    with safe_open(path, framework="pt") as file:
        return {
            name: file.get_tensor(name).reshape(-1)[::step].clone()
            for name in diff.places.keys() & set(file.keys())
        }


def relative_distance(diff: WeightsDiff, sample: Mapping[str, Tensor]) -> float:
    """Returns the norm of (published weights - those of the sample), relative to the norm of the latter."""
    step, moved, norm = sampling_step(diff), 0.0, 0.0
    for name, values_N in sample.items():
        now_N = diff.published(name).reshape(-1)[::step].to(torch.float64)
        then_N = values_N.to(torch.float64)
        moved += float((now_N - then_N).square().sum())
        norm += float(then_N.square().sum())
    return (moved / norm) ** 0.5 if norm else 0.0
