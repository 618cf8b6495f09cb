"""Turns text into tokens and back.

CharTokenizer is for the built-in model `tiny`; other models have a Hugging Face tokenizer in their folder.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from shoal.model.shape import read_end_tokens, read_json

CHAR_FILE = "char_tokenizer.json"


class Tokenizer(Protocol):
    """The interface of a tokenizer that the engine, the trainer and the validator use."""

    end_tokens: frozenset[int]
    """Tokens that end an answer. The end token is part of the answer."""
    vocab_size: int
    """A model draws tokens 0 .. vocab_size-1."""

    def encode_prompt(self, text: str, *, chat: bool) -> list[int]:
        """Returns the tokens of a prompt: with `chat` as a user's turn in the chat template, if there is one."""

    def encode_answer(self, text: str) -> list[int]:
        """Returns the tokens of an answer, with an end token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of an answer without special tokens."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a model folder, without network access."""
    if (folder / CHAR_FILE).exists():
        return CharTokenizer.load(folder)
    return HfTokenizer(folder)


class CharTokenizer:
    """Has one token per character of a fixed alphabet, after <pad>, <bos> and <eos>."""

    PAD, BOS, EOS = 0, 1, 2

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet):
            raise ValueError(f"alphabet {alphabet!r} contains a character twice")
        self.alphabet = alphabet
        self.end_tokens = frozenset({self.EOS})
        self.vocab_size = 3 + len(alphabet)
        self._ids = {char: 3 + index for index, char in enumerate(alphabet)}

    @classmethod
    def load(cls, folder: Path) -> "CharTokenizer":
        """Reads the alphabet from a model folder."""
        return cls(json.loads((folder / CHAR_FILE).read_text(encoding="utf-8"))["alphabet"])

    def save(self, folder: Path) -> None:
        """Writes the alphabet to a model folder."""
        (folder / CHAR_FILE).write_text(json.dumps({"alphabet": self.alphabet}) + "\n", encoding="utf-8")

    def encode_prompt(self, text: str, *, chat: bool) -> list[int]:
        return [self.BOS, *self._encode(text)]

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


class HfTokenizer:
    """Wraps the Hugging Face tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # takes seconds, and the model tiny does not need it

        config = read_json(folder / "config.json")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        ends = read_end_tokens(folder, config) or (self._tokenizer.eos_token_id,)
        if None in ends:
            raise ValueError(
                f"{folder}: neither config.json nor the tokenizer names an end token (eos_token_id)"
            )
        self.end_tokens = frozenset(ends)
        self.vocab_size = int(config["vocab_size"])
        own = self._tokenizer.eos_token_id
        self._end: int = own if own in self.end_tokens else ends[0]

    def encode_prompt(self, text: str, *, chat: bool) -> list[int]:
        if not chat or not self._tokenizer.chat_template:
            return list(self._tokenizer.encode(text))
        turns = [{"role": "user", "content": text}]
        prompt: str = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(prompt, add_special_tokens=False))

    def encode_answer(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._end]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
