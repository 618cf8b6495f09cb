"""AdamW whose moments take one byte each instead of four.

    moment ──▶ blocks of 256 values ──▶ the block's largest magnitude (float32) + one code per value

A code counts steps of a constant ratio below the largest magnitude, so that small values of a block keep their relative precision:
5 decades in 127 steps and a sign for the mean of the gradients, 6 decades in 255 steps for the root of the mean square. Rounding is
random in proportion to the distance, so that the expected value is exact: rounding to the nearest code would never let a mean
square decay, because one update changes it by less than half a step. The random numbers depend only on the number of the update
and the parameter, so a version that is made again has the same bits. The update itself uses moments that were not rounded yet.

Weights, gradients and arithmetic are float32, as in torch.optim.AdamW.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.diloco.fragments import local

BLOCK = 256
CHUNK_BLOCKS = {"cpu": 1 << 10, "cuda": 1 << 16}
"""Blocks that are updated at once, by the kind of device. An update has about ten temporary float32 tensors of that size: 10 MB on
a CPU, which its cache holds; 670 MB on a GPU, where smaller ones would be too many launches."""
MEAN_LEVELS, MEAN_DECADES = 127, 5.0
ROOT_LEVELS, ROOT_DECADES = 255, 6.0
CODES = ("mean_codes", "mean_scales", "root_codes", "root_scales")


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with one-byte moments, for plain parameters and for the local shards of distributed ones."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Makes one update of every parameter that has a gradient."""
        assert closure is None, "gradients are accumulated by the caller"
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, number)
                number += 1

    def set_moment(self, parameter: Tensor, name: str, values: Tensor) -> None:
        """Sets the moment `exp_avg` or `exp_avg_sq` from float32 values. Values of `decode_moment` give the same codes again."""
        state = self.state[parameter]
        if "mean_codes" not in state:
            self._new_state(parameter)
        for rows in _chunks(state):
            blocks = _blocks(values, rows)
            if name == "exp_avg":
                state["mean_codes"][rows], state["mean_scales"][rows] = encode_mean(blocks, None)
            else:
                state["root_codes"][rows], state["root_scales"][rows] = encode_root(blocks.sqrt(), None)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        shard = local(parameter)
        num_blocks = -(-shard.numel() // BLOCK)

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_blocks, width, dtype=dtype, device=shard.device)

        state: dict[str, Tensor] = self.state[parameter]
        state.setdefault("step", torch.zeros(()))
        state.update(
            mean_codes=zeros(BLOCK, torch.int8),
            mean_scales=zeros(1, torch.float32),
            root_codes=zeros(BLOCK, torch.uint8),
            root_scales=zeros(1, torch.float32),
        )
        return state

    def _update(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        state: dict[str, Tensor] = self.state[parameter] or self._new_state(parameter)
        state["step"] += 1
        step = int(state["step"])
        weights = local(parameter).view(-1)
        gradient = local(parameter.grad).reshape(-1)  # type: ignore[arg-type]  # the caller found a gradient
        draws = torch.Generator(weights.device).manual_seed((self._seed << 44) ^ (step << 20) ^ number)
        for rows in _chunks(state):
            part = {name: state[name][rows] for name in CODES}
            change = _new_moments(part, _blocks(gradient, rows), group, step, draws)
            into = weights[rows.start * BLOCK : rows.stop * BLOCK]
            into.mul_(1 - group["lr"] * group["weight_decay"])
            into.sub_(change.view(-1)[: into.numel()], alpha=group["lr"])


def _new_moments(
    part: dict[str, Tensor], gradient: Tensor, group: dict[str, Any], step: int, draws: torch.Generator
) -> Tensor:
    """Updates the codes of some blocks in place; returns the direction of the weights' change."""
    beta1, beta2 = group["betas"]
    mean = decode_mean(part["mean_codes"], part["mean_scales"]).lerp_(gradient, 1 - beta1)
    square = decode_root(part["root_codes"], part["root_scales"]).square_()
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = square.sqrt_()
    change = (root / math.sqrt(1 - beta2**step)).add_(group["eps"])
    torch.div(mean / (1 - beta1**step), change, out=change)
    codes, scales = encode_mean(mean, draws)
    part["mean_codes"].copy_(codes)
    part["mean_scales"].copy_(scales)
    codes, scales = encode_root(root, draws)
    part["root_codes"].copy_(codes)
    part["root_scales"].copy_(scales)
    return change


def decode_moment(state: dict[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """Returns the moment `exp_avg` or `exp_avg_sq` of a parameter's state in float32. `shape` is that of this rank's shard."""
    if name == "exp_avg":
        values = decode_mean(state["mean_codes"], state["mean_scales"])
    else:
        values = decode_root(state["root_codes"], state["root_scales"]).square_()
    return values.view(-1)[: shape.numel()].view(shape)


def encode_mean(values: Tensor, draws: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Returns codes (-127 to 127) and scales of blocks of values. Without `draws` each is rounded to the nearest code."""
    scales = values.abs().amax(dim=1, keepdim=True)
    codes = _encode(values.abs(), scales, MEAN_LEVELS, MEAN_DECADES, power=1, draws=draws)
    return (codes * values.sign()).to(torch.int8), scales


def decode_mean(codes: Tensor, scales: Tensor) -> Tensor:
    signed = codes.float()
    return _decode(signed.abs(), scales, MEAN_LEVELS, MEAN_DECADES) * signed.sign()


def encode_root(values: Tensor, draws: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Returns codes (0 to 255) and scales of blocks of roots. The expected square of a code is the value's square.

    A value above zero never gets the code of zero: the update divides by it.
    """
    scales = values.amax(dim=1, keepdim=True)
    codes = _encode(values, scales, ROOT_LEVELS, ROOT_DECADES, power=2, draws=draws)
    return torch.where(values > 0, codes.clamp(min=1), codes).to(torch.uint8), scales


def decode_root(codes: Tensor, scales: Tensor) -> Tensor:
    return _decode(codes.float(), scales, ROOT_LEVELS, ROOT_DECADES)


def _encode(
    values: Tensor, scales: Tensor, levels: int, decades: float, *, power: int, draws: torch.Generator | None
) -> Tensor:
    log_ratio = decades / (levels - 1) * math.log2(10)  # of two neighbouring codes, to base 2
    # log2 of zero is -inf, and a block of zeros gives nan: both become code 0.
    exact = ((values / scales).log2_() / log_ratio + levels).nan_to_num_(0.0, neginf=0.0).clamp_(0, levels)
    if draws is None:
        return exact.round_()
    below = exact.floor()
    # Rounding up with this probability makes the expected value (to this power) the exact one.
    share = ((exact - below) * (log_ratio * power)).exp2_().sub_(1).div_(2 ** (log_ratio * power) - 1)
    noise = torch.rand(exact.shape, generator=draws, device=exact.device)
    return below.add_(noise < share).clamp_(max=levels)


def _decode(codes: Tensor, scales: Tensor, levels: int, decades: float) -> Tensor:
    log_ratio = decades / (levels - 1) * math.log2(10)
    values = ((codes - levels) * log_ratio).exp2_() * scales
    return torch.where(codes > 0, values, torch.zeros_like(values))


def _chunks(state: dict[str, Tensor]) -> Iterator[slice]:
    """Yields the rows of blocks that are updated at once."""
    codes = state["mean_codes"]
    size = CHUNK_BLOCKS.get(codes.device.type, CHUNK_BLOCKS["cuda"])
    for first in range(0, codes.shape[0], size):
        yield slice(first, first + size)


def _blocks(tensor: Tensor, rows: slice) -> Tensor:
    """Returns some blocks of a flat view of the values, in float32; the last block is filled up with zeros."""
    part = local(tensor).reshape(-1)[rows.start * BLOCK : rows.stop * BLOCK].float()
    missing = -part.numel() % BLOCK
    return (torch.nn.functional.pad(part, (0, missing)) if missing else part).view(-1, BLOCK)
