"""Tokenizers: prompts and answers round-trip, end tokens are those of the model."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shoal.model.builtin import create_model
from shoal.model.tokenizer import load_tokenizer
from shoal.tasks import make_task
from shoal.wire.run_spec import TaskSpec


def test_characters_round_trip_without_special_tokens(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "m", seed=0)
    tokenizer = load_tokenizer(tmp_path / "m")
    prompt, answer = tokenizer.encode_prompt("47+38=", chat=True), tokenizer.encode_answer("85")
    assert len(prompt) == 7
    assert answer[-1] in tokenizer.end_tokens
    assert tokenizer.decode(prompt + answer) == "47+38=85"
    assert max(prompt + answer) < tokenizer.vocab_size
    assert tokenizer.decode(range(tokenizer.vocab_size)) != ""


def test_tiny_can_read_every_task(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "m", seed=0)
    tokenizer = load_tokenizer(tmp_path / "m")
    for spec in (
        TaskSpec(name="sort"),
        *(TaskSpec(name="add", options={"style": s}) for s in ("bare", "chat", "shots")),
    ):
        problem = make_task(spec).problem("train", 1)
        assert tokenizer.decode(tokenizer.encode_prompt(problem.prompt, chat=True)) == problem.prompt


def test_an_unknown_character_is_named(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "m", seed=0)
    with pytest.raises(ValueError, match="character 'é' in 'café'"):
        load_tokenizer(tmp_path / "m").encode_prompt("café", chat=True)


@pytest.mark.parametrize("content", ["{}", '{"alphabet": ["a", "bc"]}', "[]", "[" * 100_000])
def test_a_file_without_an_alphabet_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "char_tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"char_tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ '<u>' + m['content'] + '<e>' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    ],
)
def test_a_hugging_face_tokenizer_uses_its_chat_template_if_it_has_one(
    template: str | None, tmp_path: Path
) -> None:
    create_model("tiny", tmp_path / "m", seed=0)
    folder = tmp_path / "m"
    (folder / "char_tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [0, 1]}))
    specials = ["<e>", "<end>", "<u>", "<a>"]
    raw = RawTokenizer(models.BPE({token: index for index, token in enumerate([*specials, "1", "2"])}, []))
    raw.add_special_tokens(specials)
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>")
    fast.chat_template = template
    fast.save_pretrained(folder)

    tokenizer = load_tokenizer(folder)

    assert tokenizer.encode_prompt("12", chat=True) == ([4, 5] if template is None else [2, 4, 5, 0, 3])
    assert tokenizer.encode_prompt("12", chat=False) == [4, 5]
    assert tokenizer.encode_answer("21") == [5, 4, 0]
    assert tokenizer.decode([5, 4, 0]) == "21"
    assert tokenizer.end_tokens == {0, 1}
    assert tokenizer.vocab_size == config["vocab_size"]


def test_an_answer_ends_with_an_end_token_of_the_vocabulary(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "m", seed=0)
    folder = tmp_path / "m"
    (folder / "char_tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [99_999, 1]}))
    RawTokenizer(models.WordLevel({"1": 0, "<end>": 1}, unk_token="1")).save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.end_tokens == {1}
    assert tokenizer.encode_answer("1") == [0, 1]
