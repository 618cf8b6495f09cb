"""Estimates for the recipe of the INTELLECT-2 report."""

from pathlib import Path

import pytest

from shoal.cli.run.estimate import estimates, forward_flops, gpu_bytes, num_parameters, train_passes
from shoal.cli.run.runfile import load_run_file
from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.model.shape import read_shape

ROOT = Path(__file__).parent.parent.parent


def test_parameters_are_counted_as_the_model_has_them(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "model", 0)
    decoder = load_decoder(tmp_path / "model")
    assert num_parameters(decoder.shape) == sum(parameter.numel() for parameter in decoder.parameters())


def test_the_reports_model() -> None:
    shape = read_shape(ROOT / "runs" / "qwen2-32b")
    assert num_parameters(shape) == pytest.approx(32.76e9, rel=1e-3)
    # The usual 2 x parameters, less the embedding that is only looked up.
    assert forward_flops(shape, context=0) == pytest.approx(2 * 32.0e9, rel=1e-2)


def test_the_reports_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = load_run_file(Path("runs/intellect-2.toml"))
    assert file.coordinator.groups_per_step * file.sampling.samples_per_prompt == 8 * 512
    assert train_passes(file) == 6
    shown = estimates(file)
    assert shown["bytes of a whole version"] == "65.5 GB   (report: 62 GB)"
    assert shown["to one worker at 590 Mbit/s"] == "14.8 minutes   (report: 14 minutes)"
    assert "report: 1 : 4.5" in shown["training : generation, in FLOPs"]
    shape = read_shape(Path("runs/qwen2-32b"))
    # Only the optimiser's state is shared out: 16 bytes a parameter.
    assert gpu_bytes(shape, file, 8) - gpu_bytes(shape, file, 16) == pytest.approx(num_parameters(shape))


def test_a_built_in_model_has_no_shape_to_look_at() -> None:
    assert estimates(load_run_file(ROOT / "runs" / "demo.toml")) == {}
