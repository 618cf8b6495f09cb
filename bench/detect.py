"""Measures which lies are caught by one submission: every lie of `shoal worker --lie`, old policies, and honest work.

    python bench/detect.py --model tiny --task sort --submissions 40
    python bench/detect.py --model smollm2-135m --task add --dtype bfloat16 --device cuda --noise runs/calibration/FILE \\
        --scores scores.json
    python bench/detect.py --plot docs/img/detect.png --of scores.json
    python bench/detect.py --judge units.npz --noise runs/calibration/FILE

Each submission is judged by the validator's own code, once by the tolerances alone and once with --noise (or a calibration that
this run measures first). Columns: refused as certain, with a 95 % interval; `void`, suspicious but not certain; `plain`, refused by
the tolerances alone; `published`, refused by the published rule (38 mismatches, mean 10, median 8 in any segment); `AUC`, how often
a single full segment of the lie scores above an honest one. A lie about tokens that changed none in a submission was not told there:
the end of the line counts it, and no column does. An old policy is the leased one with each weight changed by ± the learning rate,
once per version, and rounded to bfloat16.

Honest work is generated and checked in every way this machine supports: with and without CUDA graphs, one row at a time, checked by
the packed kernel, by SDPA and by plain matrix products, and from --rows-of FILE, rows that another machine made with
`shoal toploc prove`. --honest N fresh submissions of --honest-rows rows each are judged last; no row is used twice. --units saves
the statistics of every row, so that --judge can repeat the decision with another calibration. `by chance`, for lies that the proofs
show: the rows are resampled into 3,000 submissions, prompts with replacement, and the refused ones are counted.
"""

import argparse
import contextlib
import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal import toploc
from shoal.cli.arena.contest import told
from shoal.cli.commands.sample_answers import model_folder
from shoal.cli.commands.toploc import TERMS, read_rows
from shoal.cli.ui.values import wilson
from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.rollout.adversary.lies import LIES, TOKEN_LIES, OtherWeights, make_behaviour
from shoal.rollout.adversary.lying_engines import AlteredEngine, older, quantised_by_channel
from shoal.rollout.adversary.practice import NODE, generate_tables, practice_lease
from shoal.rollout.engine.api import (
    Behaviour,
    Engine,
    FinishedRow,
)
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.swarm.validator import fact_checks, format_checks
from shoal.swarm.validator import recompute as recomputing
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.swarm.validator.judge import read_and_check_table
from shoal.swarm.validator.prefill import LoadedPolicy, prefill
from shoal.swarm.validator.recompute import RowsToCheck, SamplingTerms, recompute_many
from shoal.swarm.validator.table_reader import TableReader
from shoal.toploc.decision import (
    CERTAIN,
    MARGIN,
    OUTLIER,
    STATISTICS,
    Unit,
    bound_for,
    calibrated_statistic,
    outlier_bound,
)
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease
from shoal.wire.messages import Claim
from shoal.wire.proof_noise import Noise, Tail
from shoal.wire.rollouts import Rollout, RolloutTable, encode
from shoal.wire.run_spec import ProofSpec, RunSpec, Sampling, TaskSpec, default_tolerances

Units = list[Unit]
SAMPLES = 4
AT_ONCE = 32
"""Submissions generated and checked together."""
SLOW = {"honest, one row at a time": 2}
"""Submissions of slow kinds."""
REDRAWN = 3000
"""Submissions resampled from the rows of a kind."""
MAX_SEGMENTS = 4000
"""Segments of each kind that are kept for the curves."""


@dataclass
class Tally:
    """The verdicts of the submissions of one kind."""

    codes: Counter[str] = field(default_factory=Counter)
    plain: int = 0
    """Refused by the tolerances alone."""
    published: int = 0
    scores: list[float] = field(default_factory=list)
    """Largest z divided by its bound for certainty; above 1 the submission is refused."""
    segments: list[float] = field(default_factory=list)
    """Scores of single full segments: the sum of both statistics, in standard deviations."""
    untold: int = 0
    """Submissions in which the lie changed no token; they are in no other number."""
    redrawn: int = 0
    """Refused submissions among REDRAWN."""

    @property
    def refused(self) -> int:
        return sum(number for code, number in self.codes.items() if code.startswith("reject."))

    @property
    def void(self) -> int:
        return sum(number for code, number in self.codes.items() if code.startswith("void."))


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[], Behaviour] = Behaviour
    graphs: bool = True
    max_rows: int | None = None
    check: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """A context around the validator's forward pass."""


