"""The trainer measures how far the weights have moved, and repeats the calibration when that is too far."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_coordinator import SmallCoordinator, Stopper
from starlette.requests import Request

from shoal.cli.run.calibration import calibrate_version
from shoal.model.builtin import create_model
from shoal.model.weights import WEIGHTS_FILE
from shoal.shardcast.file_image import FileImage
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.io import publisher, recalibration
from shoal.trainer.io.recalibration import (
    MeasureNoise,
    Recalibration,
    next_repeat,
    relative_distance,
    sample_file,
)
from shoal.trainer.io.weights_diff import WeightsDiff
from shoal.trainer.loop import _TrainerRun, run_trainer
from shoal.wire.codes import Rejected
from shoal.wire.messages import Announce
from shoal.wire.proof_noise import Noise, NoiseDoubt
from shoal.wire.record import Record

ROOT = Path(__file__).parents[2]
CONFIG = TrainerConfig(learning_rate=1e-3, row_tokens=32, rows_per_micro_batch=4)
NOISE = Noise.parse((ROOT / "runs/calibration/smollm2-135m-bf16-on-cpu.json").read_bytes())


@pytest.mark.parametrize("sampled", [1 << 24, 1 << 12])
def test_the_distance_is_relative_to_the_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: int
) -> None:
    monkeypatch.setattr(recalibration, "SAMPLED_WORDS", sampled)
    create_model("tiny", tmp_path / "model", seed=0)
    first = tmp_path / "model" / WEIGHTS_FILE
    save_file(
        {name: (one.float() * 1.25).to(torch.bfloat16) for name, one in load_file(first).items()},
        tmp_path / "now",
    )
    diff = WeightsDiff(FileImage.read(tmp_path / "now"), torch.device("cpu"))
    assert relative_distance(diff, sample_file(first, diff)) == pytest.approx(0.25, abs=0.005)
    assert relative_distance(diff, sample_file(tmp_path / "now", diff)) == 0.0


def calibrated_coordinator(*, limit: float, has_rollouts: bool = True) -> SmallCoordinator:
    coordinator = SmallCoordinator(last_version=3, has_rollouts=has_rollouts)
    noise = NOISE.model_copy(update={"compute_dtype": "float32", "temperature": 0.8})
    coordinator.spec = coordinator.spec.model_copy(update={"noise": noise, "recalibrate_at": limit})
    return coordinator


def run(
    coordinator: SmallCoordinator,
    folder: Path,
    measure: MeasureNoise | None,
    stop: threading.Event | None = None,
) -> None:
    with coordinator.serving():
        site = coordinator.site(folder, deadline_s=30.0, measure_noise=measure)
        run_trainer(CONFIG, site, stop=stop or threading.Event())


def train(folder: Path, measure: MeasureNoise | None, *, limit: float) -> SmallCoordinator:
    coordinator = calibrated_coordinator(limit=limit)
    run(coordinator, folder, measure)
    return coordinator


def distances(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["moved"] for line in lines if line["event"] == "published"]


def test_a_version_that_moved_too_far_is_measured_beside_the_run(tmp_path: Path) -> None:
    measured: list[bytes] = []

    def measure(folder: Path) -> Noise:
        assert (folder / "config.json").exists(), "the folder is a whole model"
        measured.append((folder / WEIGHTS_FILE).read_bytes())
        return NOISE.model_copy(update={"model": f"measurement {len(measured)}"})

    never = train(tmp_path / "never", measure, limit=1.0)
    assert [told.noise for told in never.announced] == [None] * 4 and not measured
    moved = distances(tmp_path / "never")
    assert moved == sorted(moved) and len(moved) == 3

    coordinator = train(tmp_path / "once", measure, limit=0.99 * moved[1])
    (later,) = [told.noise for told in coordinator.announced if told.noise is not None]
    # Version 2 is measured while version 3 is trained, and judges the work of that.
    assert (later.from_version, later.measured_version) == (3, 2)
    assert later.moved == pytest.approx(moved[1], abs=1e-5) and later.noise.model == "measurement 1"
    assert (tmp_path / "once" / "calibrated.safetensors").read_bytes() == measured[0]
    assert not (tmp_path / "once" / "calibrating").exists()


def test_the_calibration_is_repeated_at_versions_further_and_further_apart() -> None:
    repeats, measured = [], 0
    for version in range(1025):
        if version >= next_repeat(measured):
            repeats.append(version)
            measured = version
    assert repeats == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert next_repeat(5) == next_repeat(7) == 8, "a measurement at another version does not put off the next"


def test_a_version_is_measured_again_though_its_weights_have_hardly_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recalibration, "FIRST_REPEAT", 2)
    coordinator = train(tmp_path / "once", lambda _: NOISE, limit=1.0)
    assert [told.noise is not None for told in coordinator.announced] == [False, False, False, True]

    def fail(_: Path) -> Noise:
        raise ValueError("CUDA out of memory")

    coordinator = train(tmp_path / "failed", fail, limit=1.0)
    assert [told.noise for told in coordinator.announced] == [None] * 4


def test_nothing_waits_for_a_measurement_and_the_next_begins_a_minute_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recalibration, "FIRST_REPEAT", 1)
    ended, begun = threading.Event(), list[Path]()

    def hang(folder: Path) -> Noise:
        begun.append(folder)
        ended.wait(30)
        return NOISE

    coordinator = train(tmp_path / "hangs", hang, limit=1.0)
    ended.set()
    assert [told.noise for told in coordinator.announced] == [None] * 4 and len(begun) == 1
    begun.clear()
    train(tmp_path / "quick", hang, limit=1.0)
    assert len(begun) == 1


def test_a_run_that_waits_for_rollouts_measures_its_newest_version_and_announces_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All work of a version may be void by an old calibration: then no version comes that could bring a new one."""
    monkeypatch.setattr(publisher, "DOUBT_POLL_S", 0.0)
    coordinator = calibrated_coordinator(limit=1.0, has_rollouts=False)
    coordinator.noise_doubt = NoiseDoubt(version=0, submissions=5, ratio=1.4)

    def go_on(told: Announce) -> None:
        if told.noise is not None:
            coordinator.noise_doubt, coordinator.has_rollouts = None, True

    coordinator.before_announce = go_on
    risen = NOISE.mismatches.model_copy(
        update={
            "by_size": tuple(
                one.model_copy(update={"mean": 1.4 * one.mean}) for one in NOISE.mismatches.by_size
            )
        }
    )
    run(coordinator, tmp_path, lambda _: NOISE.model_copy(update={"mismatches": risen}))
    again = coordinator.announced[1]
    assert again.noise is not None and (again.noise.from_version, again.noise.measured_version) == (0, 0)
    assert [told.manifest.body.version for told in coordinator.announced] == [0, 0, 1, 2, 3]
    assert "5 submissions of up to version 0 are void" in caplog.text
    assert "the model's noise has risen, so the doubtful work counts against nobody" in caplog.text


