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

from shoal.model.fused import FusedWeights
from shoal.model.kernels import decode_attention, elementwise, prompt_attention
from shoal.model.packed_prefill import upload
from shoal.rollout.engine.attention_plan import AttentionPlan
from shoal.rollout.engine.block_pool import BLOCK, Prompt, blocks_for
from shoal.rollout.engine.kv_slots import BlockCache, SlotField
from shoal.rollout.engine.step_cuda import prefill_by_layer, row_tables, tile_size


class FedTokens(NamedTuple):
    """The new tokens that rows were fed, laid end to end."""

    counts: list[int]
    table_3T: Tensor
    """Token, position and line of the cache, as `prompt_attention.norm_and_rotate` reads them."""
    rows: decode_attention.RowTables
    prompt_positions: int


@torch.inference_mode()
def replay(weights: FusedWeights, rows: Sequence[tuple[Prompt, Sequence[int]]]) -> list[Tensor]:
    """Returns the states of (prompt, new tokens) rows, [N-1, H] each: every new token but the last, which is never fed."""
    shape, eps = weights.shape, weights.shape.norm_eps
    prompts = list(dict.fromkeys(prompt for prompt, _ in rows))
    lengths = [len(prompt) for prompt in prompts] + [len(tokens) for _, tokens in rows]
    ends = np.cumsum([blocks_for(length) for length in lengths]).tolist()
    blocks = [list(range(end - blocks_for(length), end)) for end, length in zip(ends, lengths, strict=True)]
    of_prompt = dict(zip(prompts, blocks, strict=False))
    cache = BlockCache(shape, ends[-1], weights.embed_VH.dtype, weights.embed_VH.device)
    list(prefill_by_layer(weights, prompts, list(of_prompt.values()), cache))
    fed = _lay_out(weights, rows, of_prompt, blocks[len(prompts) :])
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
            kept=(cache.keys_LMCKD[number], cache.values_LMCKD[number]),
        )
        mixed_TQ = decode_attention.attend(
            qkv_TQ,
            layer,
            shape=shape,
            rope_PE=weights.rope_PE,
            rows=fed.rows,
            cache=(cache.keys_LMCKD[number], cache.values_LMCKD[number]),
            prompt_positions=fed.prompt_positions,
        )
        normed_TH = elementwise.add_norm(x_TH, F.linear(mixed_TQ, layer.o_HQ), layer.post_norm_H, eps)
        delta_TH = F.linear(elementwise.silu_mul(F.linear(normed_TH, layer.gate_up_FH)), layer.down_HF)
    states_TH = elementwise.add_norm(x_TH, delta_TH, weights.norm_H, eps)
    return list(torch.split(states_TH, fed.counts))


def _lay_out(
    weights: FusedWeights,
    rows: Sequence[tuple[Prompt, Sequence[int]]],
    of_prompt: dict[Prompt, list[int]],
    of_row: Sequence[Sequence[int]],
) -> FedTokens:
    """Makes a row of each fed token. `of_prompt`, `of_row`: the blocks of prompts and rows."""
    device = weights.embed_VH.device
    counts = [len(tokens) - 1 for _, tokens in rows]
    total, longest = sum(counts), max(len(prompt) for prompt in of_prompt)
    places = {prompt: place for place, prompt in enumerate(of_prompt)}
    fields_6T = np.zeros((len(SlotField), total), dtype=np.int64)
    table_3T = np.zeros((3, total), dtype=np.int64)
    blocks_TB = np.zeros((total, max(map(len, of_row))), dtype=np.int64)
    start = 0
    for (prompt, tokens), count, blocks in zip(rows, counts, of_row, strict=True):
        here, own = slice(start, start + count), np.arange(count)
        table_3T[0, here] = tokens[:-1]
        fields_6T[SlotField.POSITION, here] = table_3T[1, here] = len(prompt) + own
        table_3T[2, here] = np.array(blocks)[own // BLOCK] * BLOCK + own % BLOCK
        fields_6T[SlotField.PROMPT_PLACE, here] = places[prompt]
        fields_6T[SlotField.PROMPT_LENGTH, here] = len(prompt)
        blocks_TB[here, : len(blocks)] = blocks
        start += count
    plan = AttentionPlan(total, longest, tile_size(weights.shape))
    prompt_places, prompt_lengths = fields_6T[SlotField.PROMPT_PLACE], fields_6T[SlotField.PROMPT_LENGTH]
    prompt_blocks = [
        of_prompt[prompt] for (prompt, _), count in zip(rows, counts, strict=True) for _ in range(count)
    ]
    plan.add_rows(range(total), prompt_places.tolist(), prompt_lengths.tolist(), prompt_blocks)
    plan_table = plan.table_if_changed()
    assert plan_table is not None
    tables = row_tables(upload(fields_6T, device), upload(plan_table, device), upload(blocks_TB, device))
    return FedTokens(counts, upload(table_3T, device), tables, longest)
