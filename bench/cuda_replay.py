"""Recomputes the states of finished rows, all tokens at once, with every sum in the order in which decoding took it.

A prefill sums over a row's tokens in another order than decoding does, so its states differ in the last bits. Here each
token is a row of its own for the decode step's kernels: it attends to the prompt by the same splits and to the new
tokens by the same blocks. Norms are per token, and the matrix products sum each row alike for any number of rows.

Used by bench/engine.py and by the GPU tests. Needs Triton.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import KVCache
from shoal.model.fused import FusedWeights
from shoal.model.kernels import decode_attention, elementwise, prompt_attention
from shoal.model.packed_prefill import upload
from shoal.rollout.engine.attention_plan import AttentionPlan
from shoal.rollout.engine.kv_slots import SlotField
from shoal.rollout.engine.scheduler import Prompt
from shoal.rollout.engine.step_cuda import TILE, prefill_by_layer, row_tables


class FedTokens(NamedTuple):
    """The new tokens that rows were fed, laid end to end."""

    counts: list[int]
    table_3T: Tensor
    """Token, position and place, as `prompt_attention.norm_and_rotate` reads them. The places put a token's key after those of
    its row's earlier tokens."""
    rows: decode_attention.RowTables
    keys_TKD: Tensor
    values_TKD: Tensor
    pad: int
    """Unused lines of keys and values before the first token."""


@torch.inference_mode()
def replay(weights: FusedWeights, rows: Sequence[tuple[Prompt, Sequence[int]]]) -> list[Tensor]:
    """Returns the states of (prompt, new tokens) rows, [N-1, H] each: every new token but the last, which is never fed."""
    shape, eps = weights.shape, weights.shape.norm_eps
    prompts = list(dict.fromkeys(prompt for prompt, _ in rows))
    kept = KVCache(
        shape,
        num_slots=len(prompts),
        max_context=max(len(prompt) for prompt in prompts),
        dtype=weights.embed_VH.dtype,
        device=weights.embed_VH.device,
    )
    list(prefill_by_layer(weights, prompts, range(len(prompts)), kept))
    fed = _lay_out(weights, rows, {prompt: place for place, prompt in enumerate(prompts)})
    x_TH = F.embedding(fed.table_3T[0], weights.embed_VH)
    delta_TH: Tensor | None = None
    for number, layer in enumerate(weights.layers):
        qkv_TQ = F.linear(
            elementwise.add_norm(x_TH, delta_TH, layer.input_norm_H, eps), layer.qkv_QH, layer.qkv_bias_Q
        )
        prompt_attention.norm_and_rotate(
            qkv_TQ,
            layer,
            shape=shape,
            rope_PE=weights.rope_PE,
            table_3T=fed.table_3T,
            kept=(fed.keys_TKD[:, None], fed.values_TKD[:, None]),
        )
        mixed_TQ = decode_attention.attend(
            qkv_TQ,
            layer,
            shape=shape,
            rope_PE=weights.rope_PE,
            rows=fed.rows,
            own=(fed.keys_TKD[fed.pad :, None], fed.values_TKD[fed.pad :, None]),
            shared=(kept.keys_LSCKD[number], kept.values_LSCKD[number]),
        )
        normed_TH = elementwise.add_norm(x_TH, F.linear(mixed_TQ, layer.o_HQ), layer.post_norm_H, eps)
        delta_TH = F.linear(elementwise.silu_mul(F.linear(normed_TH, layer.gate_up_FH)), layer.down_HF)
    states_TH = elementwise.add_norm(x_TH, delta_TH, weights.norm_H, eps)
    return list(torch.split(states_TH, fed.counts))


def _lay_out(
    weights: FusedWeights, rows: Sequence[tuple[Prompt, Sequence[int]]], places: dict[Prompt, int]
) -> FedTokens:
    shape, device = weights.shape, weights.embed_VH.device
    counts = [len(tokens) - 1 for _, tokens in rows]
    total, pad = sum(counts), max(len(prompt) for prompt, _ in rows)
    fields_6T = np.zeros((len(SlotField), total), dtype=np.int64)
    table_3T = np.zeros((3, total), dtype=np.int64)
    homes_T = np.zeros(total, dtype=np.int64)
    start = 0
    for (prompt, tokens), count in zip(rows, counts, strict=True):
        here = slice(start, start + count)
        table_3T[0, here] = tokens[:-1]
        fields_6T[SlotField.POSITION, here] = table_3T[1, here] = len(prompt) + np.arange(count)
        table_3T[2, here] = pad + start - len(prompt)
        fields_6T[SlotField.PROMPT_PLACE, here] = places[prompt]
        fields_6T[SlotField.PROMPT_LENGTH, here] = len(prompt)
        homes_T[here] = start
        start += count
    plan = AttentionPlan(total, pad, TILE)
    prompt_places, prompt_lengths = fields_6T[SlotField.PROMPT_PLACE], fields_6T[SlotField.PROMPT_LENGTH]
    plan.add_rows(range(total), prompt_places.tolist(), prompt_lengths.tolist())
    plan_table = plan.table_if_changed()
    assert plan_table is not None
    tables = row_tables(upload(fields_6T, device), upload(plan_table, device), upload(homes_T, device))
    size = (pad + total, shape.num_kv_heads, shape.head_dim)
    keys_TKD, values_TKD = (torch.zeros(size, dtype=weights.embed_VH.dtype, device=device) for _ in range(2))
    return FedTokens(counts, upload(table_3T, device), tables, keys_TKD, values_TKD, pad)
