"""Estimates for the recipe of the INTELLECT-2 report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.run.estimate import (
    disk_bytes,
    estimates,
    forward_flops,
    gpu_bytes,
    num_adapted,
    num_parameters,
    train_passes,
)
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


def test_the_reports_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # the model is beside the run file, not in the working directory
    file = load_run_file(ROOT / "runs" / "intellect-2.toml")
    assert file.coordinator.groups_per_step * file.sampling.samples_per_prompt == 8 * 512
    assert train_passes(file) == 6
    shown = estimates(file)
    assert shown["bytes of a whole version"] == "65.5 GB   (report: 62 GB)"
    assert shown["to one worker at 590 Mbit/s"] == "14.8 minutes   (report: 14 minutes)"
    assert "report: 1 : 4.5" in shown["training : generation, in FLOPs"]
    shape = read_shape(ROOT / "runs" / "qwen2-32b")
    # Only the optimiser's state is shared out: 16 bytes a parameter.
    assert gpu_bytes(shape, file, 8) - gpu_bytes(shape, file, 16) == pytest.approx(num_parameters(shape))


def test_a_built_in_model_has_no_shape_to_look_at() -> None:
    assert estimates(load_run_file(ROOT / "runs" / "demo.toml")) == {}


def test_the_disk_of_every_role_is_announced() -> None:
    file = load_run_file(ROOT / "runs" / "intellect-2.toml")
    shape = read_shape(ROOT / "runs" / "qwen2-32b")
    found = disk_bytes(shape, file)
    assert set(found) == {"trainer", "relay", "worker", "validator"}
    weights = 2 * num_parameters(shape)
    assert found["trainer"] > 3 * 6 * weights  # three checkpoints of 12 bytes per parameter
    assert "disk of a trainer, at most about" in estimates(file)
    adapters = file.model_copy(update={"trainer": file.trainer.model_copy(update={"lora_rank": 16})})
    assert disk_bytes(shape, adapters)["relay"] < 2.1 * weights
    assert num_adapted(shape, 16) == pytest.approx(134e6, rel=0.01)


MEASURE = """
import re, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
from shoal.telemetry import Log
from shoal.cli.run.runfile import load_run_file
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.distributed.ranks import SINGLE_PROCESS
from shoal.trainer.data.batch import TrainBatch, TrainSample
file = load_run_file(Path(sys.argv[1]))
def peak():  # not ru_maxrss, which starts with the size of the process that started this one
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
def sample(index):
    return TrainSample(tokens=tuple(range(index, index + 257)), prompt_len=1, logprobs=(-9.0,) * 256, advantage=index - 1.5, lag=0)
small = torch.nn.Linear(64, 64)
torch.optim.AdamW(small.parameters(), fused=True)
small(torch.zeros(2, 64)).sum().backward()  # loads what every backward pass needs
before = peak()
lockstep = Lockstep(file.trainer, SINGLE_PROCESS, device="cpu", log=Log("test"), stop=threading.Event())
lockstep.create_learner(Path(file.run.model), 1.0)
for version in range(2):
    lockstep.step(TrainBatch(version=version, samples=tuple(map(sample, range(4))), num_groups=1, dropped_groups=0, reward_mean=0.0))
print(peak() - before)
"""


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_estimate_of_memory_is_near_what_is_measured(tmp_path: Path) -> None:
    from shoal.model.load_model import empty_decoder
    from shoal.model.shape import Shape
    from shoal.model.weights import save_weights

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 8000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    shape: Shape = read_shape(model)
    decoder = empty_decoder(shape)
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.02)
    save_weights(decoder, model / "model.safetensors")
    (tmp_path / "run.toml").write_text(
        '[run]\nname = "test"\nmodel = "model"\nlast_version = 1\n[task]\nname = "sort"\n'
        "[trainer]\nrow_tokens = 512\nrows_per_micro_batch = 2\n"
        "[sampling]\nmax_new_tokens = 8\n"
    )
    file = load_run_file(tmp_path / "run.toml")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "run.toml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    measured = float(run.stdout.split()[-1])
    assert gpu_bytes(shape, file, 1) == pytest.approx(measured, rel=0.15)
