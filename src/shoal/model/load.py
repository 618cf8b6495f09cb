"""A decoder from a model folder."""

from pathlib import Path

import torch

from shoal.model.decoder import Decoder
from shoal.model.shape import Shape, read_shape
from shoal.model.weights import WEIGHTS_FILE, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_decoder(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """The model in `folder` (config.json, model.safetensors), its parameters in `dtype` on `device`."""
    decoder = empty_decoder(read_shape(folder), dtype, device)
    load_weights(decoder, folder / WEIGHTS_FILE)
    return decoder


def empty_decoder(
    shape: Shape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """A decoder with uninitialised parameters: drawing random ones only to overwrite them takes seconds."""
    with torch.device("meta"):
        decoder = Decoder(shape).to(dtype)
    return decoder.to_empty(device=device)
