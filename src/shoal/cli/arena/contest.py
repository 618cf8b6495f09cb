"""Generates honest rows and lies once, lets every scheme check the same rows, and finds how often each lie is detected.

    prompts   SAMPLES rows each; rows of one prompt share noise, so a prompt is the unit that is resampled
    PROMPTS   prompts of a submission

The limit for a rate of false alarms is the quantile of honest scores, the highest over the ways of honest work. Where a rate needs
more submissions than were generated, submissions are resampled from the prompts, with replacement; no more is known than
the generated prompts say. A lie that changed none of a submission's rows was not told there and is not counted.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from shoal import toploc
from shoal.cli.arena.own_decision import ShoalDecision, ShoalVerdict, row_facts
from shoal.cli.arena.schemes import (
    ActivationDifr,
    CheckedRow,
    Floats,
    GrailSketch,
    Logic,
    LogprobGap,
    PublishedToploc,
    Scheme,
    Table,
    TokenDifr,
    TunedGrailSketch,
    verify,
)
from shoal.model.load_model import DTYPES, decoder_refuses, load_causal
from shoal.model.tokenizer import load_tokenizer
from shoal.rollout.adversary.adaptive import ADAPTIVE_LIES, ENGINE_LIES, Adapted, PlainEngine
from shoal.rollout.adversary.lies import LIES, TOKEN_LIES, Prefilled, make_behaviour
from shoal.rollout.adversary.lying_engines import typical_sizes
from shoal.rollout.adversary.practice import generate_tables, practice_lease
from shoal.rollout.engine.api import Behaviour, ComputeDtype, Engine
from shoal.rollout.engine.proofs import RawStates
from shoal.rollout.engine.selection import make_engine
from shoal.swarm.validator import fact_checks, format_checks
from shoal.swarm.validator.judge import encode_prompts
from shoal.swarm.validator.prefill import BATCH_TOKENS, LoadedPolicy
from shoal.swarm.validator.recompute import RowsToCheck, recompute_rows
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import RolloutTable
from shoal.wire.run_spec import Sampling, TaskSpec, default_tolerances

SAMPLES, PROMPTS = 4, 4
RATES = (1e-3, 1e-4)
LEASES_AT_ONCE = 64
GPU_BATCH_TOKENS = 1 << 15
"""Tokens of one prefill on a GPU. Plain products need ten times the memory of a validator's usual path."""
CELLS_AT_ONCE = 1 << 22
"""Numbers of resampled tables in memory at once."""
REDRAWN = 50_000
"""Submissions resampled for a limit."""
REDRAWN_LIES = 2_000
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Prompts of the submissions whose detection is tried, to find the tokens that are needed."""
ENOUGH = 0.999
FORGED = "forged-proof"


@dataclass(frozen=True, kw_only=True)
class ArenaSettings:
    """What is generated, and how much."""

    model: str
    task: str = "sort"
    task_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    dtype: ComputeDtype = "bfloat16"
    device: str = "cpu"
    new_tokens: int = 24
    temperature: float = 1.0
    honest: int = 1200
    """Honest submissions, of all ways together."""
    lies: int = 32
    """Submissions of each lie."""
    calibrate_rows: int = 1024
    max_rows: int = 64
    seed: int = 0


@dataclass
class KindTables:
    """The tables of one kind of rows, by scheme, and how many tokens they have."""

    tables: dict[str, list[Table]] = field(default_factory=dict)
    submissions: int = 0
    untold: int = 0
    """Submissions in which the lie changed nothing."""
    read: Counter[str] = field(default_factory=Counter)
    """Refusals by reading the file, by code."""
    tokens: int = 0

    def table(self, scheme: Scheme) -> Table:
        """Returns the lines of all submissions."""
        tables = self.tables[scheme.measured_as]
        return Table(
            np.concatenate([one.sums_PA for one in tables]),
            np.concatenate([one.largest_PB for one in tables]),
        )

    def scores(self, scheme: Scheme) -> Floats:
        """Returns the score of each submission as it was sent."""
        tables = self.tables.get(scheme.measured_as, [])
        sums = np.array([one.sums_PA.sum(axis=0) for one in tables])
        largest = np.array([one.largest_PB.max(axis=0) for one in tables])
        return scheme.score(sums, largest) if tables else np.zeros(0)


class Arena:
    """One model with its schemes; generates, checks and measures."""

    def __init__(self, settings: ArenaSettings, folder: Path, stop: threading.Event) -> None:
        self.settings, self.folder, self.stop = settings, folder, stop
        dtype = DTYPES[settings.dtype]
        is_cpu = torch.device(settings.device).type == "cpu"
        self.policy = LoadedPolicy(
            0,
            load_causal(folder, dtype, settings.device),
            load_tokenizer(folder),
            BATCH_TOKENS if is_cpu else GPU_BATCH_TOKENS,
        )
        self.typical_H = typical_sizes(self.policy.decoder)
        self.tolerances = default_tolerances(settings.dtype)
        self.engines: dict[ComputeDtype, Engine] = {}
        self.schemes: list[Scheme] = []
        self.number = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Time of generating, of the verifier's forward pass, and of each scheme's two sides."""
        self.timed_tokens = 0

    # -- generating ----------------------------------------------------------------------------------------

    def leases(self, count: int) -> list[Lease]:
        return [self._lease() for _ in range(count)]

    def _lease(self) -> Lease:
        self.number += 1
        settings = self.settings
        return practice_lease(
            "arena",
            f"arena/{settings.seed}/{self.number}",
            task=TaskSpec(name=settings.task, options=settings.task_options),
            sampling=Sampling(
                temperature=settings.temperature,
                max_new_tokens=settings.new_tokens,
                samples_per_prompt=SAMPLES,
            ),
            proof=RawStates(),
            num_prompts=PROMPTS,
        )

    def engine(self, behaviour: Behaviour) -> Engine:
        """Returns the behaviour's engine with the weights loaded. Engines of one dtype are built once."""
        if isinstance(behaviour, Adapted):
            behaviour.proof = RawStates()
        dtype = behaviour.compute_dtype(self.settings.dtype)
        if dtype not in self.engines:
            self.engines[dtype] = make_engine(
                "torch",
                compute_dtype=dtype,
                proof=RawStates(),
                max_rows=self.settings.max_rows,
                device=self.settings.device,
            )
        engine = behaviour.engine(self.engines[dtype])
        engine.load(self.folder, 0)
        return engine

    def work(self, behaviour: Behaviour, engine: Engine, leases: Sequence[Lease]) -> list[RolloutTable]:
        return generate_tables(behaviour, engine, leases, self.stop)

    # -- checking ------------------------------------------------------------------------------------------

    def check(self, submissions: Sequence[RowsToCheck], *, plain: bool = False) -> list[CheckedRow]:
        """Returns the rows of all submissions with what the verifier computed of them; `plain`: by plain matrix products."""
        rows = [row for one in submissions for row in one.rows]
        found = recompute_rows(submissions, replace(self.policy, plain=plain))
        return [CheckedRow(row, *one) for row, one in zip(rows, found, strict=True)]

    def check_like(
        self, way: "Way", tables: Sequence[RolloutTable], leases: Sequence[Lease]
    ) -> list[CheckedRow]:
        submissions = [RowsToCheck(table.rows, lease) for table, lease in zip(tables, leases, strict=True)]
        return self.check(submissions, plain=way.plain)

    def refused_by_reading(self, table: RolloutTable, lease: Lease) -> str | None:
        """Returns the code of the checks that need no model and no proof, or None."""
        tokenizer = self.policy.tokenizer
        try:
            if table.lease_id != lease.lease_id:
                raise Rejected("reject.replayed", "")
            format_checks.check_groups(table, lease)
            format_checks.check_prompts(table, encode_prompts(lease, tokenizer))
            format_checks.check_values(table, tokenizer.vocab_size)
            format_checks.check_endings(table, tokenizer.end_tokens, lease.sampling.max_new_tokens)
        except Rejected as rejected:
            return rejected.code
        return None

    def add(self, measured: KindTables, rows: Sequence[CheckedRow], *, forged: bool, timed: bool) -> None:
        """Lets every scheme measure the rows of some submissions, which are checked together."""
        width, per_submission = rows[0].states_TH.shape[1], PROMPTS * SAMPLES
        states = [sent_states(row, width) for row in rows]
        prompts = [
            PROMPTS * (place // per_submission) + row.rollout.prompt_index for place, row in enumerate(rows)
        ]
        for scheme in {one.measured_as: one for one in self.schemes}.values():
            began_s = time.perf_counter()
            commitments = scheme.forge(states, self.typical_H) if forged else scheme.commit(states)
            made_s = time.perf_counter()
            if commitments is not None:
                whole = scheme.measure(rows, commitments, prompts)
                parts = [slice(start, start + PROMPTS) for start in range(0, len(whole.sums_PA), PROMPTS)]
                measured.tables.setdefault(scheme.measured_as, []).extend(
                    Table(whole.sums_PA[part], whole.largest_PB[part]) for part in parts
                )
            if timed:
                self.seconds[f"{scheme.measured_as} prover"] += made_s - began_s
                self.seconds[f"{scheme.measured_as} verifier"] += time.perf_counter() - made_s
        measured.submissions += len(rows) // per_submission
        measured.tokens += sum(len(row.rollout.output_tokens) for row in rows)

    def calibrate(self) -> Noise:
        """Measures the noise of honest rows and sets the schemes."""
        leases = self.leases(-(-self.settings.calibrate_rows // (PROMPTS * SAMPLES)))
        pairs: dict[str, list[list[toploc.SegmentCheck | toploc.TokenBlock]]] = {}
        prompts: dict[str, list[int]] = {}
        for way in self.ways():
            engine = self.engine(way.make())
            tables = self.work(way.make(), engine, leases)
            rows = self.check_like(way, tables, leases)
            width = rows[0].states_TH.shape[1]
            proofs = PublishedToploc().commit([sent_states(row, width) for row in rows])
            checks = verify(rows, proofs, PublishedToploc().proof)
            pairs[way.name] = [
                fact_checks.units_of(row.rollout, row_facts(row, segments))
                for row, segments in zip(rows, checks, strict=True)
            ]
            prompts[way.name] = [
                PROMPTS * number + row.prompt_index
                for number, table in enumerate(tables)
                for row in table.rows
            ]
        noise = toploc.measure_noise(
            pairs, model=Path(self.settings.model).name, compute_dtype=self.settings.dtype, prompts=prompts
        )
        own = {"noise": noise, "tolerances": self.tolerances}
        self.schemes = [
            PublishedToploc(),
            ShoalVerdict(**own),  # type: ignore[arg-type] # of two types
            ShoalDecision(**own),  # type: ignore[arg-type]
            GrailSketch(),
            TunedGrailSketch(),
            TokenDifr(),
            ActivationDifr(),
            Logic(),
            LogprobGap(),
        ]
        return noise

    # -- what is measured ----------------------------------------------------------------------------------

    def ways(self) -> list["Way"]:
        """Returns the ways of honest work that this machine has."""
        ways = [Way("torch engine"), Way("torch engine, checked by plain products", plain=True)]
        if decoder_refuses(self.folder) is None:
            make = partial(Adapted, PlainEngine, device=self.settings.device)
            ways.append(Way("plain engine", make=make))
        return ways

    def honest(self, way: "Way", count: int) -> KindTables:
        """Measures fresh honest submissions."""
        measured, behaviour = KindTables(), way.make()
        engine = self.engine(behaviour)
        while measured.submissions < count:
            leases = self.leases(min(LEASES_AT_ONCE, count - measured.submissions))
            began_s = time.perf_counter()
            tables = self.work(behaviour, engine, leases)
            generated_s = time.perf_counter() - began_s
            timed = way.name == "torch engine"
            began_s = time.perf_counter()
            rows = self.check_like(way, tables, leases)
            if timed:
                self.seconds["forward"] += time.perf_counter() - began_s
            self.add(measured, rows, forged=False, timed=timed)
            if timed:
                self.seconds["generate"] += generated_s
                self.timed_tokens += sum(len(row.rollout.output_tokens) for row in rows)
        return measured

    def lies(self) -> dict[str, Callable[[], Behaviour]]:
        """Returns every lie that this model can be told."""
        known = {
            name: partial(make_behaviour, name, "http://127.0.0.1:1")
            for name in LIES
            if name not in ("stale-weights", FORGED)  # old weights are below; each scheme has its own forgery
        }
        found: dict[str, Callable[[], Behaviour]] = {**known, FORGED: Behaviour, **ADAPTIVE_LIES}
        device = self.settings.device
        found["smaller-model"] = partial(Prefilled, device)
        if decoder_refuses(self.folder) is None:
            found |= {name: partial(Adapted, make, device=device) for name, make in ENGINE_LIES.items()}
        return found

    def lie(
        self,
        name: str,
        make: Callable[[], Behaviour],
        leases: Sequence[Lease],
        honest: Sequence[RolloutTable],
    ) -> KindTables:
        """Measures a lie on leases whose honest tables are known."""
        measured, behaviour = KindTables(), make()
        engine = self.engine(behaviour)
        tables = self.work(behaviour, engine, leases)
        if name == "replay":
            tables = [tables[0]] * len(tables)
        opened: list[RowsToCheck] = []
        for place, (table, lease) in enumerate(zip(tables, leases, strict=True)):
            if name == "replay" and place == 0:  # its first file is honest
                continue
            if name in TOKEN_LIES and not told(honest[place], table):
                measured.untold += 1
                continue
            code = self.refused_by_reading(table, lease)
            if code is not None:
                measured.submissions += 1
                measured.read[code] += 1
                continue
            opened.append(RowsToCheck(table.rows, lease))
        if opened:
            self.add(measured, self.check(opened), forged=name == FORGED, timed=False)
        return measured


@dataclass(frozen=True)
class Way:
    """One way to do honest work and to check it."""

    name: str
    make: Callable[[], Behaviour] = Behaviour
    plain: bool = False
    """Whether it is checked by plain matrix products, as another machine's kernel would."""


def told(honest: RolloutTable, sent: RolloutTable) -> bool:
    """Returns whether any row that was sent has other tokens than the honest one."""
    return any(
        one.output_tokens != other.output_tokens or one.finish is not other.finish
        for one, other in zip(honest.rows, sent.rows, strict=True)
    )


def sent_states(row: CheckedRow, width: int) -> torch.Tensor:
    """Returns the states that the prover claims to have, [T-1, H], where the verifier's are; invented ones if it sent something else."""
    count, data, device = len(row.rollout.output_tokens) - 1, row.rollout.proof, row.states_TH.device
    if len(data) != 2 * width * count:
        generator = torch.Generator().manual_seed(len(data))
        return torch.randn(count, width, generator=generator).to(device, torch.bfloat16)
    values = np.frombuffer(data, dtype=np.int16).copy()
    return torch.from_numpy(values).view(torch.bfloat16).view(count, width).to(device)


# -- detection ----------------------------------------------------------------------------------------------


def redraw(scheme: Scheme, table: Table, num_prompts: int, count: int) -> Floats:
    """Returns the scores of `count` submissions of prompts that are drawn with replacement."""
    rng, scores = np.random.default_rng(0), []
    columns = table.sums_PA.shape[1] + table.largest_PB.shape[1]
    at_once = max(1, CELLS_AT_ONCE // (columns * num_prompts))
    for start in range(0, count, at_once):
        drawn = rng.integers(0, len(table.sums_PA), size=(min(at_once, count - start), num_prompts))
        sums, largest = table.sums_PA[drawn].sum(axis=1), table.largest_PB[drawn].max(axis=1)
        scores.append(scheme.score(sums, largest))
    return np.concatenate(scores)


def limits(
    scheme: Scheme, honest: Mapping[str, KindTables], num_prompts: int, count: int
) -> dict[float, float]:
    """Returns the score for each rate that honest work exceeds no more often, by the way with the highest scores."""
    if scheme.has_limit:
        return dict.fromkeys(RATES, 1.0)
    scores = [redraw(scheme, one.table(scheme), num_prompts, count) for one in honest.values()]
    return {rate: max(float(np.quantile(one, 1 - rate, method="higher")) for one in scores) for rate in RATES}


def tokens_needed(scheme: Scheme, lie: KindTables, by_size: Mapping[int, float]) -> int | None:
    """Returns the tokens of the smallest submission that is detected with a probability of ENOUGH; None if no size is enough.

    `by_size` has the limit for each number of prompts. At most half as many prompts are drawn as the lie was told in.
    """
    table = lie.table(scheme)
    sizes = [size for size in by_size if 2 * size <= len(table.sums_PA)]
    per_prompt = lie.tokens / len(table.sums_PA)

    def enough(size: int) -> bool:
        return bool((redraw(scheme, table, size, REDRAWN_LIES) > by_size[size]).mean() >= ENOUGH)

    if not sizes or not enough(sizes[-1]):
        return None
    return round(per_prompt * next(size for size in sizes if enough(size)))
