"""The model a site trains: ours where it can be, else whatever transformers loads; and its loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.model.builtin import BUILTIN, copy_all_but_weights, create_model
from shoal.model.decoder import Decoder
from shoal.model.load_model import load_decoder
from shoal.model.logprobs import token_logprobs
from shoal.model.tokenizer import CharTokenizer, load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights


def model_folder(name: str, cache: Path, seed: int) -> Path:
    """The folder of the model called `name`; a built-in one is written to `cache` at the first use."""
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
    """float32 weights on `device`."""
    try:
        return load_decoder(folder, torch.float32, device)
    except ValueError:
        # Not of the families our decoder computes.
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        )
        return model.to(device)


def save_language_model(model: nn.Module, source: Path, target: Path) -> None:
    """A folder as `source` is, with the weights as they are now: bfloat16 if the decoder is ours, as versions are published."""
    target.mkdir(parents=True, exist_ok=True)
    copy_all_but_weights(source, target)
    if isinstance(model, Decoder):
        save_weights(model, target / WEIGHTS_FILE)
    else:
        model.save_pretrained(target)  # type: ignore[operator]


def text_encoder(folder: Path) -> Callable[[str], list[int]]:
    """Text to token ids, with the end token after it."""
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, CharTokenizer):
        known = set(tokenizer.alphabet)
        return lambda text: tokenizer.encode_answer("".join(c if c in known else "?" for c in text))
    return tokenizer.encode_answer


def num_words(model: nn.Module) -> int:
    """Token ids are below it."""
    if isinstance(model, Decoder):
        return model.shape.vocab_size
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.num_embeddings)


def num_positions(model: nn.Module) -> int:
    """The longest sample it can be given."""
    if isinstance(model, Decoder):
        return model.shape.max_positions
    # Not every family has a limit.
    return int(getattr(model.config, "max_position_embeddings", None) or 1 << 31)


def next_token_loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it."""
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
    losses, weights = [], []
    for at in range(0, len(tokens_NT), batch):
        rows = torch.from_numpy(np.asarray(tokens_NT[at : at + batch], np.int64)).to(device)
        losses.append(float(next_token_loss(model, rows)))
        weights.append(len(rows))
    return float(np.average(losses, weights=weights))
