"""Turns text into tokens and back.

CharTokenizer is for the built-in model `tiny`; other models have a tokenizer.json of the library `tokenizers` in their folder.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.model.chat_template import THOUGHT_END, render_chat, template_thinks
from shoal.model.shape import read_end_tokens, read_json, read_vocab_size
from shoal.wire.lease import Lease

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

CHAR_FILE = "char_tokenizer.json"
TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TOKENIZER_BYTES = 64 << 20
"""Largest tokenizer.json that is read. That of Gemma 3, with 262,144 tokens, has 33 MB."""
MAX_SETTINGS_BYTES = 4 << 20
"""Largest tokenizer_config.json, special_tokens_map.json and chat template that is read."""
MAX_GROWTH = 1 << 12
"""Most times that the steps of a tokenizer may lengthen a text. Known models stay below 200."""
MAX_ENCODED_CHARS = 1 << 26
"""Longest text that encoding may make of a prompt before it becomes tokens; the library takes about 50 bytes for each character."""
MAX_DECODED_CHARS = 1 << 12
"""Most characters that decoding may make of one token. The longest tokens of known models have some hundred."""

_GROWTH = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 36,  # of a normalizer
    "Metaspace": 2, "ByteLevel": 4,  # of a pre-tokenizer: a space before each word, a character for each byte
    "WordPiece": 2, "BPEDecoder": 2, "CTC": 2,  # of a decoder: spaces between tokens
    "BertProcessing": 3, "RobertaProcessing": 3,  # of a post-processor: special tokens around a text
}  # fmt: skip
"""Most characters (or tokens) that a step of a tokenizer makes of one. Steps that are not listed make at most one."""


@dataclass(frozen=True, slots=True)
class ChatSetting:
    """What a chat template gets besides the prompt."""

    turns: tuple[tuple[str, str], ...] = ()
    """Roles and texts of the turns before the prompt."""
    arguments: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def plain_text(self, prompt: str) -> str:
        """Returns the conversation without a template."""
        return "\n\n".join([text for _, text in self.turns] + [prompt])


PLAIN = ChatSetting()


class Tokenizer(Protocol):
    """The interface of a tokenizer that the engine, the trainer and the validator use."""

    end_tokens: frozenset[int]
    """Tokens that end an answer. The end token is part of the answer."""
    vocab_size: int
    """A model draws tokens 0 .. vocab_size-1."""
    control_tokens: Mapping[int, str]
    """Tokens that structure a prompt, such as `<|im_end|>`, and their texts."""

    def encode_prompt(self, text: str, *, chat: bool, setting: ChatSetting = PLAIN) -> list[int]:
        """Returns the tokens of a prompt: with `chat` as a user's turn in the chat template, if there is one.

        Without a template, the turns before the prompt are put in front of it, with empty lines between them.
        """

    def encode_turns(self, turns: list[dict[str, str]]) -> list[int]:
        """Returns the tokens of the turns of a chat (role, content), up to where the assistant's next turn begins."""

    def thinks(self, *, chat: bool, setting: ChatSetting = PLAIN) -> bool:
        """Returns whether the chat template makes the model think first. Then only the text after `</think>` is its answer."""

    def encode_answer(self, text: str) -> list[int]:
        """Returns the tokens of an answer, with an end token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of an answer without special tokens, but with the end of a thought."""


def leased_setting(lease: Lease, prompt_index: int) -> ChatSetting:
    """Returns what the chat template gets for a prompt of a lease."""
    turns = tuple((one.role, one.content) for one in lease.context(prompt_index))
    return ChatSetting(turns, lease.task.chat_template_kwargs)


