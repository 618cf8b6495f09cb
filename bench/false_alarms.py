"""Measures how often honest work is refused or void, by the pair of paths that made and checked it, and by the terms of a run.

    python bench/false_alarms.py
    python bench/false_alarms.py --dtype float32 --conditions "24 tokens" "task add"
    python bench/false_alarms.py --model FOLDER --device cuda --max-rows 1024 --batch-tokens 32768 --processes 12 --prompts 2 \
        --submissions 3000 --seconds 100 --out alarms.npz

Each condition is a run of its own: answers of up to 1 to 2,000 tokens, temperatures 0.6 to 1.2, other tasks, long prompts. It is
calibrated as `shoal run` calibrates itself, with rows of each engine of --makers that are checked by each path of a validator: packed
prefill (on a CPU: with a cache), the same by plain products, transformers. Then fresh honest submissions are judged, and no row is
used twice: those of the measured pairs by the noise of their pair, and those of --unknown, classes that the calibration does not
have, by the widest noise, with a second path before a refusal. --submissions are those of a condition of share 1; the others have
more or fewer, in proportion to their answers. A condition ends early when --seconds have passed.

The extrapolated rate is no count: the largest score of each submission, relative to its bound for a refusal, is taken to have an
exponential tail above its 90th percentile. Neither is the resampled one: it counts refusals by sums among submissions that are drawn,
with replacement, from the same prompts.
"""

import argparse
import itertools
import math
import multiprocessing
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detect import certain_bound, prompt_sums  # bench/detect.py

from shoal import toploc
from shoal.cli.commands.sample_answers import model_folder
from shoal.cli.commands.toploc import RUN_ROWS, SHORT_RUN_ROWS, SHORT_TOKENS, _spread_lengths
from shoal.cli.ui.values import wilson
from shoal.model.load_model import DTYPES, load_causal, load_transformers_model
from shoal.model.tokenizer import load_tokenizer
from shoal.net.waiting import Stopped
from shoal.rollout.adversary.adaptive import PlainEngine
from shoal.rollout.adversary.practice import generate_tables, practice_lease
from shoal.rollout.engine.api import Behaviour, Engine, GenerationRequest
from shoal.rollout.engine.selection import make_engine
from shoal.rollout.engine.transformers_engine import TransformersEngine
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.recompute import RowsToCheck, recompute_many
from shoal.toploc.decision import STATISTICS, calibrated_statistic
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import Rollout, RolloutTable
from shoal.wire.run_spec import ProofSpec, Sampling, TaskSpec, default_tolerances


@dataclass(frozen=True)
class Condition:
    name: str
    new_tokens: int = 24
    temperature: float = 1.0
    task: str = "sort"
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    share: float = 1.0
    """Submissions, as a multiple of --submissions."""
    one_length: bool = False
    """Whether all answers of a submission are cut to one length, from 1 token to the limit."""
    random_prompt: int = 0
    """Tokens of random prompts, whose answers rarely end before the limit; 0: those of the task."""


CONDITIONS = (
    Condition("2,000 tokens", new_tokens=2000, random_prompt=32, share=1 / 75),
    Condition("512 tokens", new_tokens=512, random_prompt=32, share=1 / 20),
    Condition("128 tokens", new_tokens=128, random_prompt=32, share=1 / 5),
    Condition("long prompts", options={"length": 12, "style": "chat"}, share=1 / 3),
    Condition("2 tokens", new_tokens=2, share=2),
    Condition("8 tokens", new_tokens=8, share=5 / 3),
    Condition("1 to 24 tokens", one_length=True, share=5 / 3),
    Condition("24 tokens"),
    Condition("temperature 0.6", temperature=0.6),
    Condition("temperature 1.2", temperature=1.2),
    Condition("task add", task="add", share=2 / 3),
    Condition("task count", task="count", share=2 / 3),
    Condition("1 token", new_tokens=1, share=0.1),
)
MAKERS = ("torch", "plain", "transformers")
PATHS = ("prefill", "plain", "transformers")
TAIL = 0.9
"""Quantile of the largest scores above which their tail is taken to be exponential."""
TOKENS_AT_ONCE = 1 << 18
"""Tokens that are generated before they are checked."""
CACHE_TOKENS = 1 << 19
"""Most tokens in the cache of the plain decoder."""
REDRAWN = 100_000
"""Submissions resampled from the prompts of a pair."""


