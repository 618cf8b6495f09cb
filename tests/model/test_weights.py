"""Weights are saved and loaded bit for bit and in place, and a wrong file changes nothing."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.model.builtin import create_model
from shoal.model.load_model import empty_decoder, load_causal, load_decoder
from shoal.model.shape import read_end_tokens, read_shape
from shoal.model.weights import find_weight_files, load_weights, save_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_model("tiny", tmp_path / "v0", seed=1)
    return tmp_path / "v0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_in_place_equals_a_fresh_load_bit_for_bit(
    dtype: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    create_model("tiny", tmp_path / "v1", seed=2)
    swapped = load_decoder(folder, dtype)
    addresses = [parameter.data_ptr() for parameter in swapped.parameters()]

    load_weights(swapped, tmp_path / "v1" / "model.safetensors")

    fresh = load_decoder(tmp_path / "v1", dtype)
    assert [parameter.data_ptr() for parameter in swapped.parameters()] == addresses
    for (name, mine), (_, expected) in zip(swapped.named_parameters(), fresh.named_parameters(), strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, expected), name


def test_saving_is_deterministic_and_rounds_once(folder: Path, tmp_path: Path) -> None:
    decoder = load_decoder(folder)
    save_weights(decoder, tmp_path / "a.safetensors")
    save_weights(decoder, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert (tmp_path / "a.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert {tensor.dtype for tensor in load_file(tmp_path / "a.safetensors").values()} == {torch.bfloat16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "v0"]


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape", "type", "garbage", "absent"])
def test_a_wrong_file_is_an_error_and_changes_nothing(fault: str, folder: Path, tmp_path: Path) -> None:
    decoder = load_decoder(folder)
    before = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    norm = "model.norm.weight"
    match fault:
        case "missing":
            del tensors[norm]
        case "surplus":
            tensors["model.extra.weight"] = torch.zeros(1)
        case "shape":
            tensors[norm] = torch.zeros(7)
        case "type":
            tensors[norm] = torch.zeros(128, dtype=torch.int8)
    wrong = tmp_path / "wrong.safetensors"
    if fault == "garbage":
        wrong.write_bytes(b"\x08" + b"\x00" * 40)
    elif fault != "absent":
        save_file(tensors, wrong)
    expected = {
        "missing": "1 parameters are missing, first 'model.norm.weight'",
        "surplus": "'model.extra.weight' is not a parameter",
        "shape": r"model.norm.weight has shape \(7,\), config.json asks for \(128,\)",
        "type": "model.norm.weight is stored as I8; known: F64, F32",
        "garbage": "not a readable safetensors file",
        "absent": "no weights at",
    }

    with pytest.raises((ValueError, FileNotFoundError), match=expected[fault]):
        load_weights(decoder, wrong)
    assert all(torch.equal(before[name], parameter) for name, parameter in decoder.named_parameters())


def test_a_tied_matrix_stored_twice_is_loaded_once(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "twice.safetensors")
    decoder = empty_decoder(read_shape(folder))
    load_weights(decoder, tmp_path / "twice.safetensors")
    assert torch.equal(decoder.model.embed_tokens.weight, load_decoder(folder).model.embed_tokens.weight)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10_000_000},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": "9" * 5000},
        {"num_hidden_layers": 2.5},
        {"hidden_size": 2**31},
        {"vocab_size": 2**40},
        {"intermediate_size": 2**40},
        {"num_attention_heads": 0},
        {"num_attention_heads": 10**6, "head_dim": 1},
        {"max_position_embeddings": 2**31},
        {"model_type": "gpt2", "max_position_embeddings": 2**31, "n_embd": 128, "n_head": 4},
        {"model_type": "gpt2", "n_layer": 10_000_000, "num_hidden_layers": None},
        {"model_type": "mixtral", "num_local_experts": 10_000_000},
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10_000_000, "hidden_size": 64}},
    ],
    ids=str,
)
def test_a_model_that_is_larger_than_its_weights_is_not_built(
    folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Its layers would fill a volunteer's memory before the weights are compared with them."""
    hostile = shutil.copytree(folder, tmp_path / "hostile")
    config = json.loads((folder / "config.json").read_text())
    (hostile / "config.json").write_text(json.dumps(config | change))
    words = r"the weights have \d+ bytes|is not a positive whole number|more memory .* than the weights"
    with pytest.raises(ValueError, match=words):
        load_causal(hostile)


@pytest.mark.parametrize(
    "change",
    [
        {name: value}
        for name in (
            "max_position_embeddings",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
        )
        for value in (-1, "x", [1], {"a": 1}, 10**40)
    ],
    ids=str,
)
def test_a_setting_of_another_kind_is_no_error_of_a_library(
    folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """A version's folder comes from an operator whom the owner of a worker may not trust. transformers accepts some of them."""
    hostile = shutil.copytree(folder, tmp_path / "hostile")
    config = json.loads((folder / "config.json").read_text())
    (hostile / "config.json").write_text(json.dumps(config | change))
    with suppress(ValueError):
        load_causal(hostile)


def test_end_tokens_are_tokens(folder: Path) -> None:
    for value in (-1, "x", [2, None], True, 1.5):
        with pytest.raises(ValueError, match="is not a token"):
            read_end_tokens(folder, {"eos_token_id": value})


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("adapter_config.json", "is an adapter, not a whole model; merge it into its base model first"),
        ("pytorch_model.bin", r"has \*\.bin files only; convert the weights to safetensors first"),
        ("config.json", r"a model folder holds model\.safetensors"),
    ],
)
def test_missing_weights_are_explained_by_what_is_there(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(FileNotFoundError, match=words):
        find_weight_files(tmp_path / "model.safetensors")
