"""Finds questions of one data set that another one asks too, whatever text surrounds them.

Prompts of different data sets have different instructions before and after the same question. So a question counts as asked if its
words occur in the prompt, one after the other. Case, spaces, and typesetting that does not change the meaning are ignored.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable

START_WORDS = 6
"""Number of words by which the start of a question is looked for. Shorter questions must be the whole prompt."""

_IGNORED = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|[$~]")
_FRACTIONS = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_WORD = re.compile(r"\w+|[^\w\s]")


def normalised(text: str) -> str:
    """Returns the text without case, typesetting that does not change its meaning, and punctuation at its end."""
    plain = _IGNORED.sub("", unicodedata.normalize("NFKC", text).casefold())
    return _FRACTIONS.sub(r"\\frac", plain).rstrip(".?!:;, \n\t")


def question_key(question: str) -> int:
    """Returns 64 bits of the hash of a question's normalised text without spaces."""
    text = "".join(normalised(question).split())
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big")


def words_of(text: str) -> tuple[str, ...]:
    """Returns the normalised words and signs of a text."""
    return tuple(_WORD.findall(normalised(text)))


class QuestionSet:
    """Questions that a prompt must not contain."""

    def __init__(self, questions: Iterable[str]) -> None:
        self._short: set[tuple[str, ...]] = set()
        self._by_start: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for question in questions:
            words = words_of(question)
            if len(words) < START_WORDS:
                self._short.add(words)
            else:
                self._by_start.setdefault(words[:START_WORDS], []).append(words)

    def is_asked_in(self, prompt: str) -> bool:
        """Returns whether the prompt asks one of the questions."""
        words = words_of(prompt)
        if words in self._short:
            return True
        for place in range(len(words) - START_WORDS + 1):
            for question in self._by_start.get(words[place : place + START_WORDS], ()):
                if words[place : place + len(question)] == question:
                    return True
        return False
