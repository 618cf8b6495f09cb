"""Tests of model families that only transformers knows: loaded, divided into fragments, trained in rounds."""

import functools
import threading
from pathlib import Path

import pytest
import torch
from local_swarm import in_threads, make_peer

from shoal.diloco import LocalHub
from shoal.diloco.fragments import fragments_of
from shoal.diloco.site.diloco_file import load_diloco_file
from shoal.diloco.site.language import load_language_model, next_token_loss, text_encoder
from shoal.diloco.site.site import Site
from shoal.model.decoder import Decoder

transformers = pytest.importorskip("transformers")

WORDS = ["<pad>", "<eos>", "<unk>", "the", "sea", "is", "wide", "and", "fish", "are", "many"]
TEXT = "the sea is wide and the fish are many " * 60


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a GPT-2 with four layers: learnt positions, layer norms and biases, which the decoder does not have."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=32, n_embd=16, n_layer=4, n_head=2, eos_token_id=1, bos_token_id=1
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def test_unknown_model_family_is_loaded_by_transformers(gpt2: Path) -> None:
    model = load_language_model(gpt2, "cpu")
    assert not isinstance(model, Decoder)
    tokens = torch.tensor([text_encoder(gpt2)("the sea is wide")])
    assert tokens[0, -1] == 1, "the end token follows a text"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gpt2)(tokens, labels=tokens).loss
    assert next_token_loss(model, tokens).item() == pytest.approx(theirs.item(), abs=1e-5)
    parts = fragments_of(model, 2)
    assert sum(part.num_values for part in parts) == sum(one.numel() for one in model.parameters())


def test_two_sites_train_a_transformers_model_to_one_state(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
[run]
name = "foreign"
model = "{gpt2}"
steps = 12
engine = "local"
[data]
files = ["{tmp_path}/text.txt"]
sequence = 12
[inner]
lr = 1e-2
warmup_steps = 1
batch = 4
micro_batch = 4
[rounds]
inner_steps = 4
fragments = 2
codec = "int8"
deadline_s = 60.0
min_peers = 2
"""
    )
    file, hub = load_diloco_file(path), LocalHub()
    sites = [
        Site(
            file,
            make_peer(hub, codec="int8", min_peers=2),
            folder=tmp_path / name,
            device="cpu",
            peer=name,
            stop=threading.Event(),
        )
        for name in ("one", "two")
    ]
    before = sites[0]._validate()
    first, second = in_threads([functools.partial(site.train, join_s=30) for site in sites])
    assert sites[0].optimizer.outer_state.digest() == sites[1].optimizer.outer_state.digest()
    assert sites[0].optimizer.outer_state.round == 6
    assert max(first.validation, second.validation) < before - 0.2
    for site in sites:
        site.close()
