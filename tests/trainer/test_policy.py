"""Ways to compute with the master weights: exact, bfloat16 copy, recomputed, compiled; our decoder and transformers'."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_learner import CONFIG, make_batch, output_logprobs

from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.model.builtin import create_model
from shoal.model.load_model import load_causal
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.pack import pack
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.optim.learner import Learner


def learner_of(model: Path, **keys: Any) -> Learner:
    config = TrainerConfig(**(CONFIG.model_dump() | keys))
    return Learner(load_causal(model), config)


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Returns the gradients of a batch's summed log-probs."""
    learner.decoder.zero_grad()
    for micro in pack(make_batch(0).samples, row_tokens=48, rows_per_micro_batch=2):
        output_logprobs(learner.policy, micro).sum().backward()
    return {name: one.grad for name, one in learner.decoder.named_parameters() if one.grad is not None}


def test_recomputed_layers_give_the_same_gradient(model: Path) -> None:
    plain = gradients(learner_of(model))
    again = gradients(learner_of(model, activation_checkpointing=True))
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_bfloat16_copy_follows_the_master_and_gives_float32_gradients(model: Path) -> None:
    exact, rounded = learner_of(model), learner_of(model, compute_dtype="bfloat16")
    for _ in range(3):
        expected, found = gradients(exact), gradients(rounded)
        assert expected.keys() == found.keys()
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name
        # The copy must notice any write to the master weights: by a step, a checkpoint or a test.
        with torch.no_grad():
            for learner in (exact, rounded):
                for parameter in learner.decoder.parameters():
                    parameter.mul_(1.1)


def test_a_copy_rounds_weights_but_not_buffers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_neox", vocab_size=80, hidden_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    create_model(str(tmp_path / "theirs"), tmp_path / "ours", seed=0)
    learner = learner_of(tmp_path / "ours", compute_dtype="bfloat16")
    copy = learner.policy._copy
    assert copy is not None
    assert {one.dtype for one in copy.model.parameters()} == {torch.bfloat16}
    assert {one.dtype for one in copy.model.buffers() if one.is_floating_point()} == {torch.float32}


def test_gradients_of_micro_batches_add_up_in_float32(model: Path) -> None:
    """Adds one large gradient and then many small ones, which bfloat16 would lose."""
    learner = learner_of(model, compute_dtype="bfloat16")
    copy = learner.policy._copy
    assert copy is not None
    one, master = next(copy.model.parameters()), next(learner.decoder.parameters())
    (one * 1.0).sum().backward()
    for _ in range(100):
        (one * 1e-3).sum().backward()
    assert one.grad is None
    torch.testing.assert_close(master.grad, torch.full_like(master, 1.1), rtol=1e-3, atol=0)


def test_the_copy_follows_a_fused_optimizer(model: Path) -> None:
    """The fused kernel used on GPUs does not count its writes; without the hook the copy would keep old weights."""
    learner = learner_of(model, compute_dtype="bfloat16")
    for group in learner.optimizer.param_groups:
        group.update(fused=True, foreach=False)
    twin = learner_of(model, compute_dtype="bfloat16")
    for version in range(3):
        fused, plain = (one.step(make_batch(version), threading.Event()) for one in (learner, twin))
        assert fused.loss == pytest.approx(plain.loss, abs=1e-3), f"step from version {version}"
        assert fused.logprob_gap == pytest.approx(plain.logprob_gap, abs=1e-3)


def test_learns_in_bfloat16(model: Path) -> None:
    learner = learner_of(model, compute_dtype="bfloat16")
    figures = [learner.step(make_batch(version), threading.Event()) for version in range(3)]
    assert all(parameter.dtype == torch.float32 for parameter in learner.decoder.parameters())
    exact = learner_of(model)
    expected = [exact.step(make_batch(version), threading.Event()) for version in range(3)]
    assert [one.grad_norm for one in figures] == pytest.approx([one.grad_norm for one in expected], rel=0.05)


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradient(model: Path) -> None:
    plain, compiled = gradients(learner_of(model)), gradients(learner_of(model, compile=True))
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2"])
def test_packing_does_not_change_the_steps_of_other_families(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 80, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **sizes, intermediate_size=96, initializer_range=0.2)
    torch.manual_seed(3)  # the error of bfloat16 depends on the weights
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    create_model(str(tmp_path / "theirs"), tmp_path / "ours", seed=0)
    results = []
    for row_tokens in (24, 500):
        learner = learner_of(
            tmp_path / "ours", row_tokens=row_tokens, activation_checkpointing=row_tokens == 24
        )
        results.append([learner.step(make_batch(version), threading.Event()) for version in range(2)])
    rounded = learner_of(tmp_path / "ours", compute_dtype="bfloat16")
    assert rounded.step(make_batch(0), threading.Event()).grad_norm == pytest.approx(
        results[0][0].grad_norm, rel=0.05
    )
    for left, right in zip(*results, strict=True):
        assert left.loss == pytest.approx(right.loss, rel=1e-4, abs=1e-6)
        assert left.grad_norm == pytest.approx(right.grad_norm, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [{}, {"activation_checkpointing": True}, {"lora_rank": 4}], ids=str)
def test_a_run_continues_from_cpu_to_gpu_and_back(tmp_path: Path, model: Path, keys: dict[str, Any]) -> None:
    config = TrainerConfig(**(CONFIG.model_dump() | {"compute_dtype": "bfloat16"} | keys))
    norms = []
    for device in ("cpu", "cuda", "cuda", "cpu"):
        lockstep = Lockstep(config, SINGLE_PROCESS, device=device, log=Log("trainer"), stop=threading.Event())
        lockstep.create_learner(model)
        kept = Checkpoints(tmp_path, keep=2, log=Log("trainer"))
        if (checkpoint := kept.newest()) is not None:
            lockstep.load_checkpoint(checkpoint)
        norms.append(lockstep.step(make_batch(lockstep.learner.version)).grad_norm)
        kept.begin(lockstep.learner.version, lockstep.snapshot, None)
        kept.finish(60)
    exact = config.model_copy(
        update={"compute_dtype": "float32"}
    )  # two bfloat16 runs differ by up to 15 % here
    alone = Lockstep(exact, SINGLE_PROCESS, device="cpu", log=Log("trainer"), stop=threading.Event())
    alone.create_learner(model)
    assert norms == pytest.approx([alone.step(make_batch(v)).grad_norm for v in range(4)], rel=0.1)
