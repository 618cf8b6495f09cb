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
"""Number of tokens whose logits are in memory at once (model.logprobs.CHUNK)."""
FEW_LOGITS = 1 << 24
"""Number of logits that a CPU keeps for the backward pass (model.logprobs.FEW_LOGITS)."""
LINK_BITS_PER_S = 590e6
"""Bandwidth from relays to a worker that the INTELLECT-2 report measured."""
WEIGHTS_PER_DELTA = 20
"""The weights have about this many times the bytes of a delta."""
STORED_TOKEN_BYTES = 14
"""Bytes of an output token in a submission: id and log-prob, compressed, and its share of a proof (measured 13 to 17)."""
H100_FLOPS = 989e12
MFU = 0.4

# Figures of the INTELLECT-2 report (arXiv 2505.07291), shown beside the estimates for its run file.
REPORT = {
    "weights": "62 GB",
    "broadcast": "14 minutes",
    "train_flops": "22 minutes a step",
    "ratio": "1 : 4.5 measured, dropped groups included",
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
    passes = file.trainer.passes_per_token
    seconds = weights * 8 / LINK_BITS_PER_S
    gpus = passes * once * tokens / (H100_FLOPS * MFU * 22 * 60)
    cluster = {"H100s for that in 22 minutes": f"{gpus:.1f} at {MFU:.0%} of {H100_FLOPS / 1e12:.0f} TFLOP/s"}
    return {
        "parameters": _scaled(parameters),
        "output tokens a step": f"{_scaled(tokens)}, at {answer_tokens(file):,} an answer",
        "training a step": beside(f"{passes * once * tokens:.2g} FLOPs, {passes} forward passes' worth", "train_flops"),
        **(cluster if gpus >= 0.1 else {}),
        "generating it": f"{once * tokens:.2g} FLOPs, if every rollout is used; checking it as much again",
        "training : generation, in FLOPs": beside(f"1 : {1 / passes:.2f} if every rollout is used once", "ratio"),
        "bytes of a whole version": beside(_bytes(weights), "weights"),
        f"to one worker at {LINK_BITS_PER_S / 1e6:.0f} Mbit/s": beside(f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.1f} s", "broadcast"),
        **{
            f"memory a GPU, FSDP2 over {ranks}" if ranks > 1 else "memory on one GPU": f"{device_bytes(shape, file, ranks=ranks) / 2**30:.0f} GiB"
            for ranks in RANKS
        },
        "memory of a trainer on a CPU": _bytes(device_bytes(shape, file, on_cpu=True)),
        **{f"disk of a {role}, at most about": _bytes(size) for role, size in disk_bytes(shape, file).items()},
        "disk of the coordinator, at least": f"{_bytes(rollout_bytes(file))} of accepted rollouts, all of which are kept",
    }  # fmt: skip


def _scaled(count: float) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.2f} billion"
    return f"{count / 1e6:.2f} million" if count >= 1e5 else f"{count:,.0f}"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


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


def answer_tokens(file: RunFile) -> int:
    """Returns the expected tokens of an answer: the mean of the budgets, or without budgets the longest allowed answer."""
    whole = sum(task.weight for task in file.task)
    return round(sum(task.weight * _task_tokens(file, task) for task in file.task) / whole)


def _task_tokens(file: RunFile, task: TaskSpec) -> float:
    if task.budgets:
        return sum(task.budgets) / len(task.budgets)
    return file.sampling.of(task).max_new_tokens


