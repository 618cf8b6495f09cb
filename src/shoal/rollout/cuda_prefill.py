"""Whole prompts on a CUDA device, with the kernels of a decode step: what an ordinary forward pass does in a third of the launches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model import kernels
from shoal.model.cache import KVCache
from shoal.model.decoder import attend
from shoal.model.fused import FusedWeights
from shoal.rollout.rows import Prompt
from shoal.rollout.slots import upload


class Computed(NamedTuple):
    prompts: list[Prompt]
    cache: KVCache
    logits_PV: Tensor


def prefill(weights: FusedWeights, prompts: Sequence[Prompt]) -> Computed:
    """Keys and values of the prompts, and the logits after their last tokens."""
    shape, eps, device = weights.shape, weights.shape.norm_eps, weights.embed_VH.device
    lengths = np.array([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    # Padding stands behind the tokens, which look only at what is before them.
    padded = np.zeros((len(prompts), width), dtype=np.int64)
    for place, prompt in enumerate(prompts):
        padded[place, : len(prompt)] = prompt
    cache = KVCache(
        shape, num_slots=len(prompts), max_context=width, dtype=weights.embed_VH.dtype, device=device
    )
    x_TH = F.embedding(upload(padded, device).flatten(), weights.embed_VH)
    delta_TH: Tensor | None = None
    for number, layer in enumerate(weights.layers):
        keys_PCKD, values_PCKD = cache.keys_LSCKD[number], cache.values_LSCKD[number]
        normed_TH = kernels.add_norm(x_TH, delta_TH, layer.input_norm_H, eps)
        q_PCND = kernels.spread(
            F.linear(normed_TH, layer.qkv_QH, layer.qkv_bias_Q),
            layer,
            shape=shape,
            rope_PE=weights.rope_PE,
            keys_PCKD=keys_PCKD,
            values_PCKD=values_PCKD,
        )
        mixed_PCND = attend(q_PCND, keys_PCKD, values_PCKD, None)
        normed_TH = kernels.add_norm(
            x_TH, F.linear(mixed_PCND.reshape(len(x_TH), -1), layer.o_HQ), layer.post_norm_H, eps
        )
        delta_TH = F.linear(kernels.silu_mul(F.linear(normed_TH, layer.gate_up_FH)), layer.down_HF)
    assert delta_TH is not None
    last_P = upload(np.arange(len(prompts)) * width + lengths - 1, device)
    last_PH = kernels.add_norm(x_TH[last_P], delta_TH[last_P], weights.norm_H, eps)
    return Computed(list(prompts), cache, torch.mm(last_PH, weights.head_VH.t()))
