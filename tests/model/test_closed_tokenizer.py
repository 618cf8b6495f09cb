"""The closed loader gives the ids of transformers, executes nothing of a folder, and refuses what it cannot read."""

import base64
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_chat_template import GEMMA, LLAMA3, MISTRAL, QWEN3, QWEN25
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from planted_code import name_code
from shoal.model import tokenizer as tokenizer_module
from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 1234567890 + 42 = ?",
    "def f(x):\n    return x * 2  # double\n",
    "Grüße aus Köln — „naïve“ café, 東京 и Москва 🙂",
] * 20
TEXTS = [
    "",
    "What is 12+34?",
    "  two  spaces\n\n\tand a tab ",
    "Grüße, 東京 🙂 \u0000\u200b",
    "<|im_start|>user\nx<|im_end|> </s><s>",
    "<think>hm</think> <extra>",
    "x" * 300,
]
IM = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def byte_level_bpe() -> Tokenizer:
    """Returns a tokenizer like those of Qwen and Llama 3: BPE on bytes, split by a pattern."""
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                pattern=Regex(r"\p{N}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    raw.add_special_tokens(IM)
    raw.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return raw


def metaspace_unigram() -> Tokenizer:
    """Returns a tokenizer like a converted SentencePiece one: unigram with ▁ for spaces, and <s> before a text."""
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    specials = ["<unk>", "<s>", "</s>"]
    raw.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=specials, unk_token="<unk>", show_progress=False
        ),
    )
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return raw


def fallback_bpe() -> Tokenizer:
    """Returns a tokenizer like those of Gemma and Llama 2: BPE with byte fallback, and truncation and padding in the file."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=specials[:3], show_progress=False)
    )
    raw.add_tokens([AddedToken("<extra>", lstrip=True, rstrip=True)])
    raw.enable_truncation(8)
    raw.enable_padding(length=16)
    return raw


KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "qwen": (
        byte_level_bpe,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": QWEN25},
    ),
    "qwen3": (
        byte_level_bpe,
        {"eos_token": "<|im_end|>", "extra_special_tokens": IM, "chat_template": QWEN3},
    ),
    "llama 3": (
        byte_level_bpe,
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": LLAMA3},
    ),
    "mistral": (metaspace_unigram, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": MISTRAL}),
    "gemma": (
        fallback_bpe,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": GEMMA},
    ),
    "base": (metaspace_unigram, {"bos_token": "<s>", "eos_token": "</s>"}),
    "new special tokens": (
        byte_level_bpe,
        {"eos_token": "<end of all>", "additional_special_tokens": ["<tool>"]},
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a model folder without a tokenizer."""
    create_model("tiny", tmp_path / "m", seed=0)
    (tmp_path / "m" / "char_tokenizer.json").unlink()
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(
        json.dumps(config | {"vocab_size": 1000, "eos_token_id": None})
    )
    return tmp_path / "m"


def save(folder: Path, kind: str) -> None:
    make, settings = KINDS[kind]
    PreTrainedTokenizerFast(tokenizer_object=make(), **settings).save_pretrained(folder)


