"""Measures the attention of a decode step against the memory bandwidth, for rows of different lengths.

    python bench/attention.py --shape 135m 0.5b 7b 32b --rows 256 --own 300 2000
    python bench/attention.py --shape 7b --own 2000 --variant OWN_SHARES=4 --variant OWN_SHARES=4,OWN_STAGES=2

Rows have prompts of 64 to 512 tokens, 16 rows of each, and between 1 and twice `--own` new tokens. The limit is the time to read every
key and value once at --bandwidth, a prompt once for all its rows. Each --variant changes constants of the module
model/kernels/decode_attention.py and is measured on the same rows. Needs a CUDA device.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import torch
from engine import SHAPES

from shoal.model.fused import FusedLayer
from shoal.model.rope import rope_table
from shoal.model.shape import Rope, Shape
from shoal.rollout.engine.attention_plan import AttentionPlan
from shoal.rollout.engine.block_pool import BLOCK, blocks_for
from shoal.rollout.engine.kv_slots import SlotField

LAYERS = 4
"""Layers whose caches are read in turn, so that none is still in the L2 cache."""


def shape_named(name: str) -> Shape:
    hidden, layers, heads, kv_heads, head_dim, ffn, vocab = SHAPES[name]
    return Shape(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        rope=Rope(rope_theta=1e5),
        norm_eps=1e-5,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        max_positions=16384,
    )


class Case:
    """Rows with their caches, and the tables that the kernels read."""

    def __init__(self, shape: Shape, num_rows: int, own: int) -> None:
        from shoal.rollout.engine.step_cuda import row_tables, tile_size  # needs Triton

        rng = np.random.default_rng(0)
        self.shape, num_prompts = shape, -(-num_rows // 16)
        prompts = rng.integers(64, 513, num_prompts)
        own_S = rng.integers(1, 2 * own, num_rows)
        prompt_S = np.repeat(prompts, 16)[:num_rows]
        self.prompt_positions = 512
        free = iter(range(10**9))
        prompt_blocks = [[next(free) for _ in range(blocks_for(length))] for length in prompts]
        blocks_SB = np.zeros((num_rows, blocks_for(2 * own + 1)), dtype=np.int64)
        for slot, length in enumerate(own_S):
            count = blocks_for(length + 1)
            blocks_SB[slot, :count] = [next(free) for _ in range(count)]
        num_blocks = next(free)
        size = (LAYERS, num_blocks, BLOCK, shape.num_kv_heads, shape.head_dim)
        self.keys, self.values = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        fields = np.zeros((len(SlotField), num_rows), dtype=np.int64)
        fields[SlotField.POSITION] = prompt_S + own_S
        fields[SlotField.PROMPT_LENGTH] = prompt_S
        plan = AttentionPlan(num_rows, self.prompt_positions, tile_size(shape))
        plan.add_rows(
            list(range(num_rows)),
            [slot // 16 for slot in range(num_rows)],
            prompt_S.tolist(),
            [prompt_blocks[slot // 16] for slot in range(num_rows)],
        )
        table = plan.table_if_changed()
        assert table is not None
        on_device = [torch.tensor(one, device="cuda") for one in (fields, table, blocks_SB)]
        self.tables = row_tables(*on_device)
        line = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = torch.randn(num_rows, line, device="cuda", dtype=torch.bfloat16)
        self.rope = rope_table(shape).to("cuda", torch.bfloat16)
        one = torch.ones(1, device="cuda", dtype=torch.bfloat16)
        self.layer = FusedLayer(one, one, None, None, None, one, one, one, one)
        position_bytes = 2 * 2 * shape.num_kv_heads * shape.head_dim
        self.bytes_once = position_bytes * int(own_S.sum() + prompts.sum())

    def run(self) -> None:
        from shoal.model.kernels import decode_attention  # needs Triton

        for layer in range(LAYERS):
            decode_attention.attend(
                self.qkv,
                self.layer,
                shape=self.shape,
                rope_PE=self.rope,
                rows=self.tables,
                cache=(self.keys[layer], self.values[layer]),
                prompt_positions=self.prompt_positions,
            )


@contextmanager
def constants(settings: dict[str, int]) -> Iterator[None]:
    """Sets constants of the kernels; MAX_REGISTERS is what `max_registers` returns."""
    from shoal.model.kernels import decode_attention  # needs Triton

    with ExitStack() as stack:
        for name, value in settings.items():
            if name == "MAX_REGISTERS":
                stack.enter_context(
                    mock.patch.object(decode_attention, "max_registers", lambda _, n=value: n)
                )
            elif not hasattr(decode_attention, name):
                raise SystemExit(f"--variant {name}={value}: no such constant in kernels/decode_attention.py")
            else:
                stack.enter_context(mock.patch.object(decode_attention, name, value))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["135m"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--own", type=int, nargs="+", default=[300])
    parser.add_argument("--variant", action="append", default=[], help="NAME=VALUE,NAME=VALUE")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes/s; the default is an H200's")
    options = parser.parse_args()
    from triton.testing import do_bench  # the help needs no Triton

    variants = [""] + options.variant
    for name in options.shape:
        for own in options.own:
            case = Case(shape_named(name), options.rows, own)
            limit_ms = case.bytes_once / options.bandwidth * 1e3
            for variant in variants:
                settings = {
                    key: int(value) for key, value in (one.split("=") for one in variant.split(",") if one)
                }
                with constants(settings):
                    spent_ms = do_bench(case.run, warmup=10, rep=60, return_mode="median") / LAYERS
                print(
                    f"{name:>5} {options.rows} rows, {own:>5} new tokens on average: {spent_ms:.4f} ms a layer, limit {limit_ms:.4f} "
                    f"({limit_ms / spent_ms:.0%}) {json.dumps(settings) if settings else ''}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
