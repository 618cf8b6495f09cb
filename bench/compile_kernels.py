"""Compiles every Triton kernel for GPUs that need not be here, and prints what the compiler says of them.

    python bench/compile_kernels.py                     a minute, no GPU; needs the package triton
    python bench/compile_kernels.py --arch 80 90        compute capability 8.0 and 9.0

Registers, spilled bytes and shared memory are those of ptxas, for the shapes of the models below. A kernel that does not compile,
or that needs more shared memory than a multiprocessor has, ends the command with exit code 1.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from shoal.model.kernels import decode_attention, elementwise, logits, prompt_attention
from shoal.toploc import proof_kernels

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may use, by compute capability."""
TILE_COPIES_FROM = 90
ROWS, BLOCKS, BLOCK_POSITIONS = 64, 16, 128
TOPK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    qk_norm: bool = False


MODELS = {
    "135M": ModelSize(hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49_152),
    "Qwen2.5 0.5B": ModelSize(hidden=896, heads=14, kv_heads=2, head_dim=64, ffn=4864, vocab=151_936),
    "Qwen3 8B": ModelSize(
        hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12_288, vocab=151_936, qk_norm=True
    ),
    "Qwen2.5 7B": ModelSize(hidden=3584, heads=28, kv_heads=4, head_dim=128, ffn=18_944, vocab=152_064),
    "Qwen2.5 32B": ModelSize(hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=27_648, vocab=152_064),
}


class AbsentGpu:
    """Stands in for Triton's driver: names the GPU to compile for, and launches nothing."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Compiler:
    """Makes every launch compile its kernel instead, and collects the results."""

    def __init__(self) -> None:
        self.compiled: dict[str, Any] = {}
        launch = JITFunction.run

        def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            found = launch(kernel, *args, warmup=True, **options)
            self.compiled[kernel.fn.__name__] = found
            return found

        JITFunction.run = compile_only


def launch_all(size: ModelSize, arch: int) -> None:
    """Calls every function that launches a kernel, with tensors of the model's sizes."""
    bf16, int64 = torch.bfloat16, torch.int64
    width = (size.heads + 2 * size.kv_heads) * size.head_dim
    norm_D = torch.ones(size.head_dim, dtype=bf16) if size.qk_norm else None
    layer = cast(Any, SimpleNamespace(q_norm_D=norm_D, k_norm_D=norm_D))
    shape = cast(
        Any,
        SimpleNamespace(
            num_heads=size.heads,
            num_kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            norm_eps=1e-6,
            qk_norm=size.qk_norm,
        ),
    )
    qkv, rope = torch.zeros(ROWS, width, dtype=bf16), torch.zeros(4096, 2 * size.head_dim, dtype=bf16)
    x, table_6S = torch.zeros(ROWS, size.hidden, dtype=bf16), torch.zeros(6, ROWS, dtype=int64)
    cache = tuple(
        torch.zeros(BLOCKS, BLOCK_POSITIONS, size.kv_heads, size.head_dim, dtype=bf16) for _ in range(2)
    )
    rows = decode_attention.RowTables(
        table_6S=table_6S,
        order_S=torch.zeros(ROWS, dtype=int64),
        items_5W=torch.zeros(5, 256, dtype=int64),
        num_items_1=torch.zeros(1, dtype=int64),
        blocks_SB=torch.zeros(ROWS, 64, dtype=int64),
    )
    decode_attention.attend(
        qkv, layer, shape=shape, rope_PE=rope, rows=rows, cache=cast(Any, cache), prompt_positions=512
    )
    lines = tuple(each.view(-1, size.kv_heads, size.head_dim) for each in cache)
    heads = prompt_attention.norm_and_rotate(
        qkv,
        layer,
        shape=shape,
        rope_PE=rope,
        table_3T=torch.zeros(3, ROWS, dtype=int64),
        kept=cast(Any, lines),
    )
    runs_4R = torch.zeros(4, 2, dtype=torch.int32)
    prompt_attention.attend_runs(heads, runs_4R, ROWS, num_heads=size.heads, num_kv_heads=size.kv_heads)
    states = torch.zeros(ROWS, 32, size.hidden, dtype=bf16)
    counts = torch.zeros(ROWS, dtype=int64)
    elementwise.add_norm(x, x, x[0], 1e-6, keep=(states, counts, counts))
    gate_up = torch.zeros(2 * size.ffn, size.hidden, dtype=bf16)
    elementwise.silu_mul(torch.zeros(ROWS, 2 * size.ffn, dtype=bf16))
    elementwise.gate_product(x, x)
    elementwise.gate_gradients(x, x, x)
    table = rope.view(1, 4096, 1, -1)[:, :ROWS].split(size.head_dim, dim=-1)
    heads_BTND = torch.zeros(1, ROWS, size.heads, size.head_dim, dtype=bf16)
    elementwise.rotate_heads(heads_BTND, *table, sign=1.0)
    if arch >= TILE_COPIES_FROM:
        elementwise.launch_gated_product(x, gate_up)
    launch_logits(size, table_6S)
    indices, bits = torch.zeros(4, TOPK, dtype=int64), torch.zeros(4, TOPK, dtype=torch.int16)
    proof_kernels.proof_lines(indices, bits)
    proof_kernels.values(torch.zeros(4, TOPK, dtype=torch.int32), torch.zeros(4, TOPK, dtype=torch.int32))


