"""What a site trains: the language model, its loss, and the samples of a corpus.

The model is Shoal's own decoder where the family is known, otherwise what transformers loads. A corpus is one long
sequence of token ids, cut into samples of `sequence` + 1 tokens. Each peer reads blocks of samples in an order drawn from
its own id, so sites need no numbers and may come and go: two of them read the same block only after both have read much
of the corpus.
"""

import glob
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.files import explain_full_disk, write_atomically
from shoal.model.builtin import BUILTIN, copy_all_but_weights, create_model
from shoal.model.decoder import Decoder
from shoal.model.load_model import load_decoder
from shoal.model.logprobs import token_logprobs
from shoal.model.tokenizer import CharTokenizer, load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights


def model_folder(name: str, cache: Path, seed: int) -> Path:
    """Returns the folder of the model `name`. A built-in model is written to `cache` at the first use."""
    if name not in BUILTIN:
        if not Path(name).is_dir():
            raise ValueError(
                f"unknown model {name!r}; known: {', '.join(BUILTIN)}, or the path of a model folder"
            )
        return Path(name)
    folder = cache / f"{name}-{seed}"
    if not folder.exists():
        create_model(name, folder, seed)
    return folder


def load_language_model(folder: Path, device: str) -> nn.Module:
    """Loads a model with float32 weights on `device`."""
    try:
        return load_decoder(folder, torch.float32, device)
    except ValueError:
        # The decoder does not know this model family.
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
        )
        return model.to(device)


def save_language_model(model: nn.Module, source: Path, target: Path) -> None:
    """Writes a model folder like `source` with the present weights, as bfloat16 if the model is Shoal's decoder."""
    target.mkdir(parents=True, exist_ok=True)
    copy_all_but_weights(source, target)
    if isinstance(model, Decoder):
        save_weights(model, target / WEIGHTS_FILE)
    else:
        model.save_pretrained(target)  # type: ignore[operator]


def text_encoder(folder: Path) -> Callable[[str], list[int]]:
    """Returns a function from text to token ids, with the end token appended."""
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, CharTokenizer):
        known = set(tokenizer.alphabet)
        return lambda text: tokenizer.encode_answer("".join(c if c in known else "?" for c in text))
    return tokenizer.encode_answer


def next_token_loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Returns the mean cross-entropy of each token given those before it."""
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    if isinstance(model, Decoder):
        positions_BT = torch.arange(inputs_BT.shape[1], device=inputs_BT.device).expand_as(inputs_BT)
        hidden_BTH = model(inputs_BT, positions_BT)
        logprobs_N = token_logprobs(model, hidden_BTH.flatten(0, 1), targets_BT.reshape(-1), temperature=1.0)
        return -logprobs_N.mean()
    logits_BTV: Any = model(input_ids=inputs_BT).logits
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.reshape(-1))


@torch.no_grad()
def validation_loss(model: nn.Module, tokens_NT: "np.ndarray[Any, Any]", *, batch: int, device: str) -> float:
    """Returns the mean loss over all samples."""
    losses, weights = [], []
    for at in range(0, len(tokens_NT), batch):
        rows = torch.from_numpy(np.asarray(tokens_NT[at : at + batch], np.int64)).to(device)
        losses.append(float(next_token_loss(model, rows)))
        weights.append(len(rows))
    return float(np.average(losses, weights=weights))


Tokens = NDArray[np.int64]

BLOCK = 16
"""Neighbouring samples that are read together."""


def read_corpus(
    patterns: Sequence[str], encode: Callable[[str], list[int]], cache: Path
) -> NDArray[np.uint32]:
    """Returns all files of the patterns as one sequence of token ids. Text is tokenised once and kept in `cache`."""
    paths = sorted(
        path for pattern in patterns for path in glob.glob(os.path.expanduser(pattern), recursive=True)
    )
    if not paths:
        raise ValueError(
            f"no file matches {', '.join(patterns)} in {Path.cwd()}; data.files takes paths and patterns such as data/*.txt, "
            "relative to the folder in which the command is started"
        )
    if len(paths) == 1 and paths[0].endswith(".npy"):
        return _load_tokens(Path(paths[0]))
    key = hashlib.sha256()
    for path in paths:
        status = os.stat(path)
        key.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    kept = cache / f"tokens-{key.hexdigest()[:16]}.npy"
    if not kept.exists():
        parts = [_file_tokens(Path(path), encode) for path in paths]
        with explain_full_disk(cache), write_atomically(kept) as file:
            np.save(file, np.concatenate(parts))
    return _load_tokens(kept)


def _load_tokens(path: Path) -> NDArray[np.uint32]:
    try:
        tokens: NDArray[np.uint32] = np.load(path, mmap_mode="r")
    except ValueError as error:
        raise ValueError(
            f"{path} is not a NumPy file: {str(error).splitlines()[0][:80]}; write it with np.save"
        ) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ValueError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; expected one dimension of token ids"
        )
    return tokens


def _file_tokens(path: Path, encode: Callable[[str], list[int]]) -> NDArray[np.uint32]:
    if path.suffix == ".npy":
        return np.asarray(_load_tokens(path), np.uint32)
    return np.asarray(encode(path.read_text(encoding="utf-8", errors="replace")), np.uint32)


class Samples:
    """The samples of a corpus in one peer's order. Saving and restoring `position` resumes it."""

    def __init__(
        self, tokens_N: NDArray[np.uint32], *, sequence: int, peer: str, seed: int, vocab_size: int = 1 << 32
    ) -> None:
        """`vocab_size` is checked as samples are taken, because a corpus may be too large to check at once."""
        self.num_samples = max(0, len(tokens_N) - 1) // sequence
        if self.num_samples < 1:
            raise ValueError(
                f"{len(tokens_N)} tokens are too few for one sample of {sequence} tokens; add data, or lower data.sequence"
            )
        self._tokens_N, self._sequence, self._vocab_size = tokens_N, sequence, vocab_size
        self._name = f"{seed}/{peer}"
        self.position = 0
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def take(self, num: int) -> Tokens:
        """Returns the next `num` samples, [num, sequence + 1]."""
        length = self._sequence + 1
        starts = self.starts(num)
        samples = np.stack([np.asarray(self._tokens_N[at : at + length], np.int64) for at in starts])
        if samples.min() < 0 or samples.max() >= self._vocab_size:
            wrong = samples[(samples < 0) | (samples >= self._vocab_size)][0]
            raise ValueError(
                f"data.files contain the token id {wrong}, but the model's vocabulary has {self._vocab_size} entries; "
                "use files that this model's tokenizer wrote"
            )
        return samples

    def starts(self, num: int) -> list[int]:
        """Returns where the next `num` samples begin, for callers that read the tokens themselves."""
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
