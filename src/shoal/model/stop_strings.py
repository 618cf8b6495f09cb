"""Stop strings: where an answer ends that contains one. Engines and validators use the same functions, so they agree on the token.

An answer ends with the first token after which the text of its last WINDOW tokens contains a stop string. The stop string, and what
follows it in that token, are part of the answer, so that log-probs and proofs cover every token that was drawn; the graded text ends before
it. An end token and max_new_tokens end an answer as always.
"""

from collections.abc import Callable, Sequence

WINDOW = 128
"""Tokens whose text is searched. A stop string has at most 64 bytes, and a token of text at least one."""
_STRIDE = 64

Decode = Callable[[Sequence[int]], str]


def stopped_after(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> int | None:
    """Returns the number of tokens after which the answer ends; None if it contains no stop string.

    Blocks of tokens are searched first: decoding a window for every token takes 50 times as long.
    """
    if not stop:
        return None
    for start in range(0, len(tokens), _STRIDE):
        end = min(start + _STRIDE, len(tokens))
        if not _contains(tokens[max(0, start - WINDOW) : end], stop, decode):
            continue
        for count in range(start + 1, end + 1):
            if _contains(tokens[max(0, count - WINDOW) : count], stop, decode):
                return count
    return None


def stops_now(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Returns whether the newest token completes a stop string, for an engine that asks after every token."""
    return bool(stop) and _contains(tokens[-WINDOW:], stop, decode)


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string."""
    places = [place for place in (text.find(one) for one in stop) if place >= 0]
    return text[: min(places)] if places else text


def _contains(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    text = decode(tokens)
    return any(one in text for one in stop)
