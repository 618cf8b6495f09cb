"""The decoder against transformers, and its three uses (plain, packed, cached) against each other."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shoal.model.decoder import Decoder, KVCache
from shoal.model.load_model import empty_decoder, load_decoder
from shoal.model.shape import read_end_tokens, read_json, read_shape
from shoal.model.weights import load_weights

TOKENS_BT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])

FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "llama-tied-mha": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen2": {"num_key_value_heads": 2, "rope_theta": 1e6},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 24},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "llama-dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    "llama-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 100.0,
        }
    },
    "qwen2-yarn": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 1e3,
        },
    },
}


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    reference, folder = _reference("qwen3", tmp_path)
    del reference
    return load_decoder(folder)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference, folder = _reference(family, tmp_path)
    decoder = empty_decoder(read_shape(folder))
    load_weights(decoder, folder / "model.safetensors")

    with torch.no_grad():
        ours = decoder.logits(decoder(TOKENS_BT, _positions(TOKENS_BT)))
        theirs = reference(TOKENS_BT).logits

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_parameter_names_are_those_of_transformers(tmp_path: Path) -> None:
    reference, folder = _reference("llama-tied-mha", tmp_path)
    ours = dict(empty_decoder(read_shape(folder)).named_parameters())
    assert ours.keys() == dict(reference.named_parameters()).keys()


def test_packed_rows_give_the_loss_and_gradients_of_separate_rows(decoder: Decoder) -> None:
    parts = [TOKENS_BT[0, :5], TOKENS_BT[1, :3], TOKENS_BT[1, 2:8]]
    weights = [torch.randn(len(part), decoder.shape.hidden_size) for part in parts]

    separate = sum(
        (decoder(p[None], _positions(p[None]))[0] * w).sum() for p, w in zip(parts, weights, strict=True)
    )
    assert isinstance(separate, Tensor)
    separate_gradients = _gradients(decoder, separate)

    tokens, positions, segments = (torch.zeros(2, 10, dtype=torch.long) for _ in range(3))
    segments -= 1  # two rows of ten: parts 0 and 1 in the first, part 2 in the second, the rest padding
    weight = torch.zeros(2, 10, decoder.shape.hidden_size)
    for index, (row, start) in enumerate([(0, 0), (0, 5), (1, 0)]):
        where = slice(start, start + len(parts[index]))
        tokens[row, where], segments[row, where] = parts[index], index
        positions[row, where] = torch.arange(len(parts[index]))
        weight[row, where] = weights[index]
    packed = (decoder(tokens, positions, segments_BT=segments) * weight).sum()

    torch.testing.assert_close(packed, separate, rtol=1e-5, atol=1e-5)
    for name, gradient in _gradients(decoder, packed).items():
        torch.testing.assert_close(gradient, separate_gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_row_of_padding_alone_stays_finite_forward_and_backward(decoder: Decoder) -> None:
    tokens = torch.zeros(2, 6, dtype=torch.long)
    segments = torch.tensor([[0, 0, 0, 1, -1, -1], [-1] * 6])
    hidden = decoder(tokens, torch.zeros_like(tokens), segments_BT=segments)
    assert hidden.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in _gradients(decoder, hidden.square().sum()).values())


def test_cached_decoding_of_unequal_rows_equals_the_full_forward(decoder: Decoder) -> None:
    lengths = [5, 3]
    cache = KVCache(decoder, num_slots=3, max_context=9)
    with torch.no_grad():
        full = decoder(TOKENS_BT, _positions(TOKENS_BT))
        cache.context = 5
        prefill = decoder(TOKENS_BT[:, :5], _positions(TOKENS_BT[:, :5]), cache=cache)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(prefill[row, :length], full[row, :length], rtol=1e-5, atol=1e-5)
        for step in range(3):
            at = torch.tensor([[length + step] for length in lengths])
            cache.context = int(at.max()) + 1
            state = decoder(TOKENS_BT.gather(1, at), at, cache=cache)
            for row, length in enumerate(lengths):
                torch.testing.assert_close(state[row, 0], full[row, length + step], rtol=1e-5, atol=1e-5)


def test_copied_slots_continue_like_their_source(decoder: Decoder) -> None:
    with torch.no_grad():
        prompt = KVCache(decoder, num_slots=2, max_context=4)
        decoder(TOKENS_BT[:, :4], _positions(TOKENS_BT[:, :4]), cache=prompt)
        cache = KVCache(decoder, num_slots=4, max_context=6)
        source = torch.tensor([1, 0, 1])
        cache.copy_from(prompt, source_slots=source, slots=torch.tensor([0, 1, 2]), context=4)
        cache.context = 5
        state = decoder(TOKENS_BT[source, 4:5], torch.full((3, 1), 4), cache=cache)
        full = decoder(TOKENS_BT, _positions(TOKENS_BT))
    torch.testing.assert_close(state[:, 0], full[source, 4], rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_bfloat16(decoder: Decoder) -> None:
    decoder = decoder.to(torch.bfloat16)
    hidden = decoder(TOKENS_BT, _positions(TOKENS_BT))
    assert hidden.dtype == decoder.logits(hidden).dtype == torch.bfloat16
    assert hidden.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "rope type 'longrope'"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"model_type": "mistral", "sliding_window": 4}, "sliding_window=4"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"head_dim": 17}, "head_dim=17 is odd"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0 must be above 0"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_slow": 0.0}},
            "beta_slow=0.0 must be above 0",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_theta=1.0 must be above 1"),
    ],
)
def test_unsupported_settings_are_errors(change: dict[str, object], message: str, tmp_path: Path) -> None:
    _, folder = _reference("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        read_shape(folder)


def test_end_tokens_come_from_both_config_files(tmp_path: Path) -> None:
    _, folder = _reference("llama", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_end_tokens(folder, read_json(folder / "config.json")) == (2, 7)


def _reference(family: str, folder: Path):  # type: ignore[no-untyped-def]
    """Returns a transformers model with random float32 weights, saved to the folder."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    make_config, make_model = kinds[family.split("-")[0]]
    torch.manual_seed(5)
    config = make_config(
        vocab_size=11,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=2,
        **cast(dict[str, Any], FAMILIES[family]),
    )
    model = make_model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # they start as constants, which would hide wrong use
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model, folder


def _positions(tokens_BT: Tensor) -> Tensor:
    return torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)


def _gradients(decoder: Decoder, loss: Tensor) -> dict[str, Tensor]:
    decoder.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


def test_all_layers_of_a_pass_keep_the_same_mask_for_the_backward_pass(decoder: Decoder) -> None:
    length, masks = 11, set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (length, length):
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    tokens, positions = torch.ones(1, length, dtype=torch.long), torch.arange(length)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(tokens, positions, segments_BT=torch.zeros_like(tokens))
    assert decoder.shape.num_layers > 1 and len(masks) == 1
