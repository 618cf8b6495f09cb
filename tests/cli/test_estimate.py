"""Estimates for the recipe of the INTELLECT-2 report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.run.estimate import (
    FEW_LOGITS,
    LOGITS_CHUNK,
    device_bytes,
    disk_bytes,
    estimates,
    forward_flops,
    num_adapted,
    num_parameters,
    rollout_bytes,
)
from shoal.cli.run.runfile import load_run_file
from shoal.model import logprobs
from shoal.model.builtin import create_model
from shoal.model.load_model import empty_decoder, load_decoder
from shoal.model.shape import Rope, Shape, read_shape
from shoal.model.weights import save_weights

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
    assert file.trainer.passes_per_token == 6
    shown = estimates(file)
    assert shown["bytes of a whole version"] == "65.5 GB   (report: 62 GB)"
    assert shown["to one worker at 590 Mbit/s"] == "14.8 minutes   (report: 14 minutes)"
    assert "report: 1 : 4.5" in shown["training : generation, in FLOPs"]
    shape = read_shape(ROOT / "runs" / "qwen2-32b")
    # Only the optimiser's state is shared out: 16 bytes a parameter.
    assert device_bytes(shape, file, ranks=8) - device_bytes(shape, file, ranks=16) == pytest.approx(
        num_parameters(shape)
    )


@pytest.mark.parametrize(
    ("name", "budgets", "longest", "versions"),
    [
        ("short", (1000, 2000, 3000, 4000), 6000, 200),
        ("long", (2000, 4000, 6000, 8000, 10000), 16000, 350),
    ],
)
def test_the_reports_two_runs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    budgets: tuple[int, ...],
    longest: int,
    versions: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = load_run_file(ROOT / "runs" / f"intellect-2-{name}.toml")
    assert file.task[0].budgets == budgets and file.sampling.max_new_tokens == longest
    assert file.run.last_version == versions
    assert file.trainer.decay_steps == versions * file.trainer.optimizer_steps, "the cosine ends with the run"
    trainer, recipe = file.trainer, file.trainer.recipe
    assert (file.run.max_lag, file.run.keep_versions, file.task[0].budget_alpha) == (2, 5, 0.0003)
    assert (file.coordinator.groups_per_step, file.sampling.samples_per_prompt) == (256, 16)
    assert (trainer.optimizer_steps, trainer.row_tokens, trainer.rows_per_micro_batch) == (8, 32768, 1)
    assert (file.sampling.temperature, trainer.learning_rate, trainer.warmup_steps) == (0.6, 3e-7, 25)
    assert (trainer.betas, trainer.weight_decay, trainer.clip_norm) == ((0.9, 0.99), 0.01, 0.1)
    assert (recipe.eps, recipe.eps_high, recipe.delta, recipe.advantage) == (0.2, 0.2, 4.0, "std")
    assert (recipe.normalisation, trainer.kl, trainer.entropy_bonus) == ("sequence", 0.001, 1e-4)
    assert (trainer.behaviour, trainer.compute_dtype, trainer.compile) == ("recompute", "bfloat16", False)
    assert estimates(file)["parameters"] == "32.76 billion"


def test_a_small_model_is_described_in_small_units(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "model", 0)
    path = tmp_path / "small.toml"
    path.write_text((ROOT / "runs" / "demo.toml").read_text().replace('"tiny"', f'"{tmp_path / "model"}"'))
    shown = estimates(load_run_file(path))
    assert shown["parameters"] == "0.31 million" and shown["bytes of a whole version"] == "0.6 MB"
    assert shown["output tokens a step"].startswith("2,048")
    assert not any("H100" in name for name in shown), "none of a tenth of one"


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


def test_the_announced_disk_grows_with_the_run() -> None:
    """The trainer's archive has the deltas of all versions, and the coordinator keeps all rollouts."""
    file, shape = load_run_file(ROOT / "runs" / "intellect-2.toml"), read_shape(ROOT / "runs" / "qwen2-32b")
    weights = 2 * num_parameters(shape)
    lean = file.model_copy(update={"trainer": file.trainer.model_copy(update={"archive": False})})
    archive = disk_bytes(shape, file)["trainer"] - disk_bytes(shape, lean)["trainer"]
    assert archive == pytest.approx(weights + (300 - 13) * weights / 20)
    # 300 versions of 4,096 answers of 6,000 tokens.
    assert rollout_bytes(file) == pytest.approx(300 * 4096 * 6000 * 14)
    shown = estimates(file)
    assert shown["disk of the coordinator, at least"].startswith("103.2 GB of accepted rollouts")


