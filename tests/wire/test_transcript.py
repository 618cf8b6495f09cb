"""Answers as text: split by tokens, cut in the middle, compressed for a verdict."""

import base64
import zlib
from collections.abc import Sequence

import pytest

from shoal.wire.codes import Rejected
from shoal.wire.rollouts import Finish, Rollout
from shoal.wire.transcript import (
    MAX_TRANSCRIPT_BYTES,
    GroupText,
    Transcript,
    make_sample,
    split_text,
)

WORDS = {1: b"\xe2\x96\x81The", 2: b"\xe2\x96\x81cat", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"!"}


def decode(tokens: Sequence[int]) -> str:
    """Decodes as SentencePiece does: no space at the start, and parts of a character give a replacement character."""
    text = b"".join(WORDS[token] for token in tokens).decode("utf-8", "replace")
    return text.replace("\u2581", " ").removeprefix(" ")


def row(num_tokens: int, finish: Finish = Finish.EOS) -> Rollout:
    return Rollout(
        prompt_index=0,
        sample_index=0,
        prompt_tokens=(1,),
        output_tokens=(5,) * num_tokens,
        logprobs=tuple(-0.001 * place for place in range(num_tokens)),
        finish=finish,
        proof=b"",
    )


def test_pieces_together_are_the_answer() -> None:
    tokens = [1, 2, 3, 4, 5, 2]
    pieces = split_text(tokens, decode)
    assert pieces == ["The", " cat", "", "é", "!", " cat"] and "".join(pieces) == decode(tokens)
    assert split_text([1, 3], decode) == ["The", "\ufffd"]
    assert split_text([], decode) == []


def test_a_long_answer_loses_its_middle() -> None:
    sample = make_sample(row(1000, Finish.LENGTH), 0.5, "wrong", decode, max_bytes=130)
    assert (sample.num_tokens, sample.cut_at, len(sample.pieces), sample.ended) == (1000, 5, 10, False)
    assert sample.logprobs[0] == 0 and sample.logprobs[-1] == -1.0
    assert make_sample(row(10), 0.5, "wrong", decode, max_bytes=130).cut_at == 0


def test_a_transcript_is_packed_and_bounded() -> None:
    sample = make_sample(row(3), 1.0, "right", decode, max_bytes=1000)
    whole = Transcript(groups=(GroupText(expected="!!!", samples=(sample,)),))
    packed = base64.b64decode(whole.pack())
    assert Transcript.unpack(packed) == whole
    for bad in (b"not zlib", zlib.compress(b"x" * (MAX_TRANSCRIPT_BYTES + 1)), zlib.compress(b"{}")):
        with pytest.raises(Rejected):
            Transcript.unpack(bad)
    long = GroupText(expected="x" * MAX_TRANSCRIPT_BYTES, samples=())
    assert Transcript(groups=(long,)).pack() == ""
