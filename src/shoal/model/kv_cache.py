"""Keys and values of the tokens seen so far, one slot per row.

    keys[layer, slot, position, kv head, :]

A forward pass over B rows uses slots 0 .. B-1 and looks at positions 0 .. context-1, each row at those up to its
own token. What stands beyond a row's token is never looked at before it is written, so nothing is ever cleared.
"""

import torch
from torch import Tensor

from shoal.model.shape import Shape


class KVCache:
    """`context` is set before each forward: how many positions the longest row needs, its new tokens included."""

    def __init__(
        self,
        shape: Shape,
        *,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device | str,
        heads_apart: bool = False,
    ) -> None:
        """`heads_apart`: the positions of one head lie together in memory, whatever the order of the indices."""
        size = (shape.num_layers, num_slots, max_context, shape.num_kv_heads, shape.head_dim)
        if heads_apart:
            size = (shape.num_layers, num_slots, shape.num_kv_heads, max_context, shape.head_dim)
        # Zeros, not empty: stale NaNs in unwritten memory would pass through a mask (0 * NaN).
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        self.keys_LSCKD = keys.transpose(2, 3) if heads_apart else keys
        self.values_LSCKD = values.transpose(2, 3) if heads_apart else values
        self.num_slots, self.max_context = num_slots, max_context
        self.context = max_context

    def write(
        self, layer: int, positions_BT: Tensor, keys_BTKD: Tensor, values_BTKD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; returns all that the rows may look at, [B, context, K, D]."""
        num_rows = positions_BT.shape[0]
        rows_B1 = torch.arange(num_rows, device=positions_BT.device)[:, None]
        all_keys, all_values = self.keys_LSCKD[layer, :num_rows], self.values_LSCKD[layer, :num_rows]
        all_keys[rows_B1, positions_BT] = keys_BTKD
        all_values[rows_B1, positions_BT] = values_BTKD
        return all_keys[:, : self.context], all_values[:, : self.context]

    def copy_from(self, source: "KVCache", *, source_slots: Tensor, slots: Tensor, context: int) -> None:
        """Fill `slots` with `source_slots` of another cache (or of this one), positions 0 .. context-1."""
        self.keys_LSCKD[:, slots, :context] = source.keys_LSCKD[:, source_slots, :context]
        self.values_LSCKD[:, slots, :context] = source.values_LSCKD[:, source_slots, :context]
