"""`shoal toploc prove` generates honest rows on this machine; `calibrate` measures how far a validator's numbers differ from them.

Prove on one machine and calibrate on another to measure the noise between the two.
"""

import argparse
import hashlib
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal import toploc
from shoal.cli.commands.sample_answers import encode_problem, load_engine, model_folder, posed_split
from shoal.cli.run.runfile import RunFile, load_run_file
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import use_device
from shoal.files import write_bytes_atomically
from shoal.model.builtin import create_model
from shoal.model.load_model import DTYPES, load_causal
from shoal.model.tokenizer import load_tokenizer
from shoal.rollout.engine.api import ComputeDtype, Engine, FinishedRow, GenerationRequest, generate
from shoal.rollout.engine.selection import AutoEngine, compute_class
from shoal.swarm.validator.fact_checks import RowFacts, logprob_gap, units_of
from shoal.swarm.validator.loaded_versions import tokens_that_fit
from shoal.swarm.validator.prefill import BATCH_TOKENS, DEVICE_BATCH_TOKENS, LoadedPolicy
from shoal.swarm.validator.recompute import CalibrationTerms, recompute
from shoal.tasks import make_task
from shoal.tasks.task_errors import pose_problem
from shoal.wire.codes import Rejected
from shoal.wire.proof_noise import Noise, PairNoise
from shoal.wire.requirements import ComputeClass
from shoal.wire.rollouts import RolloutTable, TableLimits, decode, encode
from shoal.wire.run_spec import OwnSampling, ProofSpec, RunSpec, Sampling, TaskSpec, default_tolerances
from shoal.wire.seeded_draw import sample_seed

SAMPLES = 4
"""Rows generated for each prompt."""
MAX_FILE_ROWS = 1 << 20
MAX_MISSES = 0.02
"""Largest share of draws beyond a run's tolerance in rows that count as honest."""
RUN_ROWS, RUN_TOKENS = 512, 512
"""Rows that a run generates to calibrate itself, and most tokens of each: half a minute of a 0.5B model on a GPU."""
TASK_ROWS = 256
"""Fewest rows of each task, if a run has several: 200 must have a proof, and the shortest rows have none."""
LENGTHS = 16
"""Different lengths of every second row of a run's calibration, from 1 token to the limit. Training changes how long answers are: a random
model never ends one, and a trained one would have only lengths that were not measured."""
SHORT_RUN_ROWS, SHORT_TOKENS = 2048, 64
"""Rows if an answer has at most SHORT_TOKENS: short answers have few honest draws that are off, and more rows cost little."""
CHECK_ROWS = 256
"""Rows checked between two updates of the progress; on a GPU enough for a prefill as large as a validator's."""


def prove(options: argparse.Namespace, stop: threading.Event) -> int:
    """Generates honest rows and writes them, with their proofs, as a rollout table."""
    if options.rows < SAMPLES or options.max_new_tokens < 2:
        raise ValueError(
            f"--rows {options.rows} --max-new-tokens {options.max_new_tokens}: at least {SAMPLES} rows of 2 tokens are needed; raise them"
        )
    with model_folder(options.model) as folder:
        engine = load_engine(folder, options)
        part = CalibratedTask(TaskSpec(name=options.task), options.temperature)
        table = _generate(
            engine,
            _task_requests(engine, part, options.rows, options.max_new_tokens),
            compute_class(engine, device=options.device, compute_dtype=options.dtype),
            stop,
        )
    write_bytes_atomically(options.out, encode(table))
    print(
        f"{options.out}: {len(table.rows)} rows, {sum(len(row.output_tokens) for row in table.rows):,} tokens, "
        f"made by {table.made_by}"
    )
    return 0


