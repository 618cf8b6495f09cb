"""Rounds the weights of a model's layers to 8 bits, so that worker and validator get the same values.

    int8   whole numbers from -127 to 127
    fp8    8-bit floating point with 4 bits of exponent and 3 of mantissa (e4m3)

Each row of a matrix (an output channel) has a scale of its own, which is a power of two. A rounded weight then is exact in
bfloat16 and float32, and every step of the rounding is exact or rounds once: all machines compute the same bits, and a kernel that
multiplies the 8-bit numbers and scales the sum uses the same weights. Embeddings, the output matrix, norms and biases stay as
they are.
"""

import torch
from torch import Tensor

from shoal.model.decoder import Decoder
from shoal.model.transformers_model import TransformersModel
from shoal.wire.requirements import WeightFormat

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""Largest magnitude of each format."""


@torch.no_grad()
def round_weights(model: Decoder | TransformersModel, format: WeightFormat) -> None:
    """Rounds the matrices of all layers in place."""
    for block in model.blocks():
        for parameter in block.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(rounded(parameter.float(), format))


def rounded(weight: Tensor, format: WeightFormat) -> Tensor:
    """Returns float32 weights, [..., inputs], rounded to the format."""
    scale = _scales(weight.abs().amax(dim=-1, keepdim=True), LARGEST[format])
    units = weight / scale  # exact, because the scale is a power of two
    if format == "int8":
        return units.round() * scale
    return units.to(torch.float8_e4m3fn).float() * scale


def _scales(largest: Tensor, most: float) -> Tensor:
    """Returns the smallest power of two by which each row has to be divided so that `largest` becomes at most `most`.

    Computed from exponent and mantissa: a logarithm could round differently on another machine.
    """
    mantissa, exponent = torch.frexp(largest / most)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
