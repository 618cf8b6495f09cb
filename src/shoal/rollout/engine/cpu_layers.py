"""The layers of a decode step on a CPU, for the rows of one lane: written so that torch can run them without Python.

Attention has two parts with one softmax over both. Prompts are kept apart, once for all their rows, whose queries meet
them in one product; the rows' new tokens stand in their slots. Keys and values are float32 whatever the model's dtype:
short products of float32 are the faster ones, and scores keep their precision.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.fused import FusedLayer, linear


class Prompts(NamedTuple):
    """The prompts of a lane's rows. Rows `starts` to `stops`, in the order of prompts and counted in queries of one kv head,
    have the prompt whose keys and values these are."""

    starts: list[int]
    stops: list[int]
    keys_LKCD: list[Tensor]
    values_LKCD: list[Tensor]
    longest: int
    order_B: Tensor
    """The rows in the order of prompts."""
    ranks_B: Tensor
    """Place of each row in that order."""


class Glance(NamedTuple):
    """What is the same for all layers of a step."""

    cos_B1D: Tensor
    signed_sin_B1D: Tensor
    index_B: Tensor
    """0 .. B-1."""
    own_B: Tensor
    """Where among a row's new tokens this one stands."""
    num_own: int
    beyond_BN: Tensor
    """New tokens of other rows' length, which a row has not."""
    scores_KRC: Tensor
    """To be filled: scores of all queries of a kv head over the prompt and, from `longest` on, the new tokens."""
    keys_LBCKD: Tensor
    values_LBCKD: Tensor
    """Of the rows' new tokens."""


class Heads(NamedTuple):
    num: int
    num_kv: int
    dim: int
    eps: float


def step_layers(
    x_BH: Tensor, layers: list[FusedLayer], heads: Heads, prompts: Prompts, glance: Glance
) -> Tensor:
    """All layers; their keys and values are kept."""
    for number, layer in enumerate(layers):
        qkv_BQD = _project(norm(x_BH, layer.input_norm_H, heads.eps), layer, heads, glance)
        mixed_BQ = _attend(qkv_BQD, number, heads, prompts, glance).to(x_BH.dtype)
        x_BH = x_BH + linear(mixed_BQ, layer.o_HQ)
        gate_up_BF = linear(norm(x_BH, layer.post_norm_H, heads.eps), layer.gate_up_FH)
        gate_BF, up_BF = gate_up_BF.chunk(2, -1)
        x_BH = x_BH + linear(F.silu(gate_BF).mul_(up_BF), layer.down_HF)
    return x_BH


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()  # rounded where the decoder rounds
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _project(normed_BH: Tensor, layer: FusedLayer, heads: Heads, glance: Glance) -> Tensor:
    """Queries, keys and values, rotated, float32, [B, heads + 2 kv heads, D]."""
    qkv_BQD = linear(normed_BH, layer.qkv_QH, layer.qkv_bias_Q).view(len(normed_BH), -1, heads.dim)
    first_v = heads.num + heads.num_kv
    qk_BMD = qkv_BQD[:, :first_v]
    q_norm_D, k_norm_D = layer.q_norm_D, layer.k_norm_D
    if q_norm_D is not None and k_norm_D is not None:
        q_BND = norm(qk_BMD[:, : heads.num], q_norm_D, heads.eps)
        k_BKD = norm(qk_BMD[:, heads.num :], k_norm_D, heads.eps)
        qk_BMD = torch.cat((q_BND, k_BKD), dim=1)
    turned_BMD = torch.addcmul(
        qk_BMD * glance.cos_B1D, qk_BMD.roll(heads.dim // 2, -1), glance.signed_sin_B1D
    )
    qkv_BQD[:, :first_v] = turned_BMD
    return qkv_BQD.float()


def _attend(qkv_BQD: Tensor, number: int, heads: Heads, prompts: Prompts, glance: Glance) -> Tensor:
    """Attention of the new tokens, which are kept. float32, [B, heads * D]."""
    num_rows, kv_heads, num_own = len(qkv_BQD), heads.num_kv, glance.num_own
    keys_BCKD, values_BCKD = glance.keys_LBCKD[number], glance.values_LBCKD[number]
    first_v = heads.num + kv_heads
    keys_BCKD[glance.index_B, glance.own_B] = qkv_BQD[:, heads.num : first_v]
    values_BCKD[glance.index_B, glance.own_B] = qkv_BQD[:, first_v:]
    # Heads that share keys stand in for query positions, so no key is copied.
    q_BKGD = (qkv_BQD[:, : heads.num] * heads.dim**-0.5).view(num_rows, kv_heads, -1, heads.dim)
    q_KRD = q_BKGD[prompts.order_B].transpose(0, 1).reshape(kv_heads, -1, heads.dim)
    scores_KRC = glance.scores_KRC
    for at, start in enumerate(prompts.starts):
        keys_KDC = prompts.keys_LKCD[at][number].transpose(1, 2)
        scores = scores_KRC[:, start : prompts.stops[at], : keys_KDC.shape[2]]
        torch.bmm(q_KRD[:, start : prompts.stops[at]], keys_KDC, out=scores)
    own_keys = keys_BCKD[:, :num_own].transpose(1, 2).flatten(0, 1)
    own_values = values_BCKD[:, :num_own].transpose(1, 2).flatten(0, 1)
    own_BKGN = torch.bmm(q_BKGD.flatten(0, 1), own_keys.transpose(1, 2)).view(num_rows, kv_heads, -1, num_own)
    own_BKGN.masked_fill_(glance.beyond_BN[:, None, None], float("-inf"))
    by_row = [kv_heads, num_rows, heads.num // kv_heads, -1]
    scores_KRC.view(by_row)[:, :, :, prompts.longest :] = own_BKGN[prompts.order_B].transpose(0, 1)
    weights_KRC = scores_KRC.softmax(-1)
    mixed_KRD = torch.empty_like(q_KRD)
    for at, start in enumerate(prompts.starts):
        values_KCD = prompts.values_LKCD[at][number]
        weights = weights_KRC[:, start : prompts.stops[at], : values_KCD.shape[1]]
        torch.bmm(weights, values_KCD, out=mixed_KRD[:, start : prompts.stops[at]])
    own_weights = weights_KRC.view(by_row)[:, :, :, prompts.longest :].transpose(0, 1)[prompts.ranks_B]
    from_prompts = mixed_KRD.view(by_row).transpose(0, 1)[prompts.ranks_B]
    own = torch.bmm(own_weights.flatten(0, 1), own_values)
    return own.view(num_rows, -1) + from_prompts.reshape(num_rows, -1)


@cache
def without_python() -> Callable[[Tensor, list[FusedLayer], Heads, Prompts, Glance], Tensor]:
    """`step_layers` as torch's own interpreter runs it, so that lanes need not take turns at Python's lock, which they wanted
    after each of a thousand operations; where this torch has no such thing any more, as it stands."""
    with warnings.catch_warnings():
        # torch.compile, the successor, needs a C++ compiler.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return torch.jit.script(step_layers)
        except (AttributeError, RuntimeError):
            return step_layers