@dataclass
class Judged:
    """The verdicts on the submissions of one pair, and their scores, relative to the bound for a refusal."""

    codes: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)
    """The largest of each submission."""
    by_statistic: list[list[float]] = field(default_factory=list)
    """The largest of each submission and statistic; -inf where none was tested."""
    redrawn: int = 0
    """Refused submissions among `of_redrawn` resampled ones."""
    of_redrawn: int = 0

    def add(self, other: "Judged") -> None:
        self.codes.update(other.codes)
        self.scores += other.scores
        self.by_statistic += other.by_statistic
        self.redrawn += other.redrawn
        self.of_redrawn += other.of_redrawn

    def count(self, prefix: str) -> int:
        return sum(number for code, number in self.codes.items() if code.startswith(prefix))

    def extrapolated(self) -> float:
        """Returns the share of submissions with a score above 1, by an exponential tail above the quantile TAIL."""
        edge = float(np.quantile(self.scores, TAIL))
        excess = [score - edge for score in self.scores if score > edge]
        return (
            (1 - TAIL) * math.exp(-(1 - edge) / float(np.mean(excess))) if excess and edge < 1 else math.nan
        )


@dataclass
class Measured:
    """What one condition gave."""

    condition: Condition
    pairs: dict[str, Judged] = field(default_factory=dict)
    tokens: int = 0
    longest: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    problem: str = ""


