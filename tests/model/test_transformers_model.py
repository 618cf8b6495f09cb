"""Models of other families, through transformers: packing, gradients, saving and loading."""

import json
from pathlib import Path

import pytest
import torch
from small_models import FAMILIES, SMALL, WITH_STATES, folder_of
from torch import Tensor

from shoal.model.builtin import create_model
from shoal.model.decoder import Decoder
from shoal.model.load_model import load_causal, read_model_limits
from shoal.model.logprobs import token_logprobs
from shoal.model.transformers_model import CachedRows, TransformersModel
from shoal.model.weights import save_weights

PARTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8, 4]]


@pytest.fixture(params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> TransformersModel:
    create_model(str(folder_of(request.param, tmp_path / "theirs")), tmp_path / "ours", seed=0)
    loaded = load_causal(tmp_path / "ours")
    assert isinstance(loaded, TransformersModel)
    return loaded


def gradients(model: TransformersModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logprobs(model: TransformersModel, tokens: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
    hidden = model(tokens, positions, segments_BT=segments)
    return token_logprobs(model, hidden.flatten(0, 1), tokens.flatten(), temperature=0.8, chunk=5)


def test_packed_samples_have_the_loss_and_gradients_of_separate_ones(model: TransformersModel) -> None:
    alone = torch.cat([logprobs(model, torch.tensor([p]), torch.arange(len(p))[None], None) for p in PARTS])
    weights = torch.linspace(-1, 1, len(alone))
    expected = gradients(model, (alone * weights).sum())

    tokens, positions = torch.zeros(2, 13, dtype=torch.long), torch.zeros(2, 13, dtype=torch.long)
    segments = torch.full((2, 13), -1)
    where: list[int] = []
    for index, (row, start) in enumerate([(0, 0), (0, 8), (1, 0)]):
        at = slice(start, start + len(PARTS[index]))
        tokens[row, at] = torch.tensor(PARTS[index])
        positions[row, at] = torch.arange(len(PARTS[index]))
        segments[row, at] = index
        where += range(row * 13 + start, row * 13 + start + len(PARTS[index]))
    packed = logprobs(model, tokens, positions, segments)[torch.tensor(where)]

    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    found = gradients(model, (packed * weights).sum())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-6, name


def test_logits_and_names_equal_those_of_transformers_after_saving(
    model: TransformersModel, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    save_weights(model, tmp_path / "ours" / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert dict(model.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    tokens = torch.tensor([PARTS[0]])
    with torch.no_grad():
        ours = model.logits(model(tokens, torch.arange(len(PARTS[0]))[None]))
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_only_a_family_that_cannot_be_packed_gets_one_sample_per_row(tmp_path: Path) -> None:
    packs = {}
    for family in FAMILIES:
        create_model(str(folder_of(family, tmp_path / family)), tmp_path / f"{family}-0", seed=0)
        loaded = load_causal(tmp_path / f"{family}-0")
        assert isinstance(loaded, TransformersModel)
        assert len(loaded.blocks()) == 2
        packs[family] = loaded.packs
    assert packs == {
        family: family != "bloom" for family in FAMILIES
    }  # ALiBi counts positions from the row's start


@pytest.mark.parametrize("family", [*WITH_STATES, "mistral"])
@torch.inference_mode()
def test_rows_that_leave_the_cache_do_not_change_the_others(family: str, tmp_path: Path) -> None:
    create_model(str(folder_of(family, tmp_path / "theirs")), tmp_path / "0", seed=0)
    model = load_causal(tmp_path / "0")
    assert isinstance(model, TransformersModel)
    assert model.caches == (family != "minimax"), (
        "MiniMax's cache has been repaired; say so in docs/guides/scale.md"
    )
    tokens_BT = torch.arange(4 * 16).view(4, 16) * 5 % 37
    kept, fed = torch.arange(4), CachedRows(model)
    fed.feed(tokens_BT[:, :6])
    for place in range(6, 16):
        if (rows := {8: [0, 2, 3], 12: [1, 2]}.get(place)) is not None:
            fed.select(torch.tensor(rows))
            kept = kept[rows]
        states_BTH = fed.feed(tokens_BT[kept, place : place + 1])
    whole_BTH = model(tokens_BT[kept], torch.arange(16).expand(2, -1))
    torch.testing.assert_close(states_BTH[:, 0], whole_BTH[:, -1], rtol=1e-3, atol=1e-3)


def test_supported_families_are_loaded_as_decoder(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "m", seed=0)
    assert isinstance(load_causal(tmp_path / "m"), Decoder)


def test_an_unreadable_folder_gives_both_reasons(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ValueError, match=r"model_type='nonesuch' is not supported.*transformers says"):
        create_model(str(tmp_path / "m"), tmp_path / "v0", seed=0)


def test_a_bare_config_builds_no_model_of_the_familys_default_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileNotFoundError, match=r"no weights at .*; a model folder holds model\.safetensors"):
        load_causal(tmp_path)


def test_a_folder_that_cannot_compute_is_refused_with_the_reason(tmp_path: Path) -> None:
    """transformers builds the model and saves it; only a forward pass shows that the sizes do not fit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("helium", **SMALL, num_key_value_heads=2, head_dim=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"transformers cannot compute with it: mat1 .*; correct config\.json"
    ):
        load_causal(tmp_path)


def test_sizes_with_which_transformers_cannot_calculate_are_refused(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "m", seed=0)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    with pytest.raises(ValueError, match="num_attention_heads='0' is not a positive whole number"):
        read_model_limits(tmp_path / "m")
