"""Models that need no hub: `tiny`, `smollm2-135m`, or a folder of the user's own.

Each becomes a model folder of version-0 kind: config.json, tokenizer files, bfloat16 model.safetensors.
"""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.model.decoder import Decoder
from shoal.model.load_model import decoder_refuses, empty_decoder, load_causal
from shoal.model.shape import read_shape
from shoal.model.smollm2 import write_smollm2
from shoal.model.tokenizer import CharTokenizer
from shoal.model.weights import WEIGHTS_FILE, load_weight_files, save_weights

BUILTIN = ("tiny", "smollm2-135m")

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \n+-*/=<>?.,:;!()[]'\"%_"

MIN_HIDDEN_SIZE = 128
"""A proof takes 128 values of as little as one state."""

_TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 3 + len(ALPHABET),
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": CharTokenizer.PAD,
    "bos_token_id": CharTokenizer.BOS,
    "eos_token_id": CharTokenizer.EOS,
    "dtype": "bfloat16",
}


def create_model(name: str, folder: Path, seed: int) -> None:
    """Write the model called `name` (or standing in the folder `name`) to `folder`, which is complete or absent.

    The same name and seed give the same bytes. Only `tiny` draws anything from the seed.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _fill(name, partial, seed)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_all_but_weights(source: Path, target: Path) -> None:
    """What a new version's folder shares with the last one's: config and tokenizer files.

    Manifests and other people's weights formats stay behind, and so do folders.
    """
    for path in sorted(source.iterdir()):
        known = path.suffix in (".json", ".jinja", ".txt", ".model")
        if path.is_file() and known and path.name not in ("manifest.json", "model.safetensors.index.json"):
            shutil.copyfile(path, target / path.name)


def _fill(name: str, folder: Path, seed: int) -> None:
    if name == "tiny":
        _write_tiny(folder, seed)
    elif name == "smollm2-135m":
        write_smollm2(folder)
    elif Path(name).is_dir():
        _write_copy(Path(name), folder)
    else:
        raise ValueError(
            f"unknown model {name!r}; known: {', '.join(BUILTIN)}, or the path of a model folder"
        )


def _write_tiny(folder: Path, seed: int) -> None:
    _write_json(folder / "config.json", _TINY_CONFIG)
    CharTokenizer(ALPHABET).save(folder)
    decoder = empty_decoder(read_shape(folder))
    _draw_weights(decoder, seed)
    save_weights(decoder, folder / WEIGHTS_FILE)


def _draw_weights(decoder: Decoder, seed: int) -> None:
    """Normal values of standard deviation 1/sqrt(inputs), those that end in the residual stream smaller."""
    # NumPy's stream, because it is promised to stay the same across releases of NumPy and kinds of machine.
    rng = np.random.Generator(np.random.PCG64(seed))
    into_residual = 1 / math.sqrt(2 * decoder.shape.num_layers)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            scale = 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= into_residual
            parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape)) * scale))


def _write_copy(source: Path, folder: Path) -> None:
    if decoder_refuses(source) is not None:
        _write_foreign_copy(source, folder)
        return
    shape = read_shape(source)
    if shape.hidden_size < MIN_HIDDEN_SIZE:
        raise ValueError(f"{source}: hidden_size={shape.hidden_size}, proofs need at least {MIN_HIDDEN_SIZE}")
    weights = sorted(source.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{source}: no *.safetensors file; convert the weights to safetensors first")
    copy_all_but_weights(source, folder)
    decoder = empty_decoder(shape, torch.bfloat16)
    load_weight_files(decoder, weights)
    save_weights(decoder, folder / WEIGHTS_FILE)


def _write_foreign_copy(source: Path, folder: Path) -> None:
    """transformers reads what it wrote, whatever names its files use; ours has the names of its parameters."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {decoder_refuses(source)}, and transformers says: {error}") from None
    copy_all_but_weights(source, folder)
    save_weights(model, folder / WEIGHTS_FILE)
    load_causal(folder)  # what the trainer will do: a model it cannot train is refused now


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