@pytest.mark.parametrize(
    ("layout", "measured_gb"),
    [
        ({"vocab_size": 151936, "hidden_size": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 8, "ffn_size": 3072,
          "head_dim": 128, "qk_norm": True}, {(16384, False): 35.9, (16384, True): 14.6, (65536, True): 24.2}),
        ({"vocab_size": 49152, "hidden_size": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "ffn_size": 1536,
          "head_dim": 64}, {(16384, False): 12.9, (65536, True): 8.3}),
        ({"vocab_size": 49152, "hidden_size": 2048, "num_layers": 24, "num_heads": 32, "num_kv_heads": 32, "ffn_size": 8192,
          "head_dim": 64}, {(16384, False): 64.2}),
    ],
    ids=["0.6B", "135M", "1.7B"],
)  # fmt: skip
def test_the_estimate_agrees_with_the_peaks_that_an_h200_had(
    layout: dict[str, Any], measured_gb: dict[tuple[int, bool], float]
) -> None:
    """The peaks, by tokens of a row and recomputation, are those of bench/log/2026-11-trainer-step-h200.md; bfloat16.

    They were measured when the MLP kept four results for the backward pass; it keeps three now, up to a tenth less.
    """
    plain = {
        "qk_norm": False,
        "qkv_bias": False,
        "tied_embeddings": True,
        "norm_eps": 1e-5,
        "max_positions": 1 << 17,
    }
    shape = Shape(**(plain | layout), rope=Rope(rope_theta=1e5))
    file = load_run_file(ROOT / "runs" / "demo.toml")
    for (row_tokens, recompute), measured in measured_gb.items():
        settings = {"row_tokens": row_tokens, "rows_per_micro_batch": 1, "compute_dtype": "bfloat16",
                    "activation_checkpointing": recompute}  # fmt: skip
        changed = file.model_copy(update={"trainer": file.trainer.model_copy(update=settings)})
        assert device_bytes(shape, changed) / 1e9 == pytest.approx(measured, rel=0.15)


def test_the_estimate_counts_logits_in_the_chunks_of_the_trainer() -> None:
    assert (LOGITS_CHUNK, FEW_LOGITS) == (logprobs.CHUNK, logprobs.FEW_LOGITS)


MEASURE = """
import re, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
from shoal.telemetry import Log
from shoal.cli.run.runfile import load_run_file
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.trainer.data.batch import TrainBatch, TrainSample
file = load_run_file(Path(sys.argv[1]))
def peak():  # not ru_maxrss, which starts with the size of the process that started this one
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
def sample(index, length=256):
    return TrainSample(tokens=tuple(range(index, index + length + 1)), prompt_len=1, logprobs=(-9.0,) * length, advantage=index - 1.5, lag=0)
small = torch.nn.Linear(64, 64)
torch.optim.AdamW(small.parameters(), fused=True)
small(torch.zeros(2, 64)).sum().backward()  # loads what every backward pass needs
if file.trainer.lora_rank:
    import peft  # a library, not the model's memory
lockstep = Lockstep(file.trainer, SINGLE_PROCESS, device="cpu", log=Log("test"), stop=threading.Event())
before = peak()
lockstep.create_learner(Path(file.run.model))
# The first step makes the moments; the second has two micro-batches.
for version, samples in enumerate([[sample(0, 16)], list(map(sample, range(8)))]):
    lockstep.step(TrainBatch(version=version, samples=tuple(samples), num_groups=1))
Path(sys.argv[2]).write_text(str(peak() - before))
"""


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings",
    [
        'compute_dtype = "float32"',
        'compute_dtype = "bfloat16"',
        'compute_dtype = "float32"\noptimizer_states = "int8"',
        'compute_dtype = "float32"\nlora_rank = 8',
    ],
    ids=["float32", "bfloat16", "int8", "adapters"],
)  # fmt: skip
def test_the_estimate_of_memory_is_near_what_is_measured(tmp_path: Path, settings: str) -> None:
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
        f"[trainer]\nrow_tokens = 512\nrows_per_micro_batch = 2\n{settings}\n"
        "[sampling]\nmax_new_tokens = 8\n"
    )
    file = load_run_file(tmp_path / "run.toml")
    (tmp_path / "measure.py").write_text(MEASURE)
    # The C library keeps freed blocks below 32 MiB for later, up to a third of the memory here. A model whose size matters has
    # larger ones, which it returns at once; with this variable it does so for those of this small model.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2 << 20)}
    run = subprocess.run(
        [sys.executable, tmp_path / "measure.py", tmp_path / "run.toml", tmp_path / "peak"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    measured = float((tmp_path / "peak").read_text())
    assert device_bytes(shape, file, on_cpu=True) == pytest.approx(measured, rel=0.15)
