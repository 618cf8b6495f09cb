"""Attention of one decode step: long rows, whose new tokens are divided into more shares.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/model/test_decode_attention.py
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.fused import FusedLayer
from shoal.model.rope import rope_table
from shoal.model.shape import Rope, Shape
from shoal.rollout.engine.attention_plan import AttentionPlan, TileSize
from shoal.rollout.engine.kv_slots import SlotField

pytestmark = pytest.mark.gpu

BLOCK, LONG, PROMPT = 16, 40, 21
OWN = [0, 1, 15, 16, 40, 41, 64, 100]
"""New tokens of the rows; the last three are long."""
SHAPE = Shape(
    vocab_size=300,
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=64,
    rope=Rope(rope_theta=1e4),
    norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=512,
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, kernel_device: str) -> Any:
    """The module with small blocks and short long rows."""
    from shoal.model.kernels import decode_attention  # needs Triton

    sizes = {"PROMPT_SPLIT": BLOCK, "PROMPT_BLOCK": BLOCK, "OWN_BLOCK": BLOCK, "ITEM_QUERIES": 16}
    for name, value in (sizes | {"PROMPT_PROGRAMS": 32, "LONG_ROW": LONG, "LONG_SHARES": 4}).items():
        monkeypatch.setattr(decode_attention, name, value)
    return decode_attention


class Rows:
    """Rows of one prompt. A row's values follow from its number of new tokens, whatever the other rows are."""

    def __init__(self, own: list[int]) -> None:
        self.own = own
        self.prompt_KCD = self._random(0, 2, PROMPT, SHAPE.num_kv_heads, SHAPE.head_dim)
        self.caches = [
            self._random(1 + length, 2, length, SHAPE.num_kv_heads, SHAPE.head_dim) for length in own
        ]
        heads = SHAPE.num_heads + 2 * SHAPE.num_kv_heads
        self.lines = [self._random(1000 + length, heads, SHAPE.head_dim) for length in own]

    @staticmethod
    def _random(seed: int, *size: int) -> Tensor:
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed))

    def attend(self, kernels: Any, device: str, *, row_blocks: int) -> Tensor:
        """Returns the kernels' result. `row_blocks`: blocks that a row could have."""
        from shoal.rollout.engine.step_cuda import row_tables  # needs Triton

        num, prompt_blocks = len(self.own), -(-PROMPT // BLOCK)
        cache = torch.zeros(2, prompt_blocks + num * row_blocks, BLOCK, SHAPE.num_kv_heads, SHAPE.head_dim)
        blocks_SB = prompt_blocks + np.arange(num * row_blocks).reshape(num, row_blocks)[:, ::-1]
        cache[:, :prompt_blocks].flatten(1, 2)[:, :PROMPT] = self.prompt_KCD
        for blocks_B, values in zip(blocks_SB, self.caches, strict=True):
            for at in range(values.shape[1]):
                cache[:, blocks_B[at // BLOCK], at % BLOCK] = values[:, at]
        fields = np.zeros((len(SlotField), num), dtype=np.int64)
        fields[SlotField.POSITION] = [PROMPT + length for length in self.own]
        fields[SlotField.PROMPT_LENGTH] = PROMPT
        plan = AttentionPlan(num, PROMPT, TileSize(kernels.rows_per_item(SHAPE), BLOCK))
        plan.add_rows(range(num), [0] * num, [PROMPT] * num, [list(range(prompt_blocks))] * num)
        table = plan.table_if_changed()
        assert table is not None
        tables = [torch.tensor(one.copy(), device=device) for one in (fields, table, blocks_SB)]
        one = torch.ones(1, device=device)
        result: Tensor = kernels.attend(
            torch.stack(self.lines).flatten(1).to(device),
            FusedLayer(one, one, None, None, None, one, one, one, one),
            shape=SHAPE,
            rope_PE=rope_table(SHAPE).to(device),
            rows=row_tables(*tables),
            cache=tuple(cache.to(device)),
            prompt_positions=PROMPT,
        )
        return result.cpu()

    def expected(self) -> Tensor:
        """Returns the attention as torch computes it."""
        table = rope_table(SHAPE)
        rows = []
        for length, cache, line in zip(self.own, self.caches, self.lines, strict=True):
            cos, sin = table[PROMPT + length].split(SHAPE.head_dim)
            turned = line * cos + torch.roll(line, SHAPE.head_dim // 2, dims=1) * sin
            q_ND, k_KD = turned[: SHAPE.num_heads], turned[SHAPE.num_heads : -SHAPE.num_kv_heads]
            newest = torch.stack((k_KD, line[-SHAPE.num_kv_heads :]))[:, None]
            keys, values = torch.cat((self.prompt_KCD, cache, newest), dim=1).transpose(1, 2)
            rows.append(
                F.scaled_dot_product_attention(q_ND[:, None], keys, values, enable_gqa=True).flatten()
            )
        return torch.stack(rows)


def test_long_rows_attend_to_all_their_tokens(kernels: Any, kernel_device: str) -> None:
    rows = Rows(OWN)
    found = rows.attend(kernels, kernel_device, row_blocks=8)
    torch.testing.assert_close(found, rows.expected(), atol=1e-4, rtol=1e-4)


def test_a_rows_bits_depend_on_its_length_alone(
    kernels: Any, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the number of programs nor the other rows nor the longest possible row change a bit."""
    found = {}
    for few_programs in (0, 10**6):
        monkeypatch.setattr(kernels, "FEW_PROGRAMS", few_programs)
        found[few_programs] = Rows(OWN).attend(kernels, kernel_device, row_blocks=8)
    assert torch.equal(found[0], found[10**6])
    for row, length in enumerate(OWN):
        (alone,) = Rows([length]).attend(kernels, kernel_device, row_blocks=8)
        # In the interpreter a product is NumPy's, whose order of sums depends on the row's place in the tile.
        atol = 0.0 if kernel_device == "cuda" else 1e-6
        torch.testing.assert_close(alone, found[0][row], atol=atol, rtol=0.0)
    short = [length for length in OWN if length < 2 * BLOCK]
    narrow = Rows(short).attend(kernels, kernel_device, row_blocks=2)
    assert torch.equal(narrow, found[0][: len(short)])