class CutRequests(Behaviour):
    """Cuts answers: every second row as a run's calibration does, or all rows of a submission to one length."""

    def __init__(self, condition: Condition, vocab_size: int, *, calibrates: bool) -> None:
        self.condition, self.vocab_size, self.calibrates = condition, vocab_size, calibrates
        self.first = itertools.count()
        """Numbers the leases; copies of this behaviour share it."""

    def requests(self, requests: Sequence[GenerationRequest], lease: Lease) -> Sequence[GenerationRequest]:
        if size := self.condition.random_prompt:
            rng = np.random.default_rng(int(lease.seed[:16], 16))
            prompts = rng.integers(self.vocab_size, size=(1 + requests[-1].prompt_index, size)).tolist()
            requests = [replace(one, prompt_tokens=tuple(prompts[one.prompt_index])) for one in requests]
        if self.calibrates:
            skipped = 2 * next(self.first) * (len(requests) // 2)
            return _spread_lengths([*[requests[0]] * skipped, *requests])[skipped:]
        if not self.condition.one_length:
            return requests
        length = 1 + int(lease.seed[:8], 16) % self.condition.new_tokens
        return [replace(request, max_new_tokens=length) for request in requests]


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path, condition: Condition) -> None:
        self.options, self.folder, self.condition = options, folder, condition
        dtype = DTYPES[options.dtype]
        policy = LoadedPolicy(
            0, load_causal(folder, dtype, options.device), load_tokenizer(folder), options.batch_tokens
        )
        model = load_transformers_model(folder, dtype, options.device)
        all_paths = {
            "prefill": policy,
            "plain": replace(policy, plain=True),
            "transformers": replace(policy, decoder=model),
        }
        self.paths = {name: all_paths[name] for name in options.paths}
        self.tolerances = default_tolerances(options.dtype)
        self.engines: dict[str, Engine] = {}
        self.number = 0
        self.noise: dict[tuple[str, str], Noise] = {}
        self.widest: Noise | None = None

    def engine(self, maker: str) -> Engine:
        if maker not in self.engines:
            options = self.options
            settings: dict[str, Any] = {
                "compute_dtype": options.dtype,
                "proof": ProofSpec(),
                "max_rows": options.max_rows,
                "device": options.device,
            }
            if maker == "torch":
                engine: Engine = make_engine("torch", **settings)
            elif maker == "plain":
                fitting = max(8, CACHE_TOKENS // (self.condition.new_tokens + 256))
                engine = PlainEngine(**settings | {"max_rows": min(options.max_rows, fitting)})
            else:
                engine = TransformersEngine(**settings)
            engine.load(self.folder, 0)
            self.engines[maker] = engine
        return self.engines[maker]

    def behaviour(self, *, calibrates: bool) -> CutRequests:
        vocab_size = self.paths[self.options.paths[0]].decoder.shape.vocab_size
        return CutRequests(self.condition, vocab_size, calibrates=calibrates)

    def leases(self, count: int) -> list[Lease]:
        found = []
        for _ in range(count):
            self.number += 1
            found.append(
                practice_lease(
                    "alarms",
                    f"alarms/{self.options.seed}/{self.condition.name}/{self.number}",
                    task=TaskSpec(name=self.condition.task, options=self.condition.options),
                    sampling=Sampling(
                        temperature=self.condition.temperature,
                        max_new_tokens=self.condition.new_tokens,
                        samples_per_prompt=self.options.samples,
                    ),
                    proof=ProofSpec(),
                    num_prompts=self.options.prompts,
                )
            )
        return found

    def facts(
        self, path: str, tables: Sequence[RolloutTable], leases: Sequence[Lease]
    ) -> list[list[RowFacts]]:
        given = [RowsToCheck(table.rows, lease) for table, lease in zip(tables, leases, strict=True)]
        found = recompute_many(given, self.paths[path], control_seed=self.number)
        assert not any(isinstance(one, Rejected) for one in found), "an honest proof was malformed"
        return [one for one in found if not isinstance(one, Rejected)]

    def calibrate(self) -> None:
        """Measures the noise of every pair, and of all together."""
        rows = SHORT_RUN_ROWS if self.condition.new_tokens <= SHORT_TOKENS else RUN_ROWS
        leases = self.leases(-(-rows // (self.options.prompts * self.options.samples)))
        units, prompts = {}, {}
        for maker in self.options.makers:
            behaviour = self.behaviour(calibrates=True)
            tables = generate_tables(behaviour, self.engine(maker), leases)
            for path in self.paths:
                found = self.facts(path, tables, leases)
                name = f"{maker} to {path}"
                units[name] = [
                    fact_checks.units_of(row, fact)
                    for table, facts in zip(tables, found, strict=True)
                    for row, fact in zip(table.rows, facts, strict=True)
                ]
                prompts[name] = [
                    self.options.prompts * number + row.prompt_index
                    for number, table in enumerate(tables)
                    for row in table.rows
                ]
                self.noise[maker, path] = self.measure({name: units[name]}, {name: prompts[name]})
        self.widest = self.measure(units, prompts)

    def measure(self, units: dict[str, Any], prompts: dict[str, list[int]]) -> Noise:
        return toploc.measure_noise(
            units, model=Path(self.options.model).name, compute_dtype=self.options.dtype, prompts=prompts
        )

    def judge_until(self, deadline: float) -> Measured:
        """Returns the verdicts on fresh submissions of every pair."""
        measured, began_s = Measured(self.condition), time.monotonic()
        self.calibrate()
        measured.seconds["calibrate"] = time.monotonic() - began_s
        count = max(1, round(self.condition.share * self.options.submissions))
        per_submission = self.options.prompts * self.options.samples * self.condition.new_tokens
        at_once = max(1, min(count, TOKENS_AT_ONCE // per_submission))
        made = dict.fromkeys((*self.options.makers, *self.options.unknown), 0)
        sums: dict[str, list[Any]] = {}
        while time.monotonic() < deadline and min(made.values()) < count:
            for maker in made:
                stop = threading.Event()
                timer = threading.Timer(max(0.0, deadline - time.monotonic()), stop.set)
                timer.start()
                try:
                    self.judge(maker, self.leases(at_once), measured, sums, stop)
                    made[maker] += at_once
                except Stopped:
                    break
                finally:
                    timer.cancel()
        for pair, tables in sums.items():
            self.redraw(pair, tables, measured.pairs[pair])
        measured.seconds["all"] = time.monotonic() - began_s
        return measured

    def judge(
        self,
        maker: str,
        leases: list[Lease],
        measured: Measured,
        sums: dict[str, list[Any]],
        stop: threading.Event,
    ) -> None:
        tables = generate_tables(self.behaviour(calibrates=False), self.engine(maker), leases, stop)
        lengths = [len(row.output_tokens) for table in tables for row in table.rows]
        measured.tokens, measured.longest = (
            measured.tokens + sum(lengths),
            max(measured.longest, *lengths),
        )
        found = {path: self.facts(path, tables, leases) for path in self.paths}
        for path, facts in found.items():
            noise = self.noise_of(maker, path)
            submissions = [
                (
                    [fact_checks.units_of(row, fact) for row, fact in zip(table.rows, of, strict=True)],
                    [row.prompt_index for row in table.rows],
                )
                for table, of in zip(tables, facts, strict=True)
            ]
            sums.setdefault(f"{maker} to {path}", []).append(
                {name: prompt_sums(submissions, noise, name) for name in STATISTICS}
            )
        for place, table in enumerate(tables):
            verdicts = {
                path: self.verdict(table.rows, facts[place], self.noise_of(maker, path))
                for path, facts in found.items()
            }
            for path, (code, of_each) in verdicts.items():
                # A validator that meets an unknown class asks its second path before it refuses.
                other = verdicts.get("prefill" if path == "plain" else "plain", (code, []))[0]
                spared = maker in self.options.unknown and other == ACCEPTED
                judged = measured.pairs.setdefault(f"{maker} to {path}", Judged())
                judged.codes[ACCEPTED if spared else code] += 1
                judged.scores.append(max(of_each, default=0.0))
                judged.by_statistic.append(of_each)

    def noise_of(self, maker: str, path: str) -> Noise:
        assert self.widest is not None
        return self.noise.get((maker, path), self.widest)

    def verdict(
        self, rows: Sequence[Rollout], facts: Sequence[RowFacts], noise: Noise
    ) -> tuple[str, list[float]]:
        scores = fact_checks.score_facts(rows, facts, noise)
        largest = dict.fromkeys(STATISTICS, -math.inf)
        for score in scores:
            if score.certain > 0:
                largest[score.statistic] = max(largest[score.statistic], score.z / score.certain)
        try:
            fact_checks.check_facts(rows, facts, self.tolerances, noise, scores)
        except Rejected as rejected:
            return rejected.code, list(largest.values())
        return ACCEPTED, list(largest.values())

    def redraw(self, pair: str, tables: list[dict[str, Any]], judged: Judged) -> None:
        """Counts refusals by sums among submissions that are resampled from the prompts."""
        rng, noise = np.random.default_rng(0), self.noise_of(*pair.split(" to "))
        refused = np.zeros(REDRAWN, dtype=bool)
        for name in STATISTICS:
            calibrated = calibrated_statistic(noise, name)
            lines_P4 = np.concatenate([one[name] for one in tables])
            if calibrated is None or not len(lines_P4):
                continue
            drawn = lines_P4[rng.integers(0, len(lines_P4), size=(REDRAWN, self.options.prompts))]
            excess, variance, count, rows = (drawn[:, :, column] for column in range(4))
            spread = calibrated.honest.inflation * variance.sum(1)
            spread += calibrated.honest.prompt_variance * np.square(count).sum(1)
            bounds = {n: certain_bound(calibrated.honest.tails, int(n)) for n in np.unique(rows.sum(1)) if n}
            certain = np.array([bounds.get(n, math.inf) for n in rows.sum(1)])
            refused |= excess.sum(1) / np.sqrt(np.maximum(spread, 1e-30)) > certain
        judged.redrawn, judged.of_redrawn = int(refused.sum()), REDRAWN


def measure_condition(
    options: argparse.Namespace, folder: Path, condition: Condition, deadline: float
) -> Measured:
    """Measures one condition."""
    try:
        with torch.inference_mode():
            return Bench(options, folder, condition).judge_until(deadline)
    except ValueError as error:
        return Measured(condition, problem=f"cannot be calibrated: {error}")


def measure_all(options: argparse.Namespace, folder: Path) -> Iterator[Measured]:
    """Yields the results of the conditions as they are ready."""
    # Time of a clock that all processes share.
    deadline = time.monotonic() + options.seconds
    chosen = [one for one in CONDITIONS if not options.conditions or one.name in options.conditions]
    if options.processes == 1:
        for condition in chosen:
            yield measure_condition(options, folder, condition, deadline)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        jobs: list[Future[Measured]] = [
            pool.submit(measure_condition, options, folder, condition, deadline) for condition in chosen
        ]
        for job in as_completed(jobs):
            if (error := job.exception()) is None:
                yield job.result()
            else:  # the other conditions go on
                print("".join(traceback.format_exception(error)), flush=True)


def save(path: Path, results: Sequence[Measured]) -> None:
    """Writes the scores of every submission: a table [submissions, statistics] for each condition and pair."""
    arrays = {
        f"{one.condition.name} | {pair}": np.array(judged.by_statistic, dtype=np.float32)
        for one in results
        for pair, judged in one.pairs.items()
    }
    np.savez_compressed(path, statistics=np.array(list(STATISTICS)), **arrays)  # type: ignore[arg-type] # of names


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--submissions", type=int, default=64, help="of each pair, in a condition of share 1")
    parser.add_argument("--prompts", type=int, default=4, help="of a submission")
    parser.add_argument("--samples", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--makers", choices=MAKERS, nargs="+", default=["torch"])
    parser.add_argument("--unknown", choices=MAKERS, nargs="*", default=["plain"])
    parser.add_argument("--paths", choices=PATHS, nargs="+", default=list(PATHS))
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of one prefill")
    parser.add_argument("--conditions", nargs="+", help="only these")
    parser.add_argument("--processes", type=int, default=1, help="conditions at once")
    parser.add_argument("--seconds", type=float, default=86400.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the scores of every submission to this file (npz)")
    options = parser.parse_args()
    if both := set(options.makers) & set(options.unknown):
        parser.error(f"--makers and --unknown both have {', '.join(both)}; a measured class is not unknown")
    return options


def main() -> None:
    options = parse()
    began_s = time.monotonic()
    results: list[Measured] = []
    totals: dict[str, Judged] = {}
    print("condition, tokens, seconds: refused, void of submissions, by pair (made by to checked by)")
    with model_folder(options.model) as folder:
        for measured in measure_all(options, folder):
            results.append(measured)
            cells = [
                f"{pair}: {one.count('reject.')}, {one.count('void.')} of {one.codes.total()}"
                for pair, one in measured.pairs.items()
            ]
            times = ", ".join(f"{name} {spent_s:.0f} s" for name, spent_s in measured.seconds.items())
            print(
                f"{measured.condition.name}: {measured.tokens:,} tokens, at most {measured.longest} each; {times} {measured.problem}\n    "
                + "\n    ".join(cells),
                flush=True,
            )
            for pair, judged in measured.pairs.items():
                totals.setdefault(pair, Judged()).add(judged)
            if options.out:
                save(options.out, results)
    for pair, judged in totals.items():
        count, refused = judged.codes.total(), judged.count("reject.")
        if not count:
            continue
        low, high = wilson(refused / count, count)
        print(
            f"{pair}: {refused} refused of {count:,}, 95 % interval {low:.4%} to {high:.4%}; {judged.count('void.')} void "
            f"{dict(judged.codes)}; largest score {max(judged.scores):.2f} of its bound, extrapolated rate {judged.extrapolated():.1e}; "
            f"resampled from the same prompts: {judged.redrawn} of {judged.of_redrawn:,} refused by sums"
        )
    print(f"{time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
