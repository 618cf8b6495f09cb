"""Adapters: only they are trained, the merged weights are published, and a resumed run equals an uninterrupted one."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_learner import CONFIG, make_batch

from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.model.builtin import create_model
from shoal.model.decoder import MLP, Attention, Decoder
from shoal.model.load_model import load_causal
from shoal.model.weights import save_tensors
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.pack import pack
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io.checkpoint import Checkpoints
from shoal.trainer.optim.policy import add_adapters, fuse_adapters, score

TOKENS_BT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
POSITIONS_BT = torch.arange(8)[None]


def lockstep_of(model: Path, **keys: object) -> Lockstep:
    config = TrainerConfig(**(CONFIG.model_dump() | {"lora_rank": 4, "learning_rate": 1e-2} | keys))
    lockstep = Lockstep(config, SINGLE_PROCESS, device="cpu", log=Log("trainer"), stop=threading.Event())
    lockstep.create_learner(model)
    return lockstep


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.logits(model(TOKENS_BT, POSITIONS_BT))  # type: ignore[operator]
        return result


def test_published_weights_are_the_adapted_model(tmp_path: Path, model: Path) -> None:
    lockstep = lockstep_of(model)
    before = logits(lockstep.learner.decoder)
    torch.testing.assert_close(before, logits(load_causal(model)))
    for version in range(3):
        lockstep.step(make_batch(version))
    adapted = logits(lockstep.learner.decoder)
    assert (adapted - before).abs().max() > 0.1

    plain = load_causal(model)
    published = dict(lockstep.whole_weights(lockstep.weights()))
    assert published.keys() == dict(plain.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(published[name])
    torch.testing.assert_close(logits(plain), adapted, rtol=1e-4, atol=1e-4)

    # Workers get the weights rounded to bfloat16, in an ordinary model folder.
    (tmp_path / "v3").mkdir()
    (tmp_path / "v3" / "config.json").write_bytes((model / "config.json").read_bytes())
    save_tensors(published.items(), tmp_path / "v3" / "model.safetensors")
    torch.testing.assert_close(logits(load_causal(tmp_path / "v3")), adapted, rtol=0.05, atol=0.2)


def test_only_adapters_are_trained_and_kept(model: Path) -> None:
    lockstep = lockstep_of(model)
    frozen = {
        n: p.detach().clone() for n, p in lockstep.learner.decoder.named_parameters() if not p.requires_grad
    }
    lockstep.step(make_batch(0))
    assert all(
        torch.equal(p, frozen[n]) for n, p in lockstep.learner.decoder.named_parameters() if n in frozen
    )
    weights = lockstep.snapshot().weights
    assert all("lora_" in name for name in weights)
    assert sum(one.numel() for one in weights.values()) < sum(one.numel() for one in frozen.values()) / 10


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, model: Path) -> None:
    straight = lockstep_of(model)
    kept = Checkpoints(tmp_path, keep=2, log=Log("trainer"))
    straight.step(make_batch(0))
    kept.begin(1, straight.snapshot, None)
    kept.finish(30)
    expected = [straight.step(make_batch(version)).loss for version in (1, 2)]
    again = lockstep_of(model, seed=9)  # draws other adapters, which the checkpoint overwrites
    checkpoint = kept.newest()
    assert checkpoint is not None
    again.load_checkpoint(checkpoint)
    assert [again.step(make_batch(version)).loss for version in (1, 2)] == expected
    for name, weight in again.snapshot().weights.items():
        assert torch.equal(weight, straight.snapshot().weights[name])


def test_a_checkpoint_of_all_weights_is_refused_for_adapters(tmp_path: Path, model: Path) -> None:
    whole = lockstep_of(model, lora_rank=0)
    kept = Checkpoints(tmp_path, keep=2, log=Log("trainer"))
    kept.begin(0, whole.snapshot, None)
    kept.finish(30)
    checkpoint = kept.newest()
    assert checkpoint is not None
    with pytest.raises(ValueError, match="lora_rank"):
        lockstep_of(model).load_checkpoint(checkpoint)


def test_bfloat16_and_adapters(model: Path) -> None:
    lockstep = lockstep_of(model, compute_dtype="bfloat16")
    figures = lockstep.step(make_batch(0))
    assert figures.grad_norm == pytest.approx(lockstep_of(model).step(make_batch(0)).grad_norm, rel=0.05)


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    """Returns the gradients of the adapters for a batch, whose first values are random."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    (micro,) = pack(make_batch(0).samples, row_tokens=400, rows_per_micro_batch=1)
    logprobs_N = score(model, micro).logprobs_N
    model.zero_grad()
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
def test_fused_adapters_have_the_gradients_of_pefts_layers(
    model: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the sums inside matrix products, the gate and the layers that share an input, in float32."""
    adapted = load_causal(model)
    assert isinstance(adapted, Decoder)
    add_adapters(adapted, TrainerConfig(lora_rank=4, lora_alpha=8))
    expected = gradients(adapted)
    fuse_adapters(adapted)
    for module in adapted.modules():
        if isinstance(module, MLP | Attention):
            module.fused = True
    if compiled:  # what a compiler sees instead
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = gradients(adapted)
    assert found.keys() == expected.keys() and len(found) == 2 * 7 * adapted.shape.num_layers
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


def test_adapters_of_another_family_are_fused_too(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 80, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gpt_neox", **sizes, intermediate_size=96)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    create_model(str(tmp_path / "theirs"), tmp_path / "ours", seed=0)
    model = load_causal(tmp_path / "ours")
    add_adapters(model, TrainerConfig(lora_rank=4))
    x = torch.randn(2, 3, 128)
    linear: Any = next(one for one in model.modules() if hasattr(one, "lora_A") and one.in_features == 128)
    with torch.no_grad():
        linear.lora_B.default.weight.normal_()
        expected = linear(x)
        fuse_adapters(model)
        torch.testing.assert_close(linear(x), expected)


def test_frozen_weights_are_held_once_in_bfloat16(model: Path) -> None:
    learner = lockstep_of(model, compute_dtype="bfloat16").learner
    computing = learner.policy._scorer.model
    assert computing is not learner.decoder
    frozen = {name: one for name, one in learner.decoder.named_parameters() if not one.requires_grad}
    for name, one in computing.named_parameters():
        if name in frozen:
            assert one.data_ptr() == frozen[name].data_ptr()
        else:
            assert one.dtype == torch.bfloat16
    assert {one.dtype for one in frozen.values()} == {torch.bfloat16}
    assert {one.dtype for one in learner.trained_parameters().values()} == {torch.float32}