def encode_leased_prompts(lease: Lease, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of each prompt of a lease. Workers and validators both use it. Raises ValueError."""
    return [
        tokenizer.encode_prompt(prompt, chat=lease.chat, setting=leased_setting(lease, index))
        for index, prompt in enumerate(lease.prompts)
    ]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a model folder, without network access."""
    if (folder / CHAR_FILE).exists():
        return CharTokenizer.load(folder)
    return FileTokenizer(folder)


class CharTokenizer:
    """Has one token per character of a fixed alphabet, after <pad>, <bos> and <eos>."""

    PAD, BOS, EOS = 0, 1, 2

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet):
            raise ValueError(f"alphabet {alphabet!r} contains a character twice")
        self.alphabet = alphabet
        self.end_tokens = frozenset({self.EOS})
        self.vocab_size = 3 + len(alphabet)
        self.control_tokens: Mapping[int, str] = {self.PAD: "<pad>", self.BOS: "<bos>", self.EOS: "<eos>"}
        self._ids = {char: 3 + index for index, char in enumerate(alphabet)}

    @classmethod
    def load(cls, folder: Path) -> "CharTokenizer":
        """Reads the alphabet from a model folder."""
        alphabet = read_json(folder / CHAR_FILE).get("alphabet")
        if not isinstance(alphabet, str):
            raise ValueError(
                f"{folder / CHAR_FILE} has no alphabet, which is a string with each character of the model once"
            )
        return cls(alphabet)

    def save(self, folder: Path) -> None:
        """Writes the alphabet to a model folder."""
        (folder / CHAR_FILE).write_text(json.dumps({"alphabet": self.alphabet}) + "\n", encoding="utf-8")

    def encode_prompt(self, text: str, *, chat: bool, setting: ChatSetting = PLAIN) -> list[int]:
        return [self.BOS, *self._encode(setting.plain_text(text))]

    def encode_turns(self, turns: list[dict[str, str]]) -> list[int]:
        return self.encode_prompt("".join(turn["content"] for turn in turns), chat=True)

    def thinks(self, *, chat: bool, setting: ChatSetting = PLAIN) -> bool:
        return False

    def encode_answer(self, text: str) -> list[int]:
        return [*self._encode(text), self.EOS]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.alphabet[token - 3] for token in tokens if 3 <= token < self.vocab_size)

    def _encode(self, text: str) -> list[int]:
        try:
            return [self._ids[char] for char in text]
        except KeyError as error:
            raise ValueError(
                f"character {error.args[0]!r} in {text[:80]!r} is not in the model's alphabet {self.alphabet!r}"
            ) from None