class SmallerModel(AlteredEngine):
    """Uses tokens of a coarser model with states, proofs and log-probs of the leased one, for all rows at once.

    `shoal worker --lie smaller-model` does this row by row.
    """

    def __init__(self, inner: Engine, policy: LoadedPolicy) -> None:
        super().__init__(inner, partial(quantised_by_channel, bits=4))
        self.policy, self.waiting = policy, list[FinishedRow]()

    @torch.inference_mode()
    def step(self) -> list[FinishedRow]:
        self.waiting += self.inner.step()
        if self.inner.has_work:
            return []
        rows, self.waiting = self.waiting, []
        made = []
        for start in range(0, len(rows), 1024):
            some = rows[start : start + 1024]
            rollouts = [row.to_rollout() for row in some]
            states = prefill(self.policy.decoder, rollouts)
            entries = [recomputing._Entry(0, place, one, TERMS) for place, one in enumerate(rollouts)]
            columns = recomputing._token_columns(self.policy.decoder, entries, torch.cat(states))
            per_token = recomputing._per_token(entries, columns.cpu().numpy())
            proofs = toploc.build_proofs([one[1:] for one in states])
            made += [
                replace(row, logprobs=tuple(tokens[0].tolist()), proof=proof)
                for row, tokens, proof in zip(some, per_token, proofs, strict=True)
            ]
        return made