def calibrate_run(options: argparse.Namespace, stop: threading.Event) -> int:
    """Generates rows with the model, the tasks and the terms of a run file, checks them like a validator, and writes a noise file."""
    file = load_run_file(options.file, overrides=options.set)
    spec = file.spec()
    cap = min(max(spec.sampling.of(one).max_new_tokens for one in spec.task_specs()), RUN_TOKENS)
    if cap < 2:
        raise ValueError(
            f"{options.file}: an answer of max_new_tokens = {cap} has no proof, so there is no noise to measure; set "
            "sampling.max_new_tokens to 2 or more, or compute_dtype to float32, whose draws are exact"
        )
    tasks = _calibrated_tasks(spec)
    rows = max((SHORT_RUN_ROWS if cap <= SHORT_TOKENS else RUN_ROWS) // len(tasks), TASK_ROWS)
    with model_folder(_model_to_measure(options, file)) as folder:
        options.engine, options.tensor_parallel = file.local.engine, 1
        options.draft, options.draft_rows = None, 1
        options.dtype, options.max_rows = spec.compute_dtype, file.local.max_rows
        engine = load_engine(folder, options, spec.proof)
        policy = _load_policy(folder, spec.compute_dtype, options.device)
        requests = [
            request
            for number, task in enumerate(tasks)
            for request in _spread_lengths(
                _task_requests(engine, task, rows, cap, first_prompt=number * rows)
            )
        ]
        pairs: dict[float, list[MeasuredPair]] = defaultdict(list)
        num_tokens = 0
        for weights in (None, *spec.admitted_weights.formats):
            own = policy
            if weights is not None:
                if not isinstance(engine, AutoEngine):
                    break  # vLLM does not round weights; the pairs of workers that do are not measured
                engine.weights = weights
                engine.load(folder, 0)
                own = policy.with_weights(weights)
            made_by = compute_class(engine, device=options.device, compute_dtype=spec.compute_dtype)
            table = _generate(engine, requests, made_by, stop)
            for number, task in enumerate(tasks):
                own_rows = tuple(row for row in table.rows if row.prompt_index // rows == number)
                of_task = replace(table, rows=own_rows)
                terms = _terms(spec, task.temperature)
                for path in (own, replace(own, plain=True)):
                    facts = _check(of_task, path, terms, stop)
                    _check_same_model(options.file, facts, spec.compute_dtype)
                    title = task.title if len(tasks) > 1 else ""
                    pair = _measured_pair(of_task, facts, table.made_by, path, source=title)
                    pairs[task.temperature].append(pair)
            num_tokens += sum(len(row.output_tokens) for row in table.rows)
    noise, *others = [
        _noise_of(of_one, _model_name(file.run.model), spec.compute_dtype, _terms(spec, temperature))
        for temperature, of_one in pairs.items()
    ]
    noise = noise.model_copy(update={"other_temperatures": tuple(others)})
    write_bytes_atomically(options.out, noise.model_dump_json(indent=1).encode())
    num_rows = sum(len(pair.units) for of_one in pairs.values() for pair in of_one) // 2
    print(f"{options.out}: {num_rows:,} rows, {num_tokens:,} tokens")
    return 0


def _model_to_measure(options: argparse.Namespace, file: RunFile) -> str:
    """Returns the model of calibrate_run: --model, or the run's; the folder of --write-model, which is made if it is missing."""
    folder: Path | None = options.write_model
    if folder is None:
        return options.model or file.run.model
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with progress(f"writing {file.run.model} to {folder}"):
            create_model(file.run.model, folder, file.trainer.seed)
    return str(folder)


def calibrate(options: argparse.Namespace, stop: threading.Event) -> int:
    """Checks honest rows like a validator and writes a noise file."""
    use_device(options)
    pairs: list[MeasuredPair] = []
    terms = TERMS._replace(sampling=Sampling(temperature=options.temperature))
    with model_folder(options.model) as folder:
        policy = _load_policy(folder, options.dtype, options.device)
        for path in options.files:
            table = read_rows(path)
            for by in (policy, replace(policy, plain=True)):
                facts = _check(table, by, terms, stop)
                _check_same_model(path, facts, options.dtype)
                source = path.stem if len(options.files) > 1 else ""
                pair = _measured_pair(table, facts, table.made_by or path.stem, by, source=source)
                if pair.name in {one.name for one in pairs}:
                    raise ValueError(
                        f"{path}: another file with this name has rows of the same kind of machine; rename it after its machine, "
                        "because the noise file tells measurements apart by these names"
                    )
                pairs.append(pair)
                _print_tokens(path, table, facts)
    noise = _noise_of(pairs, _model_name(options.model), options.dtype, terms)
    write_bytes_atomically(options.out, f"{noise.model_dump_json(indent=1)}\n".encode())
    _print_noise(noise)
    print(f"{options.out}: set run.calibration in a run file to this file")
    return 0


class CalibratedTask(NamedTuple):
    """A task at the temperature of its rows."""

    spec: TaskSpec
    temperature: float
    title: str = ""


class MeasuredPair(NamedTuple):
    """The rows of one compute class as another one checked them."""

    made_by: str
    checked_by: str
    units: list[list[toploc.SegmentCheck | toploc.TokenBlock]]
    prompts: list[int]
    source: str = ""
    """The task of the rows, or their file, if there are several."""

    @property
    def name(self) -> str:
        """Returns the name of the measurement in the noise file."""
        return f"{self.made_by} to {self.checked_by}" + (f", {self.source}" if self.source else "")


def _measured_pair(
    table: RolloutTable, facts: Sequence[RowFacts], made_by: str, policy: LoadedPolicy, *, source: str = ""
) -> MeasuredPair:
    units = [units_of(row, fact) for row, fact in zip(table.rows, facts, strict=True)]
    prompts = [row.prompt_index for row in table.rows]
    return MeasuredPair(made_by, str(policy.compute_class()), units, prompts, source)


def _noise_of(
    pairs: Sequence[MeasuredPair], model: str, dtype: ComputeDtype, terms: CalibrationTerms
) -> Noise:
    """Returns the noise of all pairs together, with that of each pair of compute classes."""
    measured = {
        "temperature": terms.sampling.temperature,
        "topk": terms.proof.topk,
        "segment_tokens": terms.proof.segment_tokens,
    }

    def measure(chosen: Sequence[MeasuredPair]) -> Noise:
        noise = toploc.measure_noise(
            {pair.name: pair.units for pair in chosen},
            model=model,
            compute_dtype=dtype,
            prompts={pair.name: pair.prompts for pair in chosen},
        )
        return noise.model_copy(update=measured)

    by_classes: dict[tuple[str, str], list[MeasuredPair]] = defaultdict(list)
    for pair in pairs:
        by_classes[pair.made_by, pair.checked_by].append(pair)
    each = tuple(
        PairNoise(made_by=made_by, checked_by=checked_by, noise=measure(of_classes))
        for (made_by, checked_by), of_classes in by_classes.items()
    )
    return measure(pairs).model_copy(update={"pairs": each})


# -- the parts ----------------------------------------------------------------------------------------------

_LEASE_ID = "0" * 32
_SEED = hashlib.sha256(b"shoal toploc prove").hexdigest()

TERMS = CalibrationTerms(_SEED, Sampling(), ProofSpec())


def _load_policy(folder: Path, dtype: ComputeDtype, device: str) -> LoadedPolicy:
    """Returns a model in memory with prefills of a validator's size: other sizes have other kernels, and small ones take longer."""
    model = load_causal(folder, DTYPES[dtype], device)
    most = BATCH_TOKENS if device == "cpu" else DEVICE_BATCH_TOKENS
    return LoadedPolicy(0, model, load_tokenizer(folder), batch_tokens=tokens_that_fit(model, most))


def _generate(
    engine: Engine, requests: Sequence[GenerationRequest], made_by: ComputeClass, stop: threading.Event
) -> RolloutTable:
    finished: list[FinishedRow] = []
    with progress("rows generated", len(requests)) as advance:
        for new in generate(engine, requests, stop):
            finished += new
            advance(len(new))
    rows = sorted(
        (row.to_rollout() for row in finished), key=lambda row: (row.prompt_index, row.sample_index)
    )
    return RolloutTable(lease_id=_LEASE_ID, policy_version=0, rows=tuple(rows), made_by=str(made_by))


def _spread_lengths(requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Returns the requests with every second row cut to one of LENGTHS lengths, each a constant factor longer than the last."""
    found = []
    for number, request in enumerate(requests):
        step = 1 + number // 2 % LENGTHS
        length = max(1, round(request.max_new_tokens ** (step / LENGTHS)))
        found.append(replace(request, max_new_tokens=length) if number % 2 else request)
    return found


def _calibrated_tasks(spec: RunSpec) -> list[CalibratedTask]:
    """Returns every task with the temperatures it is sampled at, those of `sampling.temperature` first.

    An evaluation is left out if it poses the same problems as a task that is trained on, at the same temperature.
    """
    titled = [(f"task {one.title}", one) for one in spec.tasks]
    titled += [(f"evaluation {one.task.title}", one.task) for one in spec.evals]
    found: dict[str, CalibratedTask] = {}
    for title, task in titled:
        temperature = spec.sampling.of(task).temperature
        asked = task.model_copy(
            update={
                "label": "",
                "weight": 1.0,
                "difficulty": False,
                "sampling": OwnSampling(temperature=temperature),
            }
        )
        found.setdefault(asked.model_dump_json(), CalibratedTask(asked, temperature, title))
    return sorted(found.values(), key=lambda one: one.temperature != spec.sampling.temperature)


def _terms(spec: RunSpec, temperature: float) -> CalibrationTerms:
    return CalibrationTerms(_SEED, spec.sampling.model_copy(update={"temperature": temperature}), spec.proof)


def _task_requests(
    engine: Engine, measured: CalibratedTask, rows: int, max_new_tokens: int, *, first_prompt: int = 0
) -> list[GenerationRequest]:
    """Returns requests of SAMPLES rows for each problem, whose prompts are numbered from `first_prompt`."""
    task = make_task(measured.spec)
    split = posed_split(task)
    prompts = [
        encode_problem(engine.tokenizer, task, measured.spec, pose_problem(task, split, seed))
        for seed in range(-(-rows // SAMPLES))
    ]
    return [
        GenerationRequest(
            prompt_index=number,
            sample_index=sample,
            prompt_tokens=tokens,
            sample_seed=sample_seed(_SEED, number, sample),
            max_new_tokens=max_new_tokens,
            temperature=measured.temperature,
            stop=measured.spec.stop,
        )
        for number, tokens in enumerate(prompts, first_prompt)
        for sample in range(SAMPLES)
    ][:rows]


def read_rows(path: Path) -> RolloutTable:
    # The user's own file; the limits only keep a wrong one from filling the memory.
    limits = TableLimits(
        max_rows=MAX_FILE_ROWS, max_prompt_tokens=1 << 20, max_output_tokens=1 << 20, max_proof_bytes=1 << 26
    )
    try:
        return decode(path.read_bytes(), limits)
    except Rejected as rejected:
        raise ValueError(
            f"{path} was not written by `shoal toploc prove` ({rejected.detail}); make a file with it"
        ) from None


def _check(
    table: RolloutTable, policy: LoadedPolicy, terms: CalibrationTerms, stop: threading.Event
) -> list[RowFacts]:
    facts: list[RowFacts] = []
    with progress("rows checked", len(table.rows)) as advance:
        for start in range(0, len(table.rows), CHECK_ROWS):
            rows = table.rows[start : start + CHECK_ROWS]
            facts += recompute(rows, terms, policy, control_seed=start, stop=stop)
            advance(len(rows))
    return facts


def _check_same_model(path: Path, facts: Sequence[RowFacts], dtype: ComputeDtype) -> None:
    """Raises ValueError for rows of other weights or another dtype: the calibration would accept such work as honest."""
    tolerances = default_tolerances(dtype)
    segments = [segment for fact in facts for segment in fact.segments]
    distances = np.concatenate([fact.draw_distance_T for fact in facts])
    found = {
        "exponents that differ in a segment": (
            float(np.mean([s.exponent_mismatches + s.sign_mismatches for s in segments] or [0])),
            tolerances.exponent_mismatches,
        ),
        "mantissa error": (
            float(np.mean([s.mantissa_bounded for s in segments] or [0])),
            tolerances.mantissa_mean,
        ),
        "share of draws that are off": (float(np.mean(distances > tolerances.draw)), MAX_MISSES),
    }
    for what, (mean, most) in found.items():
        if mean > most:
            raise ValueError(
                f"{path} was not made by these weights in {dtype}: {what} {mean:.3g} on average, honest rows stay below {most:g}; "
                "give --model, --dtype and --temperature as `shoal toploc prove` had them"
            )


def _model_name(model: str) -> str:
    """Returns the last part of the path: the noise file is published and should not show the user's folders."""
    return Path(model).name


def _print_tokens(path: Path, table: RolloutTable, facts: Sequence[RowFacts]) -> None:
    gaps = [logprob_gap(row, fact) for row, fact in zip(table.rows, facts, strict=True)]
    distances = np.concatenate([fact.draw_distance_T for fact in facts])
    print(
        f"{path.name}: log-prob gap of a row at most {max(gaps):.3g} (mean {np.mean(gaps):.3g}); draws off by at most "
        f"{distances.max():.3g}, {np.mean(distances > 0):.2%} at all, {np.mean(distances > 0.01):.2%} past 0.01"
    )


def _print_noise(noise: Noise) -> None:
    print(f"{'values':>10} {'segments':>9} {'mismatches':>11} {'at most':>8} {'mantissa':>9} {'at most':>8}")
    for size, wrong, error in zip(
        noise.sizes, noise.mismatches.by_size, noise.mantissas.by_size, strict=True
    ):
        print(
            f"{f'to {size:,}':>10} {wrong.segments:>9,} {wrong.mean:>11.3f} {wrong.largest:>8.0f} "
            f"{error.mean:>9.3f} {error.largest:>8.2f}"
        )
    if noise.logprobs is None or noise.draws is None:
        return
    print(f"{'tokens':>10} {'blocks':>9} {'log-probs':>11} {'at most':>8} {'draws':>9} {'at most':>8}")
    for size, gap, miss in zip(noise.token_sizes, noise.logprobs.by_size, noise.draws.by_size, strict=True):
        print(
            f"{f'to {size}':>10} {gap.segments:>9,} {gap.mean:>11.4f} {gap.largest:>8.3f} {miss.mean:>9.5f} {miss.largest:>8.4f}"
        )