class FileTokenizer:
    """The tokenizer of a model folder's tokenizer.json.

    The folder may come from an operator whom the owner of this machine does not trust, so nothing in it is executed: the
    library `tokenizers` reads tokenizer.json, this class reads the few settings that it needs of tokenizer_config.json, and the
    chat template is rendered in a child process. Classes that the files name are ignored.
    """

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "config.json")
        settings = _read_settings(folder)
        self._raw = _read_tokenizer(folder)
        self._special_tokens = {
            name: content
            for name, value in settings.items()
            if name.endswith("_token") and (content := _content(value))
        }
        _add_missing_tokens(self._raw, settings, self._special_tokens)
        self._growth = _check_growth(self._raw, folder / TOKENIZER_FILE)
        self._raw.encode_special_tokens = settings.get("split_special_tokens") is True
        self._template = _read_template(folder, settings)
        end = self._special_tokens.get("eos_token")
        own = None if end is None else self._raw.token_to_id(end)
        self.vocab_size = read_vocab_size(folder, config)
        named = read_end_tokens(folder, config) or (() if own is None else (own,))
        ends = [token for token in named if token < self.vocab_size]
        self.end_tokens = frozenset(ends)
        if not self.end_tokens:
            raise ValueError(
                f"{folder}: neither config.json nor the tokenizer names an end token of the vocabulary (eos_token_id)"
            )
        added = self._raw.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self.control_tokens: Mapping[int, str] = self._find_control_tokens()
        self._thought_end = special.get(THOUGHT_END, -1)
        self._end: int = own if own in self.end_tokens else ends[0]

    @property
    def has_template(self) -> bool:
        """Whether the folder has a chat template; without one, prompts of chat tasks are given as plain text."""
        return self._template is not None

    def encode_prompt(self, text: str, *, chat: bool, setting: ChatSetting = PLAIN) -> list[int]:
        if not chat or self._template is None:
            return self._encode(setting.plain_text(text), add_special_tokens=True)
        turns = [{"role": role, "content": content} for role, content in (*setting.turns, ("user", text))]
        return self._encode_rendered(self._template, turns, setting.arguments)

    def encode_turns(self, turns: list[dict[str, str]]) -> list[int]:
        if self._template is None:
            raise ValueError("the model has no chat template; send a prompt instead of turns")
        return self._encode_rendered(self._template, turns, {})

    def _encode_rendered(
        self, template: str, turns: list[dict[str, str]], arguments: Mapping[str, bool | int | float | str]
    ) -> list[int]:
        prompt = render_chat(template, turns, self._special_tokens, arguments)
        return self._encode(prompt, add_special_tokens=False)

    def thinks(self, *, chat: bool, setting: ChatSetting = PLAIN) -> bool:
        if not chat or self._template is None:
            return False
        arguments = json.dumps(dict(setting.arguments), sort_keys=True)
        return template_thinks(self._template, json.dumps(self._special_tokens), arguments)

    def encode_answer(self, text: str) -> list[int]:
        return [*self._encode(text, add_special_tokens=False), self._end]

    def decode(self, tokens: Sequence[int]) -> str:
        tokens = list(tokens)
        if self._thought_end not in tokens:
            return str(self._raw.decode(tokens, skip_special_tokens=True))
        # As a special token it would be left out, and the whole thought would be graded, or nothing.
        place = len(tokens) - 1 - tokens[::-1].index(self._thought_end)
        parts = (
            self._raw.decode(part, skip_special_tokens=True) for part in (tokens[:place], tokens[place + 1 :])
        )
        return THOUGHT_END.join(parts)

    def _find_control_tokens(self) -> dict[int, str]:
        """Returns special tokens, end tokens, and added tokens that the chat template writes, with their texts.

        The roles of DeepSeek's template are not marked as special. The token for unknown characters is left out: any text may have it.
        """
        found = {
            number: token.content
            for number, token in self._raw.get_added_tokens_decoder().items()
            if token.special or (token.content.strip() and token.content in (self._template or ""))
        }
        known = range(self._raw.get_vocab_size())  # config.json may name any number as an end token
        found |= {
            number: self._raw.id_to_token(number) or "" for number in self.end_tokens if number in known
        }
        unknown = {self._special_tokens.get("unk_token"), getattr(self._raw.model, "unk_token", None)}
        return {number: text for number, text in found.items() if text not in unknown}

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if (len(text) + 1) * self._growth > MAX_ENCODED_CHARS:
            raise ValueError(
                f"a prompt of {len(text)} characters may become {self._growth} times as long by the tokenizer's steps, at most "
                f"{MAX_ENCODED_CHARS} characters are allowed; use shorter prompts"
            )
        tokens = list(self._raw.encode(text, add_special_tokens=add_special_tokens).ids)
        # A token without an embedding would end a process with a CUDA device.
        if tokens and max(tokens) >= self.vocab_size:
            raise ValueError(
                f"the tokenizer gives token {max(tokens)}, but config.json has vocab_size={self.vocab_size}; "
                "do the two files belong to the same model?"
            )
        return tokens


def _read_tokenizer(folder: Path) -> "RawTokenizer":
    from tokenizers import Tokenizer as RawTokenizer

    path = folder / TOKENIZER_FILE
    if not path.exists():
        raise ValueError(explain_missing_tokenizer(folder))
    _check_size(path, MAX_TOKENIZER_BYTES)
    try:
        text = path.read_text(encoding="utf-8")
        _check_normalizer(json.loads(text, object_pairs_hook=_without_duplicates))
        raw = RawTokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 (a panic of the library is not an Exception)
        raise ValueError(f"{path} cannot be read: {str(error)[:300]}") from None
    raw.no_truncation()
    raw.no_padding()
    return raw


def _check_growth(raw: "RawTokenizer", path: Path) -> int:
    """Returns how many times longer encoding may make a text. Raises ValueError for a tokenizer that could exhaust the memory.

    Steps multiply: thirty that replace `a` by `aa`, in a file of 2 KB, make a gigabyte of one character.
    """
    growth = math.prod(map(_growth_of, (raw.normalizer, raw.pre_tokenizer, raw.post_processor)))
    if growth > MAX_GROWTH:
        raise ValueError(
            f"{path}: its steps may make a prompt more than {MAX_GROWTH} times as long; do not use it"
        )
    longest = max(map(len, raw.get_vocab()), default=0)
    if longest * _growth_of(raw.decoder) > MAX_DECODED_CHARS:
        raise ValueError(
            f"{path}: a token may become more than {MAX_DECODED_CHARS} characters (the longest has {longest}); do not use it"
        )
    return growth


