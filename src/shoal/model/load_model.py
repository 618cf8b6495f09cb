"""A model from a folder: our own Decoder where its family is ours, else what transformers makes of it."""

from pathlib import Path

import torch

from shoal.model.decoder import Decoder
from shoal.model.shape import Shape, read_json, read_shape
from shoal.model.transformers_model import Foreign, empty_foreign, probe
from shoal.model.weights import WEIGHTS_FILE, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_decoder(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """The model in `folder` (config.json, model.safetensors), its parameters in `dtype` on `device`."""
    decoder = empty_decoder(read_shape(folder), dtype, device)
    load_weights(decoder, folder / WEIGHTS_FILE)
    return decoder


def load_causal(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder | Foreign:
    """As `load_decoder`; a family that Decoder does not do is loaded through transformers. For the trainer."""
    if (refusal := decoder_refuses(folder)) is None:
        return load_decoder(folder, dtype, device)
    try:
        model = empty_foreign(read_json(folder / "config.json"), dtype, device)
    except ImportError:
        raise ValueError(f"{refusal}; other families need transformers") from None
    load_weights(model, folder / WEIGHTS_FILE)
    probe(model, folder)
    return model


def empty_decoder(
    shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """A decoder with uninitialised parameters: drawing random ones only to overwrite them takes seconds."""
    with torch.device("meta"):
        decoder = Decoder(shape).to(dtype)
    return decoder.to_empty(device=device)


def decoder_refuses(folder: Path) -> str | None:
    """Why Decoder cannot be this folder's model; None if it can."""
    try:
        read_shape(folder)
    except ValueError as error:
        return str(error)
    return None