def change_tokenizer(folder: Path, **parts: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


@pytest.mark.parametrize("template_in", ["its own file", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind: str, template_in: str, folder: Path) -> None:
    save(folder, kind)
    separate = folder / "chat_template.jinja"
    if template_in == "tokenizer_config.json" and separate.exists():
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": separate.read_text()}))
        separate.unlink()
    theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    ours = load_tokenizer(folder)
    assert ours.end_tokens == {theirs.eos_token_id}
    for text in TEXTS:
        plain = list(theirs.encode(text))
        assert ours.encode_prompt(text, chat=False) == plain
        if theirs.chat_template:
            turns = [{"role": "user", "content": text}]
            prompt = theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            wanted = list(theirs.encode(prompt, add_special_tokens=False))
            assert len(wanted) > 5
        else:
            wanted = plain
        assert ours.encode_prompt(text, chat=True) == wanted
        answer = list(theirs.encode(text, add_special_tokens=False))
        assert ours.encode_answer(text) == [*answer, theirs.eos_token_id]
        assert ours.decode(answer) == theirs.decode(answer, skip_special_tokens=True)


def test_special_tokens_of_older_models_are_in_a_file_of_their_own(folder: Path) -> None:
    save(folder, "gemma")
    (folder / "tokenizer_config.json").write_text("{}")
    content = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": content}))
    assert load_tokenizer(folder).end_tokens == {2}


def test_several_templates_need_one_called_default(folder: Path) -> None:
    save(folder, "base")
    path = folder / "tokenizer_config.json"
    settings, named = (
        json.loads(path.read_text()),
        [{"name": "default", "template": "<s>{{ messages[0].content }}"}],
    )
    path.write_text(json.dumps(settings | {"chat_template": named}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_prompt("x", chat=True) == tokenizer.encode_prompt("x", chat=False)
    for name in ("rag", ["rag"]):
        path.write_text(json.dumps(settings | {"chat_template": [{"name": name, "template": "x"}]}))
        with pytest.raises(ValueError, match=r"none of the chat templates \[.*rag.*\] is called 'default'"):
            load_tokenizer(folder)


# -- folders that are hostile or damaged --------------------------------------------------------------------


def test_a_raw_sentencepiece_model_is_refused_with_the_way_to_convert_it(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "tokenizer.model").write_bytes(b"\x0a\x07\x0a\x03<s>")
    with pytest.raises(
        ValueError,
        match=r"no tokenizer\.json, only tokenizer\.model\. Convert .*sentencepiece.*save_pretrained",
    ):
        load_tokenizer(folder)
    with pytest.raises(ValueError, match=r"only tokenizer\.model\. Convert"):
        create_model(str(folder), tmp_path / "copy", seed=0)


PLANTED = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\npathlib.Path('{0}').touch()\n"


@pytest.fixture
def planted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns a folder whose files name Python code in it, with a terminal that answers `y`. Nothing of it may have run."""
    save(folder, "qwen")
    mark = tmp_path / "ran"
    name_code(folder, tokenizer_class="Evil")
    for name in ("evil.py", "tokenization_evil.py", "__init__.py", "sitecustomize.py"):
        (folder / name).write_text(PLANTED.format(mark))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    yield folder
    assert not mark.exists() and not (folder / "ran").exists()


def test_code_in_a_model_folder_does_not_run(planted: Path) -> None:
    """The worker, the validator, check-local and `shoal eval` load a version by these two functions."""
    tokenizer = load_tokenizer(planted)
    assert tokenizer.encode_prompt("x", chat=True)
    config = json.loads((planted / "config.json").read_text())
    (planted / "config.json").write_text(json.dumps(config | {"vocab_size": 88}))
    load_decoder(planted)
    assert not any("evil" in name for name in sys.modules)


def test_code_in_a_model_folder_does_not_run_in_the_trainer(planted: Path, tmp_path: Path) -> None:
    config = json.loads((planted / "config.json").read_text())
    (planted / "config.json").write_text(json.dumps(config | {"model_type": "evil"}))
    with pytest.raises(ValueError, match="evil"):
        create_model(str(planted), tmp_path / "copy", seed=0)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"garbage", b"\x80\x04\x95pickle", b"[]", b"{}", b"null", b"[" * 100_000, b'{"a":' * 100_000),
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["x y"]}}',
        b'{"version":"1.0","model":{"type":"Unigram","vocab":[],"unk_id":5}}',
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_tokenizer_file_that_is_garbage_is_refused(content: bytes, folder: Path) -> None:
    save(folder, "qwen")
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"[]", b"[" * 100_000, b"\xff\xfe"], ids=lambda content: repr(content[:9])
)
def test_settings_that_are_garbage_are_refused(name: str, content: bytes, folder: Path) -> None:
    save(folder, "qwen")
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("tokenizer.json", "MAX_TOKENIZER_BYTES"), ("tokenizer_config.json", "MAX_SETTINGS_BYTES")],
)
def test_a_huge_file_is_refused_before_it_is_read(name: str, limit: str, folder: Path) -> None:
    save(folder, "qwen")
    with (folder / name).open("ab") as file:
        file.truncate(getattr(tokenizer_module, limit) + 1)  # a sparse file, which takes no space
    with pytest.raises(ValueError, match=rf"{name} has \d+ bytes, at most"):
        load_tokenizer(folder)


TWICE = processors.TemplateProcessing(single="$A $A", special_tokens=[])
MANY_IDS = [{"id": "<s>", "ids": [1] * 3000, "tokens": ["<s>"] * 3000}]
BOMBS: dict[str, tuple[str, Any]] = {
    "replacements": ("normalizer", normalizers.Sequence([normalizers.Replace("a", "aaaa")] * 14)),
    "empty matches": ("normalizer", normalizers.Sequence([normalizers.Replace(Regex("(?=.)"), "xy")] * 8)),
    "nested": (
        "normalizer",
        normalizers.Sequence([normalizers.Sequence([normalizers.Prepend("x" * 80)] * 2)] * 2),
    ),
    "bytes of bytes": (
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(use_regex=False)] * 30),
    ),
    "repeated text": ("post_processor", processors.Sequence([TWICE] * 30)),
    "long template": (
        "post_processor",
        processors.TemplateProcessing(single=["<s>", "$A"] * 3000, special_tokens=MANY_IDS),
    ),
    "decoder": ("decoder", decoders.Sequence([decoders.Replace("a", "aaaa")] * 14)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_steps_that_multiply_a_text_are_refused(name: str, folder: Path) -> None:
    save(folder, "gemma")
    field, part = BOMBS[name]
    change_tokenizer(folder, **{field: json.loads(part.__getstate__())})
    words = "a token may become more than 4096" if field == "decoder" else "times as long"
    with pytest.raises(ValueError, match=words):
        load_tokenizer(folder)


def test_added_tokens_that_a_normalizer_makes_long_are_refused(folder: Path) -> None:
    save(folder, "gemma")
    change_tokenizer(folder, normalizer=json.loads(normalizers.Replace("a", "a" * 1000).__getstate__()))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    token = {"content": "a" * 100_000, "normalized": True, "special": False}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"added_tokens_decoder": {"900": token}})
    )
    with pytest.raises(ValueError, match="added tokens may become 100000000 characters"):
        load_tokenizer(folder)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    change_tokenizer(folder, added_tokens=[*added, added[-1] | token])
    with pytest.raises(ValueError, match=r"added tokens may become \d+ characters"):
        load_tokenizer(folder)


def test_a_long_token_is_refused(folder: Path) -> None:
    save(folder, "gemma")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_tokens(["x" * 10_000])
    raw.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="a token may become more than 4096 characters"):
        load_tokenizer(folder)


def test_a_duplicate_key_is_refused(folder: Path) -> None:
    save(folder, "gemma")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.rstrip().removesuffix("}") + ', "normalizer": null}')
    with pytest.raises(ValueError, match="duplicate key"):
        load_tokenizer(folder)


def test_a_map_of_characters_to_long_texts_is_refused(folder: Path) -> None:
    save(folder, "gemma")
    charsmap = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"x" * 5000 + b"\0")
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap.decode()}
    change_tokenizer(folder, normalizer=normalizer)
    with pytest.raises(ValueError, match="times as long"):
        load_tokenizer(folder)


def test_a_long_prompt_is_refused_where_steps_may_lengthen_it(folder: Path) -> None:
    save(folder, "gemma")
    change_tokenizer(folder, normalizer=json.loads(normalizers.Replace("a", "a" * 1000).__getstate__()))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_prompt("ab", chat=False)
    with pytest.raises(ValueError, match=r"a prompt of 100000 characters may become \d+ times as long"):
        tokenizer.encode_prompt("a" * 100_000, chat=False)


def test_steps_of_converted_sentencepiece_models_are_known(folder: Path) -> None:
    save(folder, "mistral")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), "▁")])
    strip = decoders.Strip(" ", 1, 0)
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_prompt("The fox " * 30_000, chat=False)).startswith(
        "The fox The"
    )


def test_tokens_without_an_embedding_are_refused(folder: Path) -> None:
    save(folder, "qwen")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 10, "eos_token_id": 2}))
    with pytest.raises(ValueError, match="vocab_size=10"):
        load_tokenizer(folder).encode_prompt("What is 12+34?", chat=True)


@pytest.mark.parametrize("added", [[], {"900": "lstrip"}, {"900": {"content": 5}}])
def test_wrong_kinds_of_settings_are_ignored(added: object, folder: Path) -> None:
    save(folder, "qwen")
    wrong = {
        "eos_token": 7,
        "bos_token": ["x"],
        "chat_template": 5,
        "extra_special_tokens": 3,
        "added_tokens_decoder": added,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(wrong))
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    assert load_tokenizer(folder).encode_prompt("12", chat=True)


def test_a_folder_that_disappears_is_named(folder: Path) -> None:
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_tokenizer(folder)