def _check_normalizer(file: Any) -> None:
    """Raises ValueError if loading this tokenizer.json could exhaust the memory: the library normalizes added tokens as it loads."""
    growth = _growth(file["normalizer"]) if file.get("normalizer") else 1
    if growth > MAX_GROWTH:
        raise ValueError(
            f"its normalizer may make a text more than {MAX_GROWTH} times as long; do not use it"
        )
    _check_added([token["content"] for token in file.get("added_tokens") or []], growth)


def _check_added(contents: list[str], growth: int) -> None:
    if (num_chars := sum(map(len, contents)) * growth) > MAX_ENCODED_CHARS:
        raise ValueError(
            f"its added tokens may become {num_chars} characters by its normalizer, at most {MAX_ENCODED_CHARS} are allowed"
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError for a duplicate key, of which the library might take the other one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key in an object")
    return found


def _growth_of(part: Any) -> int:
    """Returns `_growth` of a loaded part of a tokenizer; 1 if the tokenizer does not have that part."""
    return 1 if part is None else _growth(json.loads(part.__getstate__()))


def _growth(step: dict[str, Any]) -> int:
    """Returns the most characters, or tokens, that a step of a tokenizer makes of one."""
    kind = step["type"]
    if kind == "Sequence":
        # All lists: a further one, which the library ignores, must not hide the one that it uses.
        return math.prod(
            _growth(part) for value in step.values() if isinstance(value, list) for part in value
        )
    if kind == "Replace":
        # A regular expression may match between all characters, as an empty text does.
        pattern, content = step["pattern"].get("String", ""), step["content"]
        return max(1, -(-len(content) // len(pattern))) if pattern else 1 + len(content)
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Precompiled":
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode(errors="replace")) for text in texts))
    if kind == "TemplateProcessing":
        most_ids = max((len(token["ids"]) for token in step["special_tokens"].values()), default=1)
        return max(1, len(step["single"]) * most_ids)
    return _GROWTH.get(kind, 1)


def explain_missing_tokenizer(folder: Path) -> str:
    """Returns what to do about a folder without tokenizer.json."""
    found = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder / name).exists()]
    return (
        f"{folder} has no {TOKENIZER_FILE}{f', only {found[0]}' if found else ''}. Convert the tokenizer once, where you trust the "
        'model: pip install sentencepiece protobuf tiktoken, then python -c "from transformers import AutoTokenizer; '
        f"AutoTokenizer.from_pretrained('{folder}', trust_remote_code=False).save_pretrained('{folder}')\""
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, and from special_tokens_map.json what older models have only there."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            _check_size(folder / name, MAX_SETTINGS_BYTES)
            settings |= {key: value for key, value in read_json(folder / name).items() if value is not None}
    return settings


def _check_size(path: Path, max_bytes: int) -> None:
    if (num_bytes := path.stat().st_size) > max_bytes:
        raise ValueError(f"{path} has {num_bytes} bytes, at most {max_bytes} are allowed")


def _content(token: object) -> str | None:
    """Returns the text of a special token, which is a string or an object with its text as `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_missing_tokens(raw: "RawTokenizer", settings: dict[str, Any], named: dict[str, str]) -> None:
    """Adds tokens that only tokenizer_config.json has. Most models have all of them in tokenizer.json."""
    from tokenizers import AddedToken

    known = {token.content for token in raw.get_added_tokens_decoder().values()}
    added = settings.get("added_tokens_decoder")
    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    missing = []
    for _, token in sorted((added if isinstance(added, dict) else {}).items(), key=lambda item: int(item[0])):
        if (content := _content(token)) is not None and content not in known:
            known.add(content)
            given = token if isinstance(token, dict) else {}
            missing.append(
                AddedToken(content, **{key: given[key] is True for key in options if key in given})
            )
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    for content in [*named.values(), *(_content(token) for token in extra)]:
        if content and content not in known:
            known.add(content)
            missing.append(AddedToken(content, special=True, normalized=False))
    _check_added([token.content for token in missing], _growth_of(raw.normalizer))
    raw.add_tokens(missing)


def _read_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Returns the chat template: of its own file, or of tokenizer_config.json; of several, the one called `default`."""
    path = folder / TEMPLATE_FILE
    if path.exists():
        _check_size(path, MAX_SETTINGS_BYTES)
        return path.read_text(encoding="utf-8") or None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
        if not template:
            raise ValueError(f"{folder}: none of the chat templates {sorted(named)} is called 'default'")
    return template if isinstance(template, str) and template else None