def recalibration_in(folder: Path, measure: MeasureNoise) -> Recalibration:
    if not (folder / "model").exists():
        create_model("tiny", folder / "model", seed=0)
    spec = calibrated_coordinator(limit=1.0).spec
    return Recalibration(spec, folder, folder / "model", measure, Log("trainer"))


def diff_of(folder: Path, seed: int) -> WeightsDiff:
    """Returns the image of a version: another model for another seed."""
    create_model("tiny", folder / f"seed-{seed}", seed=seed)
    return WeightsDiff(FileImage.read(folder / f"seed-{seed}" / WEIGHTS_FILE), torch.device("cpu"))


def test_a_measurement_begins_only_when_the_one_before_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose versions come fast has the next one due when a measurement is complete. Both use one folder."""
    monkeypatch.setattr(recalibration, "LEAST_S", 0.0)
    monkeypatch.setattr(recalibration, "FIRST_REPEAT", 1)
    repeated = recalibration_in(tmp_path, lambda _: NOISE)
    first = diff_of(tmp_path, 1)
    repeated.after_announcement(1, first)
    assert repeated._running is not None and repeated._running.task.wait(30)
    later = repeated.before_announcement(2, diff_of(tmp_path, 2))
    assert later is not None and (later.from_version, later.measured_version) == (2, 1)
    repeated.announced(later)
    assert (tmp_path / "calibrated.safetensors").read_bytes() == bytes(first.image.view)
    repeated.after_announcement(2, diff_of(tmp_path, 3))
    assert repeated._running is not None and repeated._running.version == 2


def test_a_version_that_is_made_again_after_a_crash_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is away for a moment and work is in doubt, while no version is open."""
    monkeypatch.setattr(publisher, "DOUBT_POLL_S", 0.0)
    monkeypatch.setattr(_TrainerRun, "save_on_stop", lambda self: None)  # as if it was killed
    coordinator, stop = calibrated_coordinator(limit=1.0), threading.Event()
    coordinator.before_announce = Stopper(stop, 2)
    run(coordinator, tmp_path, lambda _: NOISE, stop)
    coordinator.noise_doubt = NoiseDoubt(version=1, submissions=5, ratio=1.4)
    batch, asked = coordinator.batch, list[Request]()

    def come_back(request: Request, body: bytes) -> Record:
        asked.append(request)
        coordinator.has_rollouts = len(asked) > 1
        return batch(request, body)

    monkeypatch.setattr(coordinator, "batch", come_back)
    run(coordinator, tmp_path, lambda _: NOISE)
    assert sorted(coordinator.digests()) == [0, 1, 2, 3]


