"""Attention inside runs laid end to end, by one kernel, compared with torch's, row by row.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/model/test_prompt_attention.py
"""

from itertools import accumulate

import pytest
import torch

from shoal.model.decoder import attend_spans

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "lengths", "follows"),
    [
        (9, 3, 64, [5, 130, 64, 1, 65], {}),
        (9, 3, 64, [64, 3, 100, 70, 128, 0, 1], {1: 0, 3: 2, 4: 2, 5: 2, 6: 4}),
        (4, 4, 128, [200], {}),
        (4, 2, 16, [70, 3], {1: 0}),
        (2, 2, 80, [66, 64], {1: 0}),  # not a power of two
        (4, 1, 8, [10, 128], {1: 0}),
    ],
)
def test_runs_attend_only_to_their_rows(
    heads: int, kv_heads: int, head_dim: int, lengths: list[int], follows: dict[int, int], kernel_device: str
) -> None:
    from shoal.model.kernels.prompt_attention import attend_runs  # needs Triton

    dtype = torch.float16 if kernel_device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(head_dim)
    qkv_TQD = torch.randn(sum(lengths), heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    spans = [(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    earlier = [spans[follows[number]] if number in follows else (0, 0) for number in range(len(spans))]
    runs_4R = torch.tensor(
        [(a, b - a, c, d - c) for (a, b), (c, d) in zip(spans, earlier, strict=True)], dtype=torch.int32
    ).T.contiguous()

    found_TND = attend_runs(
        qkv_TQD.to(kernel_device),
        runs_4R.to(kernel_device),
        max(lengths),
        num_heads=heads,
        num_kv_heads=kv_heads,
    ).cpu()
    assert found_TND.dtype == dtype
    for (begin, end), (first, last) in zip(spans, earlier, strict=True):
        if begin < end:
            row_TQD = torch.cat([qkv_TQD[first:last], qkv_TQD[begin:end]]).float()
            q, k, v = torch.split(row_TQD, [heads, kv_heads, kv_heads], dim=1)
            expected = attend_spans(q, k, v, [(0, len(q))])[last - first :]
            assert (found_TND[begin:end].float() - expected).norm() < 5e-3 * expected.norm()
