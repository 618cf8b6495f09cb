"""The answers of a submission as text, token by token: for people, never for training.

The validator makes a transcript from the rows that it has checked and graded, and sends it with its verdict. It is not part of the
ledger. The coordinator keeps it while there is room (`rollouts_mb` in the run file), and shows it on the page.
"""

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.wire.codes import Rejected
from shoal.wire.record import Record

if TYPE_CHECKING:  # the coordinator reads transcripts and does not need pyarrow
    from shoal.wire.rollouts import Rollout

MAX_PIECES_BYTES = 256 << 10
"""Bytes of JSON for the tokens of one submission. Of longer answers the middle is left out."""
MAX_TRANSCRIPT_BYTES = 2 << 20
"""Most bytes of a transcript after decompression."""
MAX_EXPECTED = 2000
"""Most characters of an expected answer."""
_PER_TOKEN = 10
"""Bytes of JSON that a token takes besides its text: quotes, commas, and its log-prob."""
_MAX_JOINED = 8
"""Tokens that are decoded together because one of them is only part of a character."""

Decode = Callable[[Sequence[int]], str]


class SampleText(Record):
    """One answer: the text of each token and its log-prob under the policy that drew it."""

    reward: float
    outcome: str
    """`right`, `wrong`, or `unparseable`: the answer has no part that could be graded."""
    num_tokens: int
    ended: bool
    """False if the answer reached max_new_tokens before an end token."""
    pieces: tuple[str, ...]
    """Text of the tokens. A token that is only part of a character has no text, and the last part has the character."""
    logprobs: tuple[float, ...]
    judgement: str = ""
    """The text of the judge model that scored the answer; empty for tasks without a judge."""
    cut_at: int = 0
    """Number of pieces before the tokens that were left out; 0 if none were."""


class GroupText(Record):
    """All answers to one prompt of a lease."""

    expected: str
    """The task's right answer; empty if it has none."""
    samples: tuple[SampleText, ...]


class Transcript(Record):
    """All groups of a submission, in the order of the lease's prompts."""

    groups: tuple[GroupText, ...]

    def pack(self) -> str:
        """Returns the transcript compressed, as text for a verdict; "" if it is too large to be shown."""
        text = self.model_dump_json().encode()
        if len(text) > MAX_TRANSCRIPT_BYTES:
            return ""
        return base64.b64encode(zlib.compress(text, 6)).decode("ascii")

    @classmethod
    def unpack(cls, data: bytes) -> "Transcript":
        """Returns the transcript in compressed bytes. Raises Rejected if it is too large or not valid."""
        opened = zlib.decompressobj()
        try:
            text = opened.decompress(data, MAX_TRANSCRIPT_BYTES)
        except zlib.error as error:
            raise Rejected("request.malformed", f"a transcript cannot be decompressed: {error}") from None
        if not opened.eof:
            raise Rejected("request.malformed", f"a transcript has more than {MAX_TRANSCRIPT_BYTES} bytes")
        return cls.parse(text)


def make_sample(row: "Rollout", reward: float, outcome: str, decode: Decode, max_bytes: int) -> SampleText:
    """Returns the text of one row. If it takes more than `max_bytes`, tokens in the middle are left out."""
    tokens = row.output_tokens
    most = max(2, max_bytes // (_PER_TOKEN + 3))
    head, tail = len(tokens), 0
    if len(tokens) > most:
        head, tail = most - most // 2, most // 2
    pieces = split_text(tokens[:head], decode)
    logprobs = [round(value, 2) for value in row.logprobs[:head]]
    if tail:
        pieces += split_text(tokens[-tail:], decode)
        logprobs += [round(value, 2) for value in row.logprobs[-tail:]]
    return SampleText(
        reward=reward,
        outcome=outcome,
        num_tokens=len(tokens),
        ended=row.finish == 0,
        pieces=tuple(pieces),
        logprobs=tuple(logprobs),
        cut_at=head if tail else 0,
    )


def split_text(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Returns the text of each token, so that the texts together are the decoded answer.

    A token is decoded together with the one before it, because some tokenizers drop the space at the start of a text.
    """
    pieces: list[str] = []
    context, start = 0, 0
    for end in range(1, len(tokens) + 1):
        before = decode(tokens[context:start]) if start > context else ""
        text = decode(tokens[context:end])[len(before) :]
        if text.endswith("\ufffd") and end - start < _MAX_JOINED and end < len(tokens):
            pieces.append("")
            continue
        pieces.append(text)
        context, start = start, end
    return pieces