def test_a_measurement_that_was_given_up_leaves_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is as large as the model, and a run may never measure again."""
    monkeypatch.setattr(recalibration, "FIRST_REPEAT", 1)

    def fail(_: Path) -> Noise:
        raise Rejected("request.malformed", "not a calibration")

    repeated = recalibration_in(tmp_path, fail)
    repeated.after_announcement(1, diff_of(tmp_path, 1))
    assert repeated._running is not None and repeated._running.task.wait(30)
    assert repeated.take(2) is None and not (tmp_path / "calibrating" / WEIGHTS_FILE).exists()
    (tmp_path / "calibrating").mkdir(exist_ok=True)
    (tmp_path / "calibrating" / WEIGHTS_FILE).write_bytes(b"of a process that was killed")
    recalibration_in(tmp_path, fail)
    assert not (tmp_path / "calibrating" / WEIGHTS_FILE).exists()


def test_a_calibration_that_the_coordinator_refuses_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run file on the trainer's machine has changed since the run began."""
    monkeypatch.setattr(recalibration, "FIRST_REPEAT", 2)
    coordinator = calibrated_coordinator(limit=1.0)

    def refuse(told: Announce) -> None:
        if told.noise is not None:
            raise Rejected("request.malformed", "the calibration does not fit the run's terms")

    coordinator.before_announce = refuse
    run(coordinator, tmp_path, lambda _: NOISE)
    assert [told.manifest.body.version for told in coordinator.announced] == [0, 1, 2, 3]
    assert "the old one stays: POST /v1/policies: request.malformed" in caplog.text


def test_weights_of_a_calibration_that_a_power_cut_damaged_are_dropped(tmp_path: Path) -> None:
    """They are not flushed: else every start of the trainer would fail."""
    repeated, diff = recalibration_in(tmp_path, lambda _: NOISE), diff_of(tmp_path, 1)
    moved = repeated.after_announcement(1, diff)
    (tmp_path / "calibrated.safetensors").write_bytes(b"")
    restarted = recalibration_in(tmp_path, lambda _: NOISE)
    assert restarted.after_announcement(2, diff) == moved
    assert not (tmp_path / "calibrated.safetensors").exists()


def test_training_goes_on_if_the_calibration_cannot_be_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(folder: Path) -> Noise:
        tried.append(folder)
        raise ValueError("CUDA out of memory")

    monkeypatch.setattr(recalibration, "LEAST_S", 0.0)
    coordinator = train(tmp_path / "failed", fail, limit=1e-6)
    assert [told.noise for told in coordinator.announced] == [None] * 4
    assert 1 <= len(tried) < 3, "not with every version: each attempt takes a while"
    assert "the old one stays: CUDA out of memory" in caplog.text
    train(tmp_path / "file", None, limit=1e-6)
    assert "calibrate this version with rows of every kind of machine" in caplog.text


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_noise_of_a_version_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "v9", seed=9)
    file = tmp_path / "run.toml"
    text = (ROOT / "runs" / "demo.toml").read_text().replace("max_new_tokens = 8", "max_new_tokens = 2")
    file.write_text(text.replace('"float32"', '"bfloat16"', 1))
    common = {"device": "cpu", "deadline_s": 300.0, "stop": threading.Event()}
    noise = calibrate_version(file, tmp_path / "v9", **common)  # type: ignore[arg-type]
    assert (noise.model, noise.compute_dtype) == ("tiny", "bfloat16")
    (tmp_path / "v9" / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match=r"no weights at .*v9"):
        calibrate_version(file, tmp_path / "v9", **common)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing is not a key"):
        calibrate_version(file, tmp_path / "v9", overrides=("run.nothing=1",), **common)  # type: ignore[arg-type]
