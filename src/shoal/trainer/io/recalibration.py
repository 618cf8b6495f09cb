"""Repeats the calibration of a run at versions 16, 64, 256, ..., and when the weights have moved far from the calibrated ones.

    version 40 ──▶ 6 % from the calibrated weights ──▶ calibrated again with version 40 ──▶ announced together, for work of version 40 and later

The noise of honest proofs depends on the weights. Training a random model makes distributions sharper, and a calibration of the first
version then judges work that is much closer to the validator's numbers than the work it was measured on. Of a pretrained model the
noise rose by 7 % when the weights had moved by 0.01 %: a distance does not show that, so versions are measured again as well, at
intervals that grow because each step of training changes less than the ones before.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from shoal.model.builtin import copy_all_but_weights
from shoal.telemetry import Log
from shoal.trainer.io.weights_diff import WeightsDiff
from shoal.wire.manifest import WEIGHTS_FILE
from shoal.wire.proof_noise import LaterNoise, Noise
from shoal.wire.run_spec import RunSpec

SAMPLED_WORDS = 1 << 24
"""Weights that are compared, evenly spread over the file. The distance of a large model is then known to a tenth of a percent."""
RETRY_FACTOR = 2.0
"""After a calibration failed, the next is tried when the weights have moved this many times as far."""

FIRST_REPEAT, REPEAT_FACTOR = 16, 4
"""The version at which a calibration is repeated first, and the factor from one such version to the next."""

MeasureNoise = Callable[[Path], Noise]
"""Measures the noise of the model in a folder. Raises ValueError with the reason if that failed, Stopped if the run stops."""


class Recalibration:
    """Measures each version before it is announced. Call the methods from one thread."""

    def __init__(
        self, spec: RunSpec, folder: Path, model_folder: Path, measure: MeasureNoise | None, log: Log
    ) -> None:
        """`measure` is None if this machine cannot repeat the calibration: its file covers other kinds of machines."""
        self._wanted = spec.recalibrate_at if spec.noise is not None else 0.0
        self._limit = self._wanted
        """Higher after a calibration that failed."""
        self._model_folder, self._measure, self._log = model_folder, measure, log
        self._work = folder / "calibrating"
        self._reference = folder / "calibrated.safetensors"
        """The weights of the newest repeated calibration; the first one was measured with the run's model."""

    def before_announcement(self, version: int, diff: WeightsDiff) -> tuple[float | None, LaterNoise | None]:
        """Returns how far a version is from the calibrated weights, and a new calibration if that is too far.

        The distance is None in a run that has no calibration or never repeats it.
        """
        if not self._limit:
            return None, None
        reference = self._reference if self._reference.exists() else self._model_folder / WEIGHTS_FILE
        moved = relative_distance(diff, reference)
        is_far = moved > self._limit
        if not is_far and (self._measure is None or not is_repeated_at(version)):
            return moved, None
        what = f"version {version}: the weights are {moved:.2%} from those of the calibration"
        if is_far:
            what += f", more than recalibrate_at = {self._limit:g}"
        if self._measure is None:
            self._limit *= RETRY_FACTOR
            self._log.warning(
                f"{what}; calibrate this version with rows of every kind of machine, and start another run from it",
                version=version,
            )
            return moved, None
        self._log.info(f"{what}: calibrating again", version=version)
        try:
            noise = self._measure(self._write_model(diff))
        except (ValueError, OSError) as error:  # also a full disk: it must not end the training
            self._limit = RETRY_FACTOR * moved if is_far else self._limit
            self._log.warning(
                f"the calibration could not be repeated, the old one stays: {error}", version=version
            )
            return moved, None
        return moved, LaterNoise(from_version=version, moved=moved, noise=noise)

    def announced(self, later: LaterNoise | None) -> None:
        """Keeps the weights of a new calibration, which the coordinator has recorded."""
        if later is not None:
            self._limit = self._wanted
            (self._work / WEIGHTS_FILE).replace(self._reference)
            shutil.rmtree(self._work, ignore_errors=True)

    def _write_model(self, diff: WeightsDiff) -> Path:
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        copy_all_but_weights(self._model_folder, self._work)
        diff.image.write(self._work / WEIGHTS_FILE)
        return self._work


def is_repeated_at(version: int) -> bool:
    """Returns whether the calibration is repeated at this version, however little the weights have moved."""
    repeat = FIRST_REPEAT
    while repeat < version:
        repeat *= REPEAT_FACTOR
    return repeat == version


def relative_distance(diff: WeightsDiff, reference: Path) -> float:
    """Returns the norm of (published weights - those of the file `reference`), relative to the norm of the latter."""
    total = sum(place.num_words for place in diff.places.values())
    step = max(1, total // SAMPLED_WORDS)
    moved = norm = 0.0
    with safe_open(reference, framework="pt") as file:
        for name in diff.places.keys() & set(file.keys()):
            now_N = diff.published(name).reshape(-1)[::step].to(torch.float64)
            then_N = file.get_tensor(name).reshape(-1)[::step].to(torch.float64)
            moved += float((now_N - then_N).square().sum())
            norm += float(then_N.square().sum())
    return (moved / norm) ** 0.5 if norm else 0.0
