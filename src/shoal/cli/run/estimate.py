"""Estimates for `--dry-run` what a run needs: memory, arithmetic and bytes, from the model's shape and the run file.

These are orders of magnitude for planning, not measurements.
"""

from pathlib import Path

from shoal.cli.run.runfile import RunFile
from shoal.model.shape import Shape, read_shape
from shoal.trainer.memory import trainer_memory
from shoal.wire.run_spec import TaskSpec

RANKS = (1, 8, 16, 32, 64)
LOGITS_CHUNK = 4096
"""Number of tokens whose logits are in memory at once."""
LINK_BITS_PER_S = 590e6
"""Bandwidth from relays to a worker that the INTELLECT-2 report measured."""
DELTA_SHARE = 20
"""A delta has about this part of the weights' bytes."""
H100_FLOPS = 989e12
MFU = 0.4

# Figures of the INTELLECT-2 report (arXiv 2505.07291), shown beside the estimates for its run file.
REPORT = {
    "weights": "62 GB",
    "broadcast": "14 minutes",
    "train_flops": "22 minutes a step",
    "ratio": "1 : 4.5 measured, dropped groups and all",
}


def estimates(file: RunFile) -> dict[str, str]:
    """Returns estimates by name, like `derived_numbers`; none if the model is not a folder with a config.json."""
    folder = Path(file.run.model)
    if not (folder / "config.json").is_file():
        return {}
    try:
        shape = read_shape(folder)
    except ValueError as reason:
        return {"model": f"through transformers, slowly, or with --engine vllm: {reason}"}
    report = REPORT if file.run.name == "intellect-2" else {}

    def beside(value: str, key: str) -> str:
        return f"{value}   (report: {report[key]})" if key in report else value

    parameters = num_parameters(shape)
    weights = 2 * parameters
    tokens = file.coordinator.groups_per_step * file.sampling.samples_per_prompt * answer_tokens(file)
    once = forward_flops(shape, context=answer_tokens(file) // 2)
    passes = train_passes(file)
    seconds = weights * 8 / LINK_BITS_PER_S
    gpus = passes * once * tokens / (H100_FLOPS * MFU * 22 * 60)
    return {
        "parameters": f"{parameters / 1e9:.2f} billion",
        "output tokens a step": f"{tokens / 1e6:.2f} million, at {answer_tokens(file):,} an answer",
        "training a step": beside(f"{passes * once * tokens:.2g} FLOPs, {passes} forward passes' worth", "train_flops"),
        "H100s for that in 22 minutes": f"{gpus:.1f} at {MFU:.0%} of {H100_FLOPS / 1e12:.0f} TFLOP/s",
        "generating it": f"{once * tokens:.2g} FLOPs, if every rollout is used; checking it as much again",
        "training : generation, in FLOPs": beside(f"1 : {1 / passes:.2f} if every rollout is used once", "ratio"),
        "bytes of a whole version": beside(f"{weights / 1e9:.1f} GB", "weights"),
        f"to one worker at {LINK_BITS_PER_S / 1e6:.0f} Mbit/s": beside(f"{seconds / 60:.1f} minutes", "broadcast"),
        **{
            f"memory a GPU, FSDP2 over {ranks}" if ranks > 1 else "memory on one GPU": f"{gpu_bytes(shape, file, ranks) / 2**30:.0f} GiB"
            for ranks in RANKS
        },
        **{f"disk of a {role}, at most about": f"{size / 1e9:.1f} GB" for role, size in disk_bytes(shape, file).items()},
    }  # fmt: skip


def num_parameters(shape: Shape) -> int:
    head = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    return (
        shape.vocab_size * shape.hidden_size
        + head
        + shape.num_layers * _layer_parameters(shape)
        + shape.hidden_size
    )


def forward_flops(shape: Shape, *, context: int) -> float:
    """Returns the FLOPs of one token after `context` tokens: two per weight, four per value that attention reads."""
    met = shape.num_layers * _layer_parameters(shape) + shape.vocab_size * shape.hidden_size
    return 2.0 * met + 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context


def train_passes(file: RunFile) -> int:
    """Returns the arithmetic of training on a token, in forward passes: 1 forward, 2 backward, recomputation and scoring."""
    again = file.trainer.activation_checkpointing + (file.trainer.behaviour == "recompute")
    return 3 + again + (file.trainer.kl > 0)


def answer_tokens(file: RunFile) -> int:
    """Returns the expected tokens of an answer: the mean of the budgets, or without budgets the longest allowed answer."""
    whole = sum(task.weight for task in file.task)
    return round(sum(task.weight * _task_tokens(file, task) for task in file.task) / whole)


def _task_tokens(file: RunFile, task: TaskSpec) -> float:
    if task.budgets:
        return sum(task.budgets) / len(task.budgets)
    return file.sampling.of(task).max_new_tokens


def gpu_bytes(shape: Shape, file: RunFile, ranks: int) -> float:
    """Returns the memory of each of `ranks` devices: the trainer's state, gathered layers, activations and logits."""
    trainer = file.trainer
    tokens = trainer.row_tokens * trainer.rows_per_micro_batch
    width = 2 if trainer.compute_dtype == "bfloat16" else 4
    state = trainer_memory(
        num_parameters(shape), trainer, ranks=ranks, num_adapted=num_adapted(shape, trainer.lora_rank)
    )
    # Two layers at a time and the head are gathered.
    gathered = (
        width * (2 * _layer_parameters(shape) + shape.vocab_size * shape.hidden_size) if ranks > 1 else 0
    )
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Every layer keeps its activations, or with checkpointing only its input and its attention output.
    layer_bytes = width * tokens * (4 * shape.hidden_size + 2 * queries + 4 * keys + 3 * shape.ffn_size)
    kept = shape.num_layers * layer_bytes
    if trainer.activation_checkpointing:
        kept = width * tokens * shape.num_layers * (shape.hidden_size + queries) + layer_bytes
    logits = (8 + width) * min(LOGITS_CHUNK, tokens) * shape.vocab_size
    return state.device + gathered + kept + logits


def num_adapted(shape: Shape, rank: int) -> int:
    """Returns the parameters of adapters of this rank beside every linear layer."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sides = (
        2 * (shape.hidden_size + queries)
        + 2 * (shape.hidden_size + keys)
        + 3 * (shape.hidden_size + shape.ffn_size)
    )
    return rank * shape.num_layers * sides


def disk_bytes(shape: Shape, file: RunFile) -> dict[str, float]:
    """Returns the most that each role keeps on its disk, about: deltas are taken to be a twentieth of the weights."""
    run, trainer, shardcast = file.run, file.trainer, file.shardcast
    weights = 2 * num_parameters(shape)
    adapted = num_adapted(shape, trainer.lora_rank)
    state = trainer_memory(weights / 2, trainer, num_adapted=adapted)
    if trainer.lora_rank and not trainer.supervised_steps:
        whole, deltas = 2 * weights, 2.0 * run.keep_versions * adapted
    else:
        whole = (2 + run.keep_versions // shardcast.snapshot_every) * weights
        deltas = (run.keep_versions + shardcast.snapshot_every) * weights / DELTA_SHARE
    kept = 4 * weights / 2 if trainer.kl else 0
    # A node keeps the versions that a lease may name, one more, and the one that it is building.
    node = (run.max_lag + 4) * weights
    return {
        "trainer": weights + (trainer.keep_checkpoints + 1) * state.checkpoint + whole + deltas + kept,
        "relay": whole + deltas,
        "worker": node,
        "validator": node,
    }


def _layer_parameters(shape: Shape) -> int:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * queries + 2 * keys) + (queries + 2 * keys) * shape.qkv_bias
    norms = 2 * shape.hidden_size + 2 * shape.head_dim * shape.qk_norm
    return attention + 3 * shape.hidden_size * shape.ffn_size + norms
