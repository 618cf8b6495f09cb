"""Tries what a run needs before it starts: the task, the model's files, prompt lengths, sinks and memory.

`shoal run --dry-run` reports it; a new run does it first, because a role would fail for the same reasons minutes later.
"""

import os
import re
from pathlib import Path

from shoal.cli.run.estimate import num_adapted, num_parameters
from shoal.cli.run.runfile import RunFile
from shoal.tasks import CannotGrade, Task, make_task
from shoal.tasks.datasets.hub_files import with_hub_files
from shoal.tasks.task import Split
from shoal.tasks.task_errors import conversation_before, pose_problem, try_task
from shoal.wire.run_spec import TaskSpec

MEASURED_PROMPTS = 32
"""Prompts of each split whose length is measured."""
PROCESS_BYTES = 400e6
"""Memory of a process with torch, without weights."""


def try_run(file: RunFile, path: Path, *, starts: bool) -> list[str]:
    """Returns warnings about the run. Raises ValueError, with the key and what to do, for what cannot work.

    Unless the run `starts` now, weights that are not on this machine are only a warning: a plan needs the config.json alone.
    """
    from shoal.rollout.adversary.lies import LIES
    from shoal.trainer.reporting.sinks import check_packages

    for lie in file.local.lies:
        if lie not in LIES:
            raise ValueError(f"{path}: local.lies: unknown lie {lie!r}; known: {', '.join(LIES)}")
    check_packages(file.trainer.metrics)
    specs = file.spec().task_specs()
    tasks = [make_task(with_hub_files(spec)) for spec in specs]
    warnings: list[str] = []
    for task in {id(task): task for task in tasks}.values():
        warnings += _try_task(task)
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
    return warnings + (_check_memory(file, folder) if folder is not None else [])


class _NoWeights(ValueError):
    """The model's folder has a config.json and nothing else."""


def check_model(file: RunFile, path: Path) -> Path | None:
    """Returns the model's folder, or None for a built-in model or a GGUF file. Raises ValueError if it cannot be used."""
    from shoal.model.builtin import BUILTIN, find_smollm2, is_gguf
    from shoal.model.load_model import read_model_limits

    model = file.run.model
    if model == "smollm2-135m":
        find_smollm2()
    if model in BUILTIN or is_gguf(model):
        return None
    folder = Path(model)
    if not folder.is_dir():
        raise ValueError(f"{path}: run.model = {model!r} {explain_missing_model(model)}")
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{path}: {folder} is an adapter, not a whole model; merge it into its base model first"
        )
    try:
        hidden_size = read_model_limits(folder).hidden_size
    except ValueError as error:
        raise ValueError(f"{path}: no role can run this model: {error}; choose another model") from None
    if not any(folder.glob("*.safetensors")):
        if any(folder.glob("*.bin")):
            raise ValueError(
                f"{path}: {folder} has *.bin files only; convert the weights to safetensors first"
            )
        raise _NoWeights(f"{path}: {folder} has no *.safetensors file; put the model's weights there")
    topk = file.proof.topk
    if hidden_size < topk:
        raise ValueError(
            f"{path}: {folder} has hidden_size={hidden_size}, but a proof needs proof.topk={topk} values of a state; choose a "
            "wider model or a smaller topk"
        )
    return folder


def explain_missing_model(model: str) -> str:
    """Returns why a model's name cannot be used, and what to do."""
    from shoal.model.builtin import BUILTIN

    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        name = model.partition("/")[2]
        return (
            f"is no folder here; if it is a model of the Hugging Face hub, download it first: hf download {model} "
            f'--local-dir models/{name}, then set model = "models/{name}"'
        )
    return f"is neither a model folder nor a GGUF file nor one of {', '.join(BUILTIN)}; check the path"


def check_prompts(
    file: RunFile, path: Path, task: Task, folder: Path | None, spec: TaskSpec | None = None
) -> list[str]:
    """Returns warnings about prompts. Raises ValueError if the longest one does not fit into the trainer's rows."""
    from shoal.model.builtin import ALPHABET
    from shoal.model.tokenizer import CharTokenizer, ChatSetting, FileTokenizer, Tokenizer, load_tokenizer

    tokenizer: Tokenizer = CharTokenizer(ALPHABET) if folder is None else load_tokenizer(folder)
    splits: tuple[Split, ...] = ("train", "eval")
    prompts = [pose_problem(task, split, seed) for split in splits for seed in range(MEASURED_PROMPTS)]
    terms = TaskSpec(name="") if spec is None else spec
    longest = 0
    for problem in prompts:
        turns = tuple((one.role, one.content) for one in conversation_before(task, terms, problem))
        setting = ChatSetting(turns, terms.chat_template_kwargs)
        tokens = tokenizer.encode_prompt(problem.prompt, chat=bool(task.chat), setting=setting)
        longest = max(longest, len(tokens))
    sampling = file.sampling if spec is None else file.sampling.of(spec)
    needed = longest + sampling.max_new_tokens
    if needed > file.trainer.row_tokens and (spec is None or spec in file.task):
        raise ValueError(
            f"{path}: the longest of {len(prompts)} prompts has {longest} tokens; with sampling.max_new_tokens = "
            f"{sampling.max_new_tokens} that is {needed}, more than trainer.row_tokens = {file.trainer.row_tokens}; raise "
            f"row_tokens to at least {needed}"
        )
    if task.chat and isinstance(tokenizer, FileTokenizer) and not tokenizer.has_template:
        return [
            f"{folder} has no chat template, so the task's prompts are given as plain text; use the task's bare style, or add a "
            "chat_template.jinja"
        ]
    return []


def memory_needed(file: RunFile, folder: Path) -> float:
    """Returns the bytes of memory that all processes of a run on this machine take, as an estimate."""
    from shoal.model.load_model import read_model_limits
    from shoal.model.shape import Shape
    from shoal.trainer.memory import trainer_memory

    limits = read_model_limits(folder)
    weights = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
    parameters = num_parameters(limits) if isinstance(limits, Shape) else weights / 2
    width = 4 if file.run.compute_dtype == "float32" else 2
    workers = file.local.workers + len(file.local.lies)
    # A validator keeps one version more than rollouts may lag, three at most.
    copies = workers + file.local.validators * min(3, file.run.max_lag + 1)
    processes = 2 + file.local.relays + workers + file.local.validators
    adapted = num_adapted(limits, file.trainer.lora_rank) if isinstance(limits, Shape) else 0
    trainer = trainer_memory(parameters, file.trainer, num_adapted=adapted)
    return trainer.device + trainer.published + parameters * width * copies + PROCESS_BYTES * processes


def _check_memory(file: RunFile, folder: Path) -> list[str]:
    needed, there = memory_needed(file, folder), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed <= there:
        return []
    return [
        f"the run may need {needed / 1e9:.0f} GB of memory, and this machine has {there / 1e9:.0f} GB; use fewer local.workers, "
        'compute_dtype = "bfloat16", or start the roles on several hosts'
    ]


def _try_task(task: Task) -> list[str]:
    try:
        return try_task(task)
    except CannotGrade as error:
        return [f"answers cannot be graded on this machine: {error}"]