class Smaller(Behaviour):
    def __init__(self, policy: LoadedPolicy) -> None:
        self.policy = policy

    def engine(self, engine: Engine) -> Engine:
        return SmallerModel(engine, self.policy)


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path, reader: TableReader) -> None:
        self.options, self.folder, self.reader = options, folder, reader
        self.spec = RunSpec(
            run="detect",
            task=TaskSpec(name=options.task),
            compute_dtype=options.dtype,
            sampling=Sampling(max_new_tokens=options.new_tokens, samples_per_prompt=SAMPLES),
            tolerances=default_tolerances(options.dtype),
            last_version=1,
        )
        decoder = load_decoder(folder, DTYPES[options.dtype], options.device)
        self.policy = LoadedPolicy(0, decoder, load_tokenizer(folder), options.batch_tokens)
        self.number = 0
        self.seen: set[str] = set()
        self.units: dict[str, list[tuple[list[Units], list[int]]]] = {}
        """The statistics of the rows of each kind's submissions, with their prompt numbers."""
        self.engines: dict[tuple[str, int, bool], TorchEngine] = {}

    def engine(self, behaviour: Behaviour, kind: Kind) -> Engine:
        """Runs all kinds. They share engines and swap weights, because building an engine takes longer than its work here."""
        dtype = behaviour.compute_dtype(self.options.dtype)
        settings = (dtype, kind.max_rows or self.options.engine_rows, kind.graphs)
        if settings not in self.engines:
            self.engines[settings] = TorchEngine(
                compute_dtype=dtype,
                proof=ProofSpec(),
                max_rows=settings[1],
                device=self.options.device,
                graphs=kind.graphs,
            )
        engine = behaviour.engine(self.engines[settings])
        engine.load(self.folder, 0)
        return engine

    def lease(self, num_rows: int) -> Lease:
        """Returns a new lease with other prompts and draws."""
        self.number += 1
        return practice_lease(
            "detect",
            f"detect/{self.options.seed}/{self.number}",
            task=self.spec.task,
            sampling=self.spec.sampling,
            proof=self.spec.proof,
            num_prompts=max(1, num_rows // SAMPLES),
        )

    def measure_noise(self, num_rows: int) -> Noise:
        behaviour = Behaviour()
        engine = self.engine(behaviour, Kind("honest"))
        leases = [self.lease(self.options.rows) for _ in range(-(-num_rows // self.options.rows))]
        tables = generate_tables(behaviour, engine, leases)
        rows, prompts = [], []
        for number, (table, facts) in enumerate(
            zip(tables, self.facts([t.rows for t in tables], leases), strict=True)
        ):
            rows += [
                fact_checks.units_of(row, fact) for row, fact in zip(table.rows, facts or [], strict=True)
            ]
            prompts += [1000 * number + row.prompt_index for row in table.rows]
        options = self.options
        return toploc.measure_noise(
            {"here": rows}, model=options.model, compute_dtype=options.dtype, prompts={"here": prompts}
        )

    def facts(
        self, rows: Sequence[Sequence[Rollout]], leases: Sequence[SamplingTerms]
    ) -> list[list[RowFacts] | None]:
        checked = [RowsToCheck(one, lease) for one, lease in zip(rows, leases, strict=True)]
        found = recompute_many(checked, self.policy, control_seed=self.number)
        return [None if isinstance(one, Rejected) else one for one in found]

    def tally(self, kind: Kind, noise: Noise, count: int) -> Tally:
        tally, behaviour = Tally(), kind.make()
        engine = self.engine(behaviour, kind)
        past = kind.name == "replay"  # its first file is honest
        count = min(count, SLOW.get(kind.name, count)) + past
        started_s = time.monotonic()
        for start in range(0, count, AT_ONCE):
            if start and time.monotonic() - started_s > self.options.kind_seconds:
                break
            leases = [self.lease(self.options.rows) for _ in range(min(AT_ONCE, count - start))]
            tables = generate_tables(behaviour, engine, leases)
            if kind.name in TOKEN_LIES:
                honest = generate_tables(Behaviour(), self.engine(Behaviour(), kind), leases)
                engine.load(
                    self.folder, 0
                )  # kinds share engines: the honest rows may have changed its weights
                pairs = list(zip(tables, honest, leases, strict=True))
                kept = [(sent, lease) for sent, right, lease in pairs if told(right, sent)]
                tally.untold += len(pairs) - len(kept)
                tables, leases = [table for table, _ in kept], [lease for _, lease in kept]
            files = [behaviour.data(encode(table)) for table in tables]
            opened = []
            for place, (data, lease) in enumerate(zip(files, leases, strict=True)):
                try:
                    opened.append((self._open(data, lease), lease))
                except Rejected as rejected:
                    if not (past and start == place == 0):
                        tally.codes[rejected.code] += 1
                        tally.plain += 1
            if past and start == 0:
                opened = opened[1:]
            if opened:
                with kind.check():
                    facts = self.facts([table.rows for table, _ in opened], [lease for _, lease in opened])
                for (table, _), found in zip(opened, facts, strict=True):
                    self.judge(table.rows, found, noise, tally, kind.name)
        tally.redrawn = redraw(self.units.get(kind.name, []), noise)
        return tally

    def _open(self, data: bytes, lease: Lease) -> RolloutTable:
        digest = hashlib.sha256(data).hexdigest()
        claim = Claim(
            lease=lease,
            policy_version=0,
            sha256=digest,
            num_bytes=len(data),
            received_at_s=0.0,
            deadline_s=1e12,
            copy_of=NODE if digest in self.seen else None,
        )
        self.seen.add(digest)
        format_checks.check_claim(claim)
        return read_and_check_table(data, claim, self.policy, reader=self.reader)

    def judge(self, rows, facts, noise: Noise, tally: Tally, name: str) -> None:  # type: ignore[no-untyped-def]
        if facts is None:
            tally.codes["reject.malformed_proof"] += 1
            tally.plain += 1
            return
        segments = [segment for fact in facts for segment in fact.segments]
        tally.published += any(
            s.exponent_mismatches > 38 or s.mantissa_mean > 10 or s.mantissa_median > 8 for s in segments
        )
        prompts = [row.prompt_index for row in rows]
        units = [fact_checks.units_of(row, fact) for row, fact in zip(rows, facts, strict=True)]
        self.units.setdefault(name, []).append((units, prompts))
        scores = toploc.noise_scores(units, noise, prompts)
        tally.scores.append(max((score.z / score.certain for score in scores), default=0.0))
        if len(tally.segments) < MAX_SEGMENTS:
            full = max((s.num_values for s in segments), default=0)
            tally.segments += [segment_score(s, noise) for s in segments if s.num_values == full]
        tally.plain += self._refused(rows, facts, None) is not None
        code = self._refused(rows, facts, noise) or ACCEPTED
        tally.codes[code] += 1
        if name.startswith("honest") and code != ACCEPTED:
            print(f"  {name}: {self.why}", flush=True)

    def _refused(self, rows, facts, noise: Noise | None) -> str | None:  # type: ignore[no-untyped-def]
        try:
            fact_checks.check_facts(rows, facts, self.spec.tolerances, noise)
        except Rejected as rejected:
            self.why = f"{rejected.code} {rejected.detail}"
            return rejected.code
        return None

    def of_file(self, path: Path, noise: Noise) -> Tally:
        """Returns rows that another machine made, grouped into submissions."""
        tally, rows = Tally(), read_rows(path).rows
        for start in range(0, len(rows), self.options.rows):
            some = rows[start : start + self.options.rows]
            for facts in self.facts([some], [TERMS]):
                self.judge(some, facts, noise, tally, f"honest, rows of {path.stem}")
        return tally

    def many_honest(self, noise: Noise) -> Tally:
        """Yields fresh honest submissions, at least AT_ONCE at a time, until there are enough or the time is over."""
        options, tally, started_s = self.options, Tally(), time.monotonic()
        behaviour = Behaviour()
        engine = self.engine(behaviour, Kind("honest"))
        at_once = max(AT_ONCE, 4096 // options.honest_rows)
        with contextlib.suppress(KeyboardInterrupt):  # use what was generated so far
            while tally.codes.total() < options.honest and time.monotonic() - started_s < options.seconds:
                leases = [self.lease(options.honest_rows) for _ in range(at_once)]
                tables = generate_tables(behaviour, engine, leases)
                for table, facts in zip(tables, self.facts([t.rows for t in tables], leases), strict=True):
                    self.judge(table.rows, facts, noise, tally, "honest, many")
        return tally


def segment_score(segment: toploc.SegmentCheck, noise: Noise) -> float:
    score = 0.0
    for name, measure in STATISTICS.items():
        calibrated = calibrated_statistic(noise, name)
        if calibrated is None:
            continue
        for unit in measure([segment]):
            score += (unit.value - calibrated.moments(unit.size).mean) / math.sqrt(
                calibrated.variance(unit.size)
            )
    return score


def redraw(submissions: Sequence[tuple[list[Units], list[int]]], noise: Noise) -> int:
    """Counts refused submissions among REDRAWN resampled ones. Only sums over the submission are tested, because resampling
    repeats the same few worst rows."""
    rng = np.random.default_rng(0)
    sums = {name: prompt_sums(submissions, noise, name) for name in STATISTICS}
    refused = np.zeros(REDRAWN, dtype=bool)
    for name, table_P4 in sums.items():
        calibrated = calibrated_statistic(noise, name)
        if calibrated is None or not len(table_P4):
            continue
        per_submission = max(1, len(table_P4) // len(submissions))
        drawn = table_P4[rng.integers(0, len(table_P4), size=(REDRAWN, per_submission))]
        excess, variance, count, rows = (drawn[:, :, column] for column in range(4))
        spread = calibrated.honest.inflation * variance.sum(1)
        spread += calibrated.honest.prompt_variance * np.square(count).sum(1)
        bounds = {n: certain_bound(calibrated.honest.tails, int(n)) for n in np.unique(rows.sum(1)) if n}
        certain = np.array([bounds.get(n, math.inf) for n in rows.sum(1)])
        refused |= excess.sum(1) / np.sqrt(np.maximum(spread, 1e-30)) > certain
    return int(refused.sum())


def certain_bound(tails: Sequence[Tail], num_rows: int) -> float:
    return max(bound_for(tails, num_rows, CERTAIN), outlier_bound(tails[0], OUTLIER, num_rows=num_rows))


def prompt_sums(
    submissions: Sequence[tuple[list[Units], list[int]]], noise: Noise, name: str
) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    """Returns [P, 4]: excess, variance, units and rows of every prompt of every submission."""
    calibrated = calibrated_statistic(noise, name)
    found: dict[tuple[int, int], np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for number, (rows, prompts) in enumerate(submissions):
        for row, prompt in zip(rows, prompts, strict=True):
            units = [unit for unit in STATISTICS[name](row) if calibrated and calibrated.tests(unit.size)]
            of = found.setdefault((number, prompt), np.zeros(4))
            if units and calibrated:
                of += (
                    sum(unit.value - (1 + MARGIN) * calibrated.moments(unit.size).mean for unit in units),
                    sum(calibrated.variance(unit.size) for unit in units),
                    len(units),
                    1,
                )
    return np.array(list(found.values())).reshape(-1, 4)


def save_units(path: Path, kinds: dict[str, list[tuple[list[Units], list[int]]]]) -> None:
    """Returns one table of all units: kind, submission, row, prompt, whether it is of tokens, size, both statistics."""
    lines = []
    for kind, submissions in enumerate(kinds.values()):
        for number, (rows, prompts) in enumerate(submissions):
            for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                for of_tokens, (first, second) in (
                    (0, ("mismatches", "mantissas")),
                    (1, ("logprobs", "draws")),
                ):
                    for a, b in zip(STATISTICS[first](row), STATISTICS[second](row), strict=True):
                        lines.append((kind, number, index, prompt, of_tokens, a.size, a.value, b.value))
    table = np.array(lines, dtype=np.float32).reshape(-1, 8)
    columns: dict[str, Any] = {
        name: table[:, place].astype(dtype) for place, (name, dtype) in enumerate(UNIT_COLUMNS.items())
    }
    np.savez_compressed(path, kinds=np.array(list(kinds)), **columns)


UNIT_COLUMNS = {
    "kind": np.uint8,
    "submission": np.uint16,
    "row": np.uint8,
    "prompt": np.uint8,
    "of_tokens": np.bool_,
    "size": np.uint16,
    "first": np.float16,
    "second": np.float16,
}


def load_units(path: Path) -> dict[str, list[tuple[list[Units], list[int]]]]:
    with np.load(path) as file:
        names = [str(name) for name in file["kinds"]]
        columns = [file[name].tolist() for name in UNIT_COLUMNS]
    kinds: dict[str, dict[int, dict[tuple[int, int], Units]]] = {name: {} for name in names}
    for kind, number, row, prompt, of_tokens, size, first, second in zip(*columns, strict=True):
        units = kinds[names[kind]].setdefault(number, {}).setdefault((row, prompt), [])
        units.append(
            toploc.TokenBlock(num_tokens=size, logprob_gap=first, draw_root=second)
            if of_tokens
            else segment_of(size, first, second)
        )
    return {
        name: [(list(rows.values()), [prompt for _, prompt in rows]) for rows in submissions.values()]
        for name, submissions in kinds.items()
    }


def segment_of(size: int, mismatches: float, mantissa: float) -> toploc.SegmentCheck:
    return toploc.SegmentCheck(
        num_values=size,
        num_points=128,
        exponent_mismatches=int(mismatches),
        mantissa_mean=mantissa,
        mantissa_median=mantissa,
        mantissa_bounded=mantissa,
        sign_mismatches=0,
        control_hits=0,
        num_controls=0,
        constant=False,
    )


def judge_again(paths: Sequence[Path], noise: Noise) -> None:
    """Repeats only the calibrated decision, on saved units."""
    print(
        f"{'':<28} {'certain':>8} {'suspicious':>10} {'of':>7} {'least':>7} {'most':>7}   scores above their bound, by statistic"
    )
    kept: dict[str, list[tuple[list[Units], list[int]]]] = {}
    for path in paths:
        for name, submissions in load_units(path).items():
            kept.setdefault(name, []).extend(submissions)
    for name, submissions in kept.items():
        found = [toploc.noise_scores(rows, noise, prompts) for rows, prompts in submissions]
        over = [max((score.z / score.certain for score in scores), default=0.0) for scores in found]
        suspicious = sum(any(score.is_suspicious for score in scores) for scores in found)
        parts: dict[str, float] = defaultdict(float)
        for score in (score for scores in found for score in scores):
            key = f"{score.statistic} {'all' if 'all' in score.where else 'part' if 'part' in score.where else 'row'}"
            parts[key] = max(parts[key], round(score.z / score.certain, 2))
        print(
            f"{name:<28} {sum(one > 1 for one in over):>8} {suspicious:>10} {len(over):>7} {min(over):>7.2f} {max(over):>7.2f}   "
            f"redrawn {redraw(submissions, noise)}, most {dict(parts)}",
            flush=True,
        )


def without_packing() -> contextlib.AbstractContextManager[object]:
    return mock.patch("shoal.swarm.validator.prefill.supports_flash_attention", lambda device, dtype: False)


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    with without_packing(), sdpa_kernel(SDPBackend.MATH):
        yield


def honest_kinds(options: argparse.Namespace) -> Iterator[Kind]:
    yield Kind("honest")
    if torch.device(options.device).type == "cuda":
        yield Kind("honest, without graphs", graphs=False)
        yield Kind("honest, checked by SDPA", check=without_packing)
    yield Kind("honest, checked eagerly", check=plain_products)
    yield Kind("honest, one row at a time", max_rows=1)


def lying_kinds(policy: LoadedPolicy) -> Iterator[Kind]:
    for lie in LIES:
        if lie == "smaller-model":
            yield Kind(lie, partial(Smaller, policy))
        elif lie != "stale-weights":  # covered by the old policies below
            yield Kind(lie, partial(make_behaviour, lie, "http://127.0.0.1:1"))
    for rate in (1e-6, 1e-5):
        for versions in (1, 2, 8):
            alter = partial(older, rate=rate, versions=versions)
            yield Kind(f"stale by {versions} at {rate:g}", partial(OtherWeights, alter))


def area(honest: Sequence[float], lie: Sequence[float]) -> float:
    """Returns the AUC: the probability that a segment of the lie scores above an honest one; equal ones count half."""
    if not honest or not lie:
        return math.nan
    ordered = np.sort(honest)
    below = np.searchsorted(ordered, lie, side="left") + np.searchsorted(ordered, lie, side="right")
    return float(below.mean() / 2 / len(ordered))


def line(name: str, tally: Tally, honest: Tally | None) -> str:
    count = tally.codes.total()
    low, high = wilson(tally.refused / count, count) if count else (0.0, 1.0)
    codes = ", ".join(f"{code} {number}" for code, number in tally.codes.most_common())
    codes += f"; {tally.untold} not told" if tally.untold else ""
    auc = math.nan if honest is None else area(honest.segments, tally.segments)
    return (
        f"{name:<26} {tally.refused:>5} of {count:<6} {low:>7.2%} to {high:>7.2%} {tally.void:>5} {tally.plain:>6} "
        f"{tally.published:>9} {auc:>6.3f} {min(tally.scores, default=math.nan):>7.2f} {max(tally.scores, default=math.nan):>7.2f} "
        f"{tally.redrawn:>9}   {codes}"
    )


def plot(tallies: dict[str, Tally], path: Path) -> None:
    """Plots detection against false alarms, by single segments and by submissions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 6))
    honest = tallies["honest, many"] if tallies["honest, many"].codes else tallies["honest"]
    for axes, of, title in ((left, "segments", "one segment"), (right, "scores", "one submission")):
        reference = np.sort(getattr(honest, of))
        for number, (name, tally) in enumerate(tallies.items()):
            values = np.asarray(getattr(tally, of))
            if name.startswith("honest") or not len(values):
                continue
            bounds = np.concatenate([[-np.inf], reference, [np.inf]])
            alarms = 1 - np.searchsorted(reference, bounds, side="right") / len(reference)
            found = [(values > bound).mean() for bound in bounds]
            style = {"color": pyplot.cm.tab20(number % 20), "linestyle": "--" if "stale" in name else "-"}
            axes.plot(np.maximum(alarms, 0.3 / len(reference)), found, label=name, linewidth=1.2, **style)
        chance = np.logspace(-4, 0)
        axes.plot(chance, chance, color="black", linestyle=":", linewidth=1)
        axes.set(
            xscale="log",
            xlabel=f"false alarms, of {len(reference):,} honest",
            ylabel="lies found",
            title=title,
        )
        axes.grid(alpha=0.3)
    right.legend(fontsize=6, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="sort")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=64, help="of a submission")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--submissions", type=int, default=10, help="of each kind")
    parser.add_argument("--kinds", nargs="+", help="only kinds whose names begin with one of these")
    parser.add_argument(
        "--honest", type=int, default=0, help="honest submissions of --honest-rows rows to judge at the end"
    )
    parser.add_argument("--honest-rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=math.inf, help="for those")
    parser.add_argument("--kind-seconds", type=float, default=math.inf, help="submissions of each other kind")
    parser.add_argument("--units", type=Path, help="save the statistics of every row to this file")
    parser.add_argument(
        "--judge", type=Path, nargs="+", help="only judge these files of --units with --noise"
    )
    parser.add_argument("--engine-rows", type=int, default=64, help="decoded at once")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of one prefill")
    parser.add_argument("--calibrate-rows", type=int, default=1024)
    parser.add_argument("--noise", type=Path, help="a file of `shoal toploc calibrate`, instead of measuring")
    parser.add_argument("--rows-of", type=Path, nargs="*", default=[], help="files of `shoal toploc prove`")
    parser.add_argument("--scores", type=Path, help="write the data of the curves to this file")
    parser.add_argument("--of", type=Path, help="only draw --plot from this file")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def find_noise(bench: Bench) -> Noise:
    options = bench.options
    if options.noise:
        return Noise.parse(options.noise.read_bytes())
    return bench.measure_noise(options.calibrate_rows)


def run(bench: Bench) -> dict[str, Tally]:
    options, noise = bench.options, find_noise(bench)
    print(f"{options.model}, {options.dtype}, {options.device}; noise of {'; '.join(noise.measured)}")
    print(
        f"{'':<26} {'refused':>15} {'95 % interval':>18} {'void':>5} {'plain':>6} {'published':>9} {'AUC':>6} {'least':>7} {'most':>7} {'by chance':>9}   verdicts"
    )
    tallies: dict[str, Tally] = {}

    def add(name: str, tally: Tally) -> None:
        tallies[name] = tally
        print(line(name, tally, tallies.get("honest")), flush=True)
        if options.scores:
            options.scores.write_text(json.dumps({n: vars(t) for n, t in tallies.items()}))

    for path in options.rows_of:
        add(f"honest, rows of {path.stem}", bench.of_file(path, noise))
    for kind in (*honest_kinds(options), *lying_kinds(bench.policy)):
        if options.kinds is None or any(kind.name.startswith(one) for one in options.kinds):
            add(kind.name, bench.tally(kind, noise, options.submissions))
        if options.units:
            save_units(options.units, bench.units)
    if options.honest:
        add("honest, many", bench.many_honest(noise))
    if options.units:
        save_units(options.units, bench.units)
    return tallies


def main() -> None:
    options = parse()
    started_s = time.monotonic()
    if options.judge:
        judge_again(options.judge, Noise.parse(options.noise.read_bytes()))
        return
    if options.of:
        found = json.loads(options.of.read_text())
        tallies = {
            name: Tally(**{**fields, "codes": Counter(fields["codes"])}) for name, fields in found.items()
        }
    else:
        with model_folder(options.model) as folder, TableReader() as reader:
            tallies = run(Bench(options, folder, reader))
        print(f"{time.monotonic() - started_s:.0f} s")
    if options.plot:
        plot({"honest, many": Tally(), **tallies}, options.plot)


if __name__ == "__main__":
    main()
