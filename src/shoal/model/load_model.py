"""Loads a model from a folder: as a Decoder if its family is supported, else through transformers."""

import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.files import free_memory_bytes, is_out_of_memory
from shoal.model.decoder import Decoder
from shoal.model.shape import Shape, read_json, read_shape
from shoal.model.transformers_model import (
    ModelLimits,
    TransformersModel,
    check_head_and_packing,
    empty_transformers_model,
    read_limits,
)
from shoal.model.weights import WEIGHTS_FILE, find_weight_files, load_weights, stored_names

MOST_TABLE_BYTES = 2 << 30
"""Most bytes of tables that are not weights, such as the rotations of all positions."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_decoder(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Loads the model in `folder` (config.json, model.safetensors) with its parameters in `dtype` on `device`."""
    num_bytes = _check_sizes(folder)
    shape = read_shape(folder)
    if 2 * 4 * shape.max_positions * shape.head_dim > num_bytes + MOST_TABLE_BYTES:
        raise ValueError(
            f"{folder}/config.json: max_position_embeddings={shape.max_positions} needs more memory for its rotations than the weights "
            "take; lower it to the longest context that you need"
        )
    decoder = empty_decoder(shape, dtype, device)
    load_weights(decoder, folder / WEIGHTS_FILE)
    return decoder


def load_causal(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder | TransformersModel:
    """Loads a model; a family that Decoder does not support is loaded through transformers."""
    if decoder_refuses(folder) is None:
        return load_decoder(folder, dtype, device)
    return load_transformers_model(folder, dtype, device)


def load_transformers_model(
    folder: Path, dtype: torch.dtype, device: torch.device | str
) -> TransformersModel:
    """Loads a model of any family through transformers."""
    num_bytes, config = _check_sizes(folder), read_json(folder / "config.json")
    try:
        numbers = _count_numbers(config)
        # Finds sizes that _check_sizes does not know, such as the positions of a learned embedding.
        if numbers > num_bytes + MOST_TABLE_BYTES // 4:
            raise ValueError(
                f"{folder}/config.json asks for {numbers} numbers, and the weights have {num_bytes} bytes; does it belong to them?"
            )
        model = empty_transformers_model(config, dtype, device)
    except ImportError:
        raise ValueError(f"{decoder_refuses(folder)}; other families need transformers") from None
    load_weights(model, folder / WEIGHTS_FILE)
    try:
        check_head_and_packing(model, folder)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{folder}: transformers cannot compute with it: {error}; correct config.json"
        ) from None
    return model


def _count_numbers(config: dict[str, Any]) -> int:
    """Returns how many numbers the parameters and buffers of a model have, without creating them."""
    try:
        with torch.device("meta"):
            model = empty_transformers_model(config, torch.bfloat16, "meta")
    except (TypeError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"config.json: transformers cannot build this model: {str(error)[:300]}; correct it"
        ) from None
    return sum(one.numel() for one in (*model.parameters(), *model.buffers()))


def _check_sizes(folder: Path) -> int:
    """Returns the bytes of the weights. Raises ValueError if config.json asks for a model that is larger than the weights in the folder.

    The model is built before its weights are read: ten million layers would fill the memory first, and a bare config.json would build
    a model of its family's default size.
    """
    num_bytes = sum(path.stat().st_size for path in find_weight_files(folder / WEIGHTS_FILE))
    config = read_json(folder / "config.json")
    for sizes in (config, *(value for value in config.values() if isinstance(value, dict))):
        width = _size(folder, sizes, _WIDTHS)
        for names in _COUNTS:
            # Each of these has at least as many parameters as the model is wide.
            count = math.prod(_size(folder, sizes, synonyms) for synonyms in names)
            if count * width > num_bytes:
                raise ValueError(
                    f"{folder}/config.json asks for {count} times {width} parameters or more, and the weights have {num_bytes} bytes; "
                    "does it belong to them?"
                )
    return num_bytes


_WIDTHS = ("hidden_size", "n_embd", "d_model")
_COUNTS = (
    (
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
        ("num_experts", "num_local_experts", "n_routed_experts"),
    ),
    (("vocab_size",),),
    (("intermediate_size",),),
    (("num_attention_heads", "n_head"), ("head_dim",)),
)
"""Products of sizes that count layers and experts, or rows of a matrix; each size with its names in different families."""


def _size(folder: Path, sizes: Mapping[str, Any], names: Sequence[str]) -> int:
    """Returns the value of the first of these keys that there is, or 1. Raises ValueError if it is not a positive whole number."""
    for name in names:
        value = sizes.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(
                f"{folder}/config.json: {name}={str(value)[:40]!r} is not a positive whole number"
            )
        if value is not None:
            return int(value)
    return 1


def stores_other_names(folder: Path) -> bool:
    """Returns whether the weights have other names than transformers' parameters, as those of experts have.

    transformers joins the experts of a layer when it loads them; `create_model` writes the folder with the parameters' names.
    """
    if decoder_refuses(folder) is None:
        return False
    with torch.device("meta"):
        model = empty_transformers_model(read_json(folder / "config.json"), torch.bfloat16, "meta")
    known = {"lm_head.weight", *(name for name, _ in [*model.named_parameters(), *model.named_buffers()])}
    return not stored_names(find_weight_files(folder / WEIGHTS_FILE)) <= known


def free_bytes(device: torch.device) -> int:
    """Returns the memory that is free on a device."""
    if device.type == "cpu":
        return free_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def read_model_limits(folder: Path) -> Shape | ModelLimits:
    """Returns the sizes of the model in `folder` without loading it. Raises ValueError if no family of transformers fits."""
    refusal = decoder_refuses(folder)
    if refusal is None:
        return read_shape(folder)
    try:
        return read_limits(read_json(folder / "config.json"))
    except (ImportError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{refusal}, and transformers says: {error}") from None


def device_name(device: str | torch.device) -> str:
    """Returns the name of the processor, as a compute class has it."""
    kind = torch.device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else platform.machine()


def kernel_release() -> str:
    """Returns the library of kernels with its release, without the patch: those do not change kernels."""
    return "torch-" + ".".join(torch.__version__.split(".")[:2])


def machine_digest() -> str:
    """Returns a digest of what the bits of a product on this CPU depend on: its model, features and caches, and the exact build of
    torch and its libraries. Machines with the same digest choose the same kernels."""
    named = ("vendor_id", "cpu family", "model", "model name", "cache size", "flags", "Features", "CPU part")
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in named:
                found.setdefault(name.strip(), value.strip())
    except OSError:  # not Linux
        found["processor"] = platform.processor()
    text = repr((sorted(found.items()), torch.__version__, torch.__config__.show()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def empty_decoder(
    shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Returns a decoder with uninitialised parameters: drawing random ones would take seconds for nothing."""
    with torch.device("meta"):
        decoder = Decoder(shape).to(dtype)
    return decoder.to_empty(device=device)


def decoder_refuses(folder: Path) -> str | None:
    """Returns why Decoder does not support the model in this folder, or None if it does."""
    try:
        read_shape(folder)
    except ValueError as error:
        return str(error)
    return None