def device_bytes(
    shape: Shape, file: RunFile, *, ranks: int = 1, on_cpu: bool = False, sharded: bool = False
) -> float:
    """Returns the memory of each of `ranks` devices: the trainer's state, gathered layers, activations and logits.

    `sharded` is set for a single rank that computes as one of several.
    Gradients are there while activations are, because an update usually has more than one micro-batch.
    """
    trainer = file.trainer
    tokens = trainer.row_tokens * trainer.rows_per_micro_batch
    width = 2 if trainer.compute_dtype == "bfloat16" else 4
    state = trainer_memory(
        num_parameters(shape),
        trainer,
        ranks=ranks,
        num_adapted=num_adapted(shape, trainer.lora_rank),
        sharded=sharded,
    )
    matrix = shape.vocab_size * shape.hidden_size
    gathered = 0
    if ranks > 1 or sharded:
        # Two layers at a time, embedding and head are gathered; the gradients of one layer or of the head are whole, in float32.
        root = matrix if shape.tied_embeddings else 2 * matrix
        gathered = width * (2 * _layer_parameters(shape) + root)
        gathered += 0 if trainer.lora_rank else 4 * max(_layer_parameters(shape), root)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Saved for the backward pass: both residuals and both norms' results, queries, keys, values and the attention's result, and four
    # results of the MLP, or three with the fused gate of 16-bit numbers. A CPU repeats keys and values for each head, and has a mask
    # instead of the segments' starts.
    attention = 4 * queries if on_cpu else 2 * queries + 2 * keys
    attention += (queries + keys) * shape.qk_norm
    layer_bytes = (
        width * tokens * (4 * shape.hidden_size + attention + (3 if width == 2 else 4) * shape.ffn_size)
    )
    mask = width * tokens * trainer.row_tokens if on_cpu else 0
    logits = _logits_bytes(shape, tokens, width, on_cpu=on_cpu)
    if not trainer.lora_rank:
        logits += 4 * matrix  # the head's gradient, which is summed in float32
    if trainer.activation_checkpointing:
        # Every layer keeps its input and its attention's result. Logits are gone when the first layer is computed again.
        kept = width * tokens * shape.num_layers * (shape.hidden_size + queries) + max(layer_bytes, logits)
    else:
        kept = shape.num_layers * layer_bytes + logits
    return state.device + gathered + kept + mask + (state.reference if on_cpu else 0)


def _logits_bytes(shape: Shape, tokens: int, width: int, *, on_cpu: bool) -> int:
    """Returns the most that logits and their gradient take at once."""
    num_logits = min(LOGITS_CHUNK, tokens) * shape.vocab_size
    if not on_cpu:
        return 2 * width * num_logits
    if tokens * shape.vocab_size <= FEW_LOGITS:
        return 28 * num_logits  # the backward pass needs the logits and everything computed from them
    return (16 + width) * num_logits


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
        whole, delta, num_deltas = 2 * weights, 2.0 * adapted, run.keep_versions
    else:
        whole = (2 + run.keep_versions // shardcast.snapshot_every) * weights
        delta, num_deltas = weights / WEIGHTS_PER_DELTA, run.keep_versions + shardcast.snapshot_every
    deltas = num_deltas * delta
    # The archive has version 0 whole, and the deltas of all versions; those that are still served are hard links.
    archive = weights + max(0, run.last_version - num_deltas) * delta if trainer.archive else 0
    kept = 4 * weights / 2 if trainer.kl else 0
    # A node keeps the versions that a lease may name, one more, and the one that it is building.
    node = (run.max_lag + 4) * weights
    return {
        "trainer": weights
        + (trainer.keep_checkpoints + 1) * state.checkpoint
        + whole
        + deltas
        + archive
        + kept,
        "relay": whole + deltas,
        "worker": node,
        "validator": node,
    }


def rollout_bytes(file: RunFile) -> float:
    """Returns the bytes of all rollouts that a run trains on. The coordinator keeps them, for restarts of the trainer and audits."""
    rollouts = file.run.last_version * file.coordinator.groups_per_step * file.sampling.samples_per_prompt
    return float(rollouts * answer_tokens(file) * STORED_TOKEN_BYTES)


def _layer_parameters(shape: Shape) -> int:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * queries + 2 * keys) + (queries + 2 * keys) * shape.qkv_bias
    norms = 2 * shape.hidden_size + 2 * shape.head_dim * shape.qk_norm
    return attention + 3 * shape.hidden_size * shape.ffn_size + norms
