"""Tries what a run needs before it starts: the task, the model's files, prompt lengths, sinks and memory.

`shoal run --dry-run` reports it; a new run does it first, because a role would fail for the same reasons minutes later.
"""

import heapq
import os
import shutil
import tempfile
from pathlib import Path

from shoal.cli.run.estimate import num_adapted, num_parameters, rollout_bytes
from shoal.cli.run.runfile import RunFile
from shoal.tasks import CannotGrade, Problem, Task, make_task
from shoal.tasks.datasets.data_set import DataSet
from shoal.tasks.datasets.hub_files import with_hub_files
from shoal.tasks.task import Finite, Split, prompt_chars
from shoal.tasks.task_errors import pose_problem, try_task
from shoal.tasks.wrapped_tasks import Budgeted
from shoal.wire.run_spec import TaskSpec

MEASURED_PROMPTS = 32
"""Prompts of each split whose length is measured in tokens: the longest by characters of those that were looked at."""
MOST_PROMPTS = 20_000
"""Prompts of each split that are looked at, evenly many, of a task of another package with a known number of them."""
SHOWN_CHARS = 60
"""Characters by which a message names a prompt."""
PROCESS_BYTES = 400e6
"""Memory of a process with torch, without weights."""
KEPT_VERSIONS = 4
"""Versions on the disk of a worker and of a validator."""
USUAL_DELTA = 0.012
"""Bytes of a delta as a share of the weights, at the learning rates of the report: 1/88 to 1/241 were measured."""
MOST_TRIED_BYTES = 2e9
"""Weights up to this size are copied before the run, to try a family that Shoal's decoder does not have."""
BUILTIN_PARAMETERS = {"tiny": 345_000, "smollm2-135m": 134_515_008}


def try_run(file: RunFile, path: Path, *, starts: bool, device: str = "cpu") -> list[str]:
    """Returns warnings about the run. Raises ValueError, with the key and what to do, for what cannot work.

    Unless the run `starts` now, weights and packages that are not on this machine are only a warning: a plan needs the config.json
    alone.
    """
    from shoal.rollout.adversary.lies import LIES
    from shoal.trainer.reporting.sinks import check_packages

    for lie in file.local.lies:
        if lie not in LIES:
            raise ValueError(f"{path}: local.lies: unknown lie {lie!r}; known: {', '.join(LIES)}")
    check_packages(file.trainer.metrics)
    specs = file.spec().task_specs()
    tasks = [make_task(with_hub_files(spec)) for spec in specs]
    warnings = _check_engine(file, path, starts=starts, device=device)
    for task in {id(task): task for task in tasks}.values():
        try:
            warnings += try_task(task)
        except CannotGrade as error:
            warnings.append(f"answers cannot be graded on this machine: {error}")
    try:
        folder = check_model(file, path)
    except (ModuleNotFoundError, _NoWeights) as error:
        if starts:
            raise
        return [*warnings, f"the run cannot start here: {error}"]
    if folder is not None or file.run.model == "tiny":
        for spec, task in zip(specs, tasks, strict=True):
            warnings += check_prompts(file, path, task, folder, spec)
        warnings = list(dict.fromkeys(warnings))
    return warnings + (_check_memory(file, folder) + _check_disk(file, folder) if folder is not None else [])


def _check_engine(file: RunFile, path: Path, *, starts: bool, device: str) -> list[str]:
    """Raises ValueError, or returns a warning unless the run `starts`, if this machine cannot run the workers' engine."""
    if file.local.engine == "torch":
        return []
    from shoal.rollout.engine.selection import check_engine

    try:
        check_engine(file.local.engine, device=device, tensor_parallel=1)
    except ValueError as error:
        if starts:
            raise ValueError(f"{path}: local.engine = {file.local.engine!r}: {error}") from None
        return [f"the run cannot start here: {error}"]
    return []


class _NoWeights(ValueError):
    """The model's folder has a config.json and nothing else."""


def check_model(file: RunFile, path: Path) -> Path | None:
    """Returns the model's folder, or None for a built-in model or a GGUF file. Raises ValueError if it cannot be used."""
    from shoal.model.builtin import BUILTIN, find_smollm2, is_gguf
    from shoal.model.load_model import read_model_limits
    from shoal.model.weights import explain_missing_weights

    model = file.run.model
    if model == "smollm2-135m":
        find_smollm2()
    if model in BUILTIN or is_gguf(model):
        return None
    folder = local_folder(model)
    if not folder.is_dir():
        raise ValueError(
            f"{path}: run.model = {model!r} is neither a model folder nor a GGUF file nor one of {', '.join(BUILTIN)} nor org/name "
            "of the Hugging Face hub; check the path"
        )
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{path}: {explain_missing_weights(folder)}")
    try:
        hidden_size = read_model_limits(folder).hidden_size
    except ValueError as error:
        raise ValueError(f"{path}: no role can run this model: {error}; choose another model") from None
    if not any(folder.glob("*.safetensors")):
        if any(folder.glob("*.bin")):
            raise ValueError(f"{path}: {explain_missing_weights(folder)}")
        raise _NoWeights(f"{path}: {folder} has no *.safetensors file; put the model's weights there")
    topk = file.proof.topk
    if hidden_size < topk:
        raise ValueError(
            f"{path}: {folder} has hidden_size={hidden_size}, but a proof needs proof.topk={topk} values of a state; choose a "
            "wider model or a smaller topk"
        )
    _try_family(folder, path)
    return folder