def launch_logits(size: ModelSize, table_6S: torch.Tensor) -> None:
    scores, tokens = torch.zeros(8, size.vocab, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64)
    _, lse, entropy = logits.reduce_rows(scores, tokens, 1.0)
    logits.gradient_rows(scores, tokens, (lse, entropy), (lse, entropy), 1.0)
    logits.token_intervals(scores, tokens, 1.0)
    sampling = torch.zeros(ROWS, 33, dtype=torch.float64)
    logits.draw(
        scores,
        sources_R=tokens,
        slots_R=tokens,
        temperatures_S=sampling[:, 0],
        uniforms_SN=sampling[:, 1:],
        table_6S=table_6S,
        newest_S=torch.zeros(ROWS, dtype=torch.int64),
        tokens_SN=torch.zeros(ROWS, 32, dtype=torch.int64),
        logprobs_SN=torch.zeros(ROWS, 32, dtype=torch.float32),
        is_end_V=torch.zeros(size.vocab, dtype=torch.bool),
    )


def resources(kernel: Any) -> tuple[int, int]:
    """Returns registers per thread and spilled bytes of a compiled kernel, read by the cuobjdump that triton has."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        words = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found is not None, f"cuobjdump printed no resources: {text}"
    return int(found[1]), int(found[2]) + int(found[3])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", choices=SHARED_BYTES, default=[90])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    compiler, failed = Compiler(), 0
    print(
        f"{'arch':<6}{'model':<15}{'kernel':<20}{'warps':>6}{'registers':>11}{'spilled':>9}{'shared kB':>11}"
    )
    for arch in options.arch:
        driver.set_active(AbsentGpu(arch))
        for name in options.models:
            compiler.compiled.clear()
            launch_all(MODELS[name], arch)
            for kernel, found in compiler.compiled.items():
                registers, spilled = resources(found)
                shared, too_much = found.metadata.shared, found.metadata.shared > SHARED_BYTES[arch]
                failed += too_much
                print(
                    f"{arch:<6}{name:<15}{kernel.lstrip('_'):<20}{found.metadata.num_warps:>6}{registers:>11}{spilled:>9}"
                    f"{shared / 1024:>11.1f}{'  more than there is' if too_much else ''}",
                    flush=True,
                )
    print(
        f"{failed} kernels need more shared memory than there is" if failed else "all kernels compile and fit"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
