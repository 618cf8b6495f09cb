"""Samples from text or token files: read in place, one order per peer, resumable by one number.

A corpus is one long run of token ids, cut into samples of `sequence` + 1 tokens. Each peer goes through blocks of samples
in an order drawn from its own id, so sites need not be numbered and may come and go: two of them meet the same
block only when both have gone through much of the corpus.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

BLOCK = 16
"""Samples that are read together, as neighbours."""


def read_corpus(
    patterns: Sequence[str], encode: Callable[[str], list[int]], cache: Path
) -> NDArray[np.uint32]:
    """All files of the patterns as one run of token ids; text is tokenised once and kept in `cache`."""
    paths = sorted(
        path for pattern in patterns for path in glob.glob(os.path.expanduser(pattern), recursive=True)
    )
    if not paths:
        raise ValueError(
            f"no file fits {', '.join(patterns)} in {Path.cwd()}; data.files takes paths and patterns such as data/*.txt, "
            "from where the command is started"
        )
    if len(paths) == 1 and paths[0].endswith(".npy"):
        return _load_tokens(Path(paths[0]))
    key = hashlib.sha256()
    for path in paths:
        status = os.stat(path)
        key.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    kept = cache / f"tokens-{key.hexdigest()[:16]}.npy"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        parts = [_file_tokens(Path(path), encode) for path in paths]
        partial = kept.with_suffix(".partial.npy")
        np.save(partial, np.concatenate(parts))
        os.replace(partial, kept)
    return _load_tokens(kept)


def _load_tokens(path: Path) -> NDArray[np.uint32]:
    try:
        tokens: NDArray[np.uint32] = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise ValueError(
            f"{path} is not a file of NumPy's: {str(error).splitlines()[0][:80]}; np.save writes one"
        ) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ValueError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; expected one row of token ids"
        )
    return tokens


def _file_tokens(path: Path, encode: Callable[[str], list[int]]) -> NDArray[np.uint32]:
    if path.suffix == ".npy":
        return np.asarray(_load_tokens(path), np.uint32)
    return np.asarray(encode(path.read_text(encoding="utf-8", errors="replace")), np.uint32)


class Samples:
    """The samples of a corpus in one peer's order. `position` is all there is to remember."""

    def __init__(
        self, tokens_N: NDArray[np.uint32], *, sequence: int, peer: str, seed: int, num_words: int = 1 << 32
    ) -> None:
        """`num_words`: of the model. Ids are compared with it as they are taken: a corpus may be too long to look through."""
        self.num_samples = max(0, len(tokens_N) - 1) // sequence
        if self.num_samples < 1:
            raise ValueError(
                f"{len(tokens_N)} tokens are too few for one sample of {sequence}; add data, or lower data.sequence"
            )
        self._tokens_N, self._sequence, self._num_words = tokens_N, sequence, num_words
        self._name = f"{seed}/{peer}"
        self.position = 0
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def take(self, num: int) -> Tokens:
        """The next `num` samples, [num, sequence + 1]."""
        length = self._sequence + 1
        starts = self.starts(num)
        taken = np.stack([np.asarray(self._tokens_N[at : at + length], np.int64) for at in starts])
        if taken.min() < 0 or taken.max() >= self._num_words:
            wrong = taken[(taken < 0) | (taken >= self._num_words)][0]
            raise ValueError(
                f"data.files hold the token id {wrong}, and the model has {self._num_words} words; "
                "use the files of this model's tokenizer"
            )
        return taken

    def starts(self, num: int) -> list[int]:
        """Where the next `num` samples begin, for whoever reads the tokens itself."""
        starts = [self._start(self.position + at) for at in range(num)]
        self.position += num
        return starts

    def _start(self, position: int) -> int:
        epoch, at = divmod(position, self.num_samples)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._draw(epoch)
        return int(self._order[at]) * self._sequence

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        digest = hashlib.sha256(f"{self._name}/{epoch}".encode()).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
        blocks = rng.permutation(-(-self.num_samples // BLOCK))
        order = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        return order[order < self.num_samples]