def _try_family(folder: Path, path: Path) -> None:
    """Raises ValueError if a model that goes through transformers cannot be copied, or computes its logits as no role can.

    Copies it as the trainer does when the run starts, so a large one is left to the trainer.
    """
    from shoal.model.builtin import create_model
    from shoal.model.load_model import decoder_refuses

    if decoder_refuses(folder) is None:
        return
    if sum(file.stat().st_size for file in folder.glob("*.safetensors")) > MOST_TRIED_BYTES:
        return
    with tempfile.TemporaryDirectory(prefix="shoal-try-") as scratch:
        try:
            create_model(str(folder), Path(scratch) / "v0", seed=0)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            reason = str(error).rpartition(".partial: ")[2]  # without the name of the copy
            raise ValueError(f"{path}: no role can run {folder}: {reason}; choose another model") from None


def check_prompts(file: RunFile, path: Path, task: Task, folder: Path | None, spec: TaskSpec) -> list[str]:
    """Returns warnings about prompts. Raises ValueError if the longest one does not fit into the model or the trainer's rows."""
    from shoal.cli.commands.sample_answers import encode_problem
    from shoal.model.builtin import ALPHABET
    from shoal.model.load_model import read_model_limits
    from shoal.model.tokenizer import CharTokenizer, FileTokenizer, Tokenizer, load_tokenizer

    tokenizer: Tokenizer = CharTokenizer(ALPHABET) if folder is None else load_tokenizer(folder)
    splits: tuple[Split, ...] = ("train", "eval")
    longest, where = 0, ""
    found = {split: _longest_problems(task, split) for split in splits}
    num_prompts = sum(count for _, count in found.values())
    for split, seed in ((split, seed) for split, (seeds, _) in found.items() for seed in seeds):
        problem = pose_problem(task, split, seed)
        tokens = encode_problem(tokenizer, task, spec, problem)
        if len(tokens) > longest:
            longest, where = len(tokens), _name_of(task, split, seed, problem)
    sampling = file.sampling.of(spec)
    needed = longest + sampling.max_new_tokens
    positions = None if folder is None else read_model_limits(folder).max_positions
    shorten = "shorten the prompts"
    if isinstance(task, Finite):
        shorten = "leave long prompts out (the option max_chars of data sets)"
    if positions is not None and needed > positions:
        raise ValueError(
            f"{path}: the longest of {num_prompts} prompts has {longest} tokens ({where}); with sampling.max_new_tokens = "
            f"{sampling.max_new_tokens} that is {needed}, more than the {positions} positions of {folder}; lower "
            f"max_new_tokens, {shorten} or choose another model"
        )
    if needed > file.trainer.row_tokens and spec in file.task:
        raise ValueError(
            f"{path}: the longest of {num_prompts} prompts has {longest} tokens ({where}); with sampling.max_new_tokens = "
            f"{sampling.max_new_tokens} that is {needed}, more than trainer.row_tokens = {file.trainer.row_tokens}; raise "
            f"row_tokens to at least {needed}"
        )
    if task.chat and isinstance(tokenizer, FileTokenizer) and not tokenizer.has_template:
        return [
            f"{folder} has no chat template, so the task's prompts are given as plain text; use the task's bare style, or add a "
            "chat_template.jinja"
        ]
    return []


def _name_of(task: Task, split: Split, seed: int, problem: Problem) -> str:
    """Returns how a message names a problem: its row in a data set, or how its prompt begins."""
    data = task.task if isinstance(task, Budgeted) else task
    if not isinstance(data, DataSet):
        return f"{problem.prompt[:SHOWN_CHARS]!r}..."
    path = data.eval_path if split == "eval" and data.eval_path else data.path
    return f"row {data.entry(split, seed).number} of {path}"


