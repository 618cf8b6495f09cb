"""Loads a model from a folder: as a Decoder if its family is supported, else through transformers."""

import platform
from pathlib import Path

import torch

from shoal.files import free_memory_bytes
from shoal.model.decoder import Decoder
from shoal.model.shape import Shape, read_json, read_shape
from shoal.model.transformers_model import (
    ModelLimits,
    TransformersModel,
    check_head_and_packing,
    empty_transformers_model,
    read_limits,
)
from shoal.model.weights import WEIGHTS_FILE, find_weight_files, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_decoder(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Loads the model in `folder` (config.json, model.safetensors) with its parameters in `dtype` on `device`."""
    decoder = empty_decoder(read_shape(folder), dtype, device)
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
    find_weight_files(
        folder / WEIGHTS_FILE
    )  # else a bare config.json would build a model of the family's default size
    try:
        model = empty_transformers_model(read_json(folder / "config.json"), dtype, device)
    except ImportError:
        raise ValueError(f"{decoder_refuses(folder)}; other families need transformers") from None
    load_weights(model, folder / WEIGHTS_FILE)
    check_head_and_packing(model, folder)
    return model


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
