"""The states of finished rows once more, all tokens at once, with every sum in the order in which decoding took it.

An ordinary prefill looks at a row's tokens in another order than decoding did, so its states differ in their last bits. Here
each token is a row of its own for the decode step's kernels: it looks at the prompt by the same splits and at the new
tokens by the same blocks. Norms are per token, and the matrix products sum each row alike however many there are.
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
from shoal.rollout.engine.attention_plan import Pieces
from shoal.rollout.engine.prefill_cuda import prefill
from shoal.rollout.engine.rows import Prompt
from shoal.rollout.engine.step_cuda import PIECE, row_tables


class _Fed(NamedTuple):
    """The new tokens that rows were fed, laid end to end."""

    counts: list[int]
    table_3T: Tensor
    """As `prompt_kernels.spread` reads it: places are such that a token's key goes behind its row's earlier ones."""
    rows: decode_attention.RowTables
    keys_TKD: Tensor
    values_TKD: Tensor
    pad: int
    """Lines of the two that come before the first token."""


@torch.inference_mode()
def replay(weights: FusedWeights, rows: Sequence[tuple[Prompt, Sequence[int]]]) -> list[Tensor]:
    """States of (prompt, new tokens) rows, [N-1, H] each: of every new token but the last, which decoding never fed."""
    shape, eps = weights.shape, weights.shape.norm_eps
    prompts = list(dict.fromkeys(prompt for prompt, _ in rows))
    kept = KVCache(
        shape,
        num_slots=len(prompts),
        max_context=max(len(prompt) for prompt in prompts),
        dtype=weights.embed_VH.dtype,
        device=weights.embed_VH.device,
    )
    prefill(weights, prompts, range(len(prompts)), kept)
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
) -> _Fed:
    shape, device = weights.shape, weights.embed_VH.device
    counts = [len(tokens) - 1 for _, tokens in rows]
    total, pad = sum(counts), max(len(prompt) for prompt, _ in rows)
    table_6T, table_3T = np.zeros((6, total), dtype=np.int64), np.zeros((3, total), dtype=np.int64)
    homes_T = np.zeros(total, dtype=np.int64)
    start = 0
    for (prompt, tokens), count in zip(rows, counts, strict=True):
        here = slice(start, start + count)
        table_3T[0, here] = tokens[:-1]
        table_6T[0, here] = table_3T[1, here] = len(prompt) + np.arange(count)
        table_3T[2, here] = pad + start - len(prompt)
        table_6T[4, here], table_6T[5, here] = places[prompt], len(prompt)
        homes_T[here] = start
        start += count
    pieces = Pieces(total, pad, PIECE)
    pieces.enter(range(total), table_6T[4].tolist(), table_6T[5].tolist())
    work = pieces.changed()
    assert work is not None
    tables = row_tables(upload(table_6T, device), upload(work, device), upload(homes_T, device))
    size = (pad + total, shape.num_kv_heads, shape.head_dim)
    keys_TKD, values_TKD = (torch.zeros(size, dtype=weights.embed_VH.dtype, device=device) for _ in range(2))
    return _Fed(counts, upload(table_3T, device), tables, keys_TKD, values_TKD, pad)