def _longest_problems(task: Task, split: Split) -> tuple[list[int], int]:
    """Returns the seeds of the problems of a split with the most characters, and the number of problems that were looked at.

    All of a data set are looked at: a single prompt that is too long would end every worker that gets it.
    """
    if chars := prompt_chars(task, split):
        return heapq.nlargest(MEASURED_PROMPTS, range(len(chars)), key=chars.__getitem__), len(chars)
    size = task.size(split) if isinstance(task, Finite) else 0
    seeds = range(0, size, -(-size // MOST_PROMPTS)) if size else range(MEASURED_PROMPTS)
    longest = heapq.nlargest(
        MEASURED_PROMPTS, seeds, key=lambda seed: pose_problem(task, split, seed).num_chars
    )
    return longest, len(seeds)


def local_folder(model: str) -> Path:
    """Returns the folder of a run file's model on this machine; for a built-in model one that does not exist."""
    from shoal.model.hub import hub_folder, is_hub_name

    return hub_folder(model) if is_hub_name(model) else Path(model)


def resources_needed(file: RunFile) -> dict[str, str]:
    """Returns memory and disk that all processes of a run on this machine take, as estimates, by name; none if the size is unknown."""
    folder = local_folder(file.run.model)
    parameters = BUILTIN_PARAMETERS.get(file.run.model)
    if parameters is None and not (folder / "config.json").is_file():
        return {}
    memory = memory_needed(file, folder)
    kept, most = disk_needed(file, 2 * _parameters(file, folder))
    return {
        "memory of all processes here, about": _bytes(memory),
        "disk of all processes here, about": f"{_bytes(kept)}; {_bytes(most)} if every version differs much from the one before",
    }


def problems_found(file: RunFile) -> dict[str, str]:
    """Returns how many problems each data set of a run has, by name, and how many of its rows are unusable."""
    found = {}
    for spec in file.task:
        task = make_task(with_hub_files(spec))
        task = task.task if isinstance(task, Budgeted) else task
        if isinstance(task, DataSet):
            rows = task.indices["path"]
            bad = f"; {len(rows.bad):,} of {rows.num_rows:,} rows unusable" if rows.bad else ""
            name = "problems" if len(file.task) == 1 else f"problems of {spec.title}"
            found[name] = f"{task.size('train'):,} to train on, {task.size('eval'):,} held out{bad}"
    return found


def disk_needed(file: RunFile, weights: float) -> tuple[float, float]:
    """Returns the bytes of a finished run's folder: with deltas as small as usual, and with the largest ones.

    `weights` are the bytes of one version. A checkpoint has weights and two moments in float32; one more is written before the
    oldest is deleted.
    """
    workers = file.local.workers + len(file.local.lies)
    checkpoints = 6 * weights * (file.trainer.keep_checkpoints + 1)
    whole = 2 + -(-file.run.keep_versions // file.shardcast.snapshot_every)
    trainer = checkpoints + weights * (whole + 2) + (2 * weights if file.trainer.kl else 0)
    others = weights * (KEPT_VERSIONS * (workers + file.local.validators) + whole * file.local.relays)
    others += rollout_bytes(file)
    versions = file.run.last_version if file.trainer.archive else file.run.keep_versions
    return trainer + others + versions * USUAL_DELTA * weights, trainer + others + versions * weights


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _parameters(file: RunFile, folder: Path) -> float:
    from shoal.model.load_model import read_model_limits
    from shoal.model.shape import Shape

    if file.run.model in BUILTIN_PARAMETERS:
        return BUILTIN_PARAMETERS[file.run.model]
    limits = read_model_limits(folder)
    if isinstance(limits, Shape):
        return num_parameters(limits)
    return sum(one.stat().st_size for one in folder.glob("*.safetensors")) / 2


def memory_needed(file: RunFile, folder: Path) -> float:
    """Returns the bytes of memory that all processes of a run on this machine take, as an estimate."""
    from shoal.model.load_model import read_model_limits
    from shoal.model.shape import Shape
    from shoal.trainer.memory import trainer_memory

    limits = None if file.run.model in BUILTIN_PARAMETERS else read_model_limits(folder)
    parameters = _parameters(file, folder)
    width = 4 if file.run.compute_dtype == "float32" else 2
    workers = file.local.workers + len(file.local.lies)
    # A validator keeps one version more than rollouts may lag, three at most.
    copies = workers + file.local.validators * min(3, file.run.max_lag + 1)
    processes = 2 + file.local.relays + workers + file.local.validators
    adapted = num_adapted(limits, file.trainer.lora_rank) if isinstance(limits, Shape) else 0
    trainer = trainer_memory(parameters, file.trainer, num_adapted=adapted)
    held = trainer.device + trainer.published + trainer.reference
    return held + parameters * width * copies + PROCESS_BYTES * processes


def _check_memory(file: RunFile, folder: Path) -> list[str]:
    needed, there = memory_needed(file, folder), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed <= there:
        return []
    return [
        f"the run may need {needed / 1e9:.0f} GB of memory, and this machine has {there / 1e9:.0f} GB; use fewer local.workers, "
        'compute_dtype = "bfloat16", or start the roles on several hosts'
    ]


def _check_disk(file: RunFile, folder: Path) -> list[str]:
    needed, free = disk_needed(file, 2 * _parameters(file, folder))[0], shutil.disk_usage(".").free
    if needed <= free:
        return []
    return [
        f"the run may need {_bytes(needed)} of disk, and {_bytes(free)} are free here; choose another --dir, or fewer "
        "trainer.keep_checkpoints and local.workers"
    ]
