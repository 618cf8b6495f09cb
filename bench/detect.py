"""Which lies are caught, by one submission: every lie of `shoal worker --lie`, old policies and other dtypes, beside honest work.

    python bench/detect.py --model tiny --task sort --submissions 40
    python bench/detect.py --model smollm2-135m --task add --dtype bfloat16 --device cuda --new-tokens 64 --plot docs/img/detect.png

Each submission has 64 rows and is judged by the validator's own code, once by the tolerances alone and once with the noise that
the same run measures first (or --noise FILE). `published` counts those that the published rule (38 mismatches, mean 10, median 8 in
any segment) would refuse. An old policy is the leased one with each weight moved by ± the rate, once a version.
"""

import argparse
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shoal import toploc
from shoal.cli.answering import model_folder
from shoal.cli.intervals import wilson
from shoal.model.load import DTYPES, load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.rollout.conduct import Conduct
from shoal.rollout.engine import Engine
from shoal.rollout.lies import LIES, OtherWeights, make_conduct
from shoal.rollout.submission import generate, make_requests, make_table
from shoal.rollout.torch_engine import TorchEngine
from shoal.swarm.validator import checks
from shoal.swarm.validator.judge import open_submission
from shoal.swarm.validator.reader import Reader
from shoal.swarm.validator.recompute import Policy, recompute
from shoal.tasks import make_task
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.draw import problem_seeds
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.messages import Claim
from shoal.wire.noise import Noise
from shoal.wire.rollouts import encode
from shoal.wire.run import ProofSpec, RunSpec, Sampling, TaskSpec, default_tolerances

NODE = "ab" * 32
SAMPLES = 4
NEED_A_PAST = ("stale-weights", "replay")
"""Lies about earlier work; the rows of old policies stand for the first, and a replayed file has a known digest."""


def older(weight: Tensor, *, rate: float, versions: int) -> Tensor:
    generator = torch.Generator().manual_seed(weight.numel())
    steps = sum(torch.randn(weight.shape, generator=generator).sign() for _ in range(versions))
    return weight + rate * steps


@dataclass
class Tally:
    """What became of the submissions of one kind."""

    codes: Counter[str] = field(default_factory=Counter)
    plain: int = 0
    """Refused by the tolerances alone."""
    published: int = 0
    scores: list[float] = field(default_factory=list)
    """Largest z over its bound for certainty: above 1 convicts."""


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path, reader: Reader) -> None:
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
        self.policy = Policy(0, decoder, load_tokenizer(folder))
        self.number = 0

    def engine(self, conduct: Conduct, *, dtype: str | None = None) -> Engine:
        engine = conduct.engine(
            TorchEngine(
                compute_dtype=dtype or self.options.dtype,
                proof=ProofSpec(),
                max_rows=self.options.rows,
                device=self.options.device,
            )
        )
        engine.load(self.folder, 0)
        return engine

    def lease(self) -> Lease:
        """A new one each time: other prompts, other draws."""
        self.number += 1
        seed = hashlib.sha256(f"detect/{self.options.seed}/{self.number}".encode()).hexdigest()
        task = make_task(self.spec.task)
        num_prompts = self.options.rows // SAMPLES
        seeds = problem_seeds(seed, run="detect", purpose="train", chunk=0, num_prompts=num_prompts)
        return Lease(
            lease_id=f"{self.number:032x}",
            run="detect",
            node=NODE,
            purpose="train",
            epoch=1,
            seed=seed,
            chunk=0,
            policies=(PolicyRef(version=0, weights_digest="0" * 64),),
            relays=(),
            task=self.spec.task,
            prompts=tuple(task.problem("train", s).prompt for s in seeds),
            sampling=self.spec.sampling,
            proof=self.spec.proof,
            max_bytes=1 << 26,
            issued_at_s=0.0,
            deadline_s=1e12,
        )

    def work(self, conduct: Conduct, engine: Engine, lease: Lease) -> bytes:
        requests = conduct.requests(make_requests(lease, engine.tokenizer), lease)
        finished = generate(engine, requests, lambda done, rows: None)
        return conduct.data(encode(conduct.table(make_table(lease, 0, finished), lease)))

    def segments(self, num_rows: int) -> list[Sequence[toploc.SegmentCheck]]:
        """Honest checks to calibrate by."""
        conduct = Conduct()
        engine = self.engine(conduct)
        rows: list[Sequence[toploc.SegmentCheck]] = []
        while len(rows) < num_rows:
            lease = self.lease()
            table = self._open(self.work(conduct, engine, lease), lease)
            rows += [fact.segments for fact in recompute(table.rows, lease, self.policy, control_seed=1)]
        return rows

    def tally(self, conduct: Conduct, engine: Engine, noise: Noise, count: int) -> Tally:
        tally = Tally()
        for _ in range(count):
            lease = self.lease()
            self._judge(self.work(conduct, engine, lease), lease, noise, tally)
        return tally

    def _open(self, data: bytes, lease: Lease):  # type: ignore[no-untyped-def]
        claim = Claim(
            lease=lease,
            policy_version=0,
            sha256=hashlib.sha256(data).hexdigest(),
            num_bytes=len(data),
            received_at_s=0.0,
            deadline_s=1e12,
            copy_of=None,
        )
        return open_submission(data, claim, self.policy, reader=self.reader)

    def _judge(self, data: bytes, lease: Lease, noise: Noise, tally: Tally) -> None:
        try:
            table = self._open(data, lease)
            facts = recompute(table.rows, lease, self.policy, control_seed=lease.epoch)
        except Rejected as rejected:
            tally.codes[rejected.code] += 1
            tally.plain += 1
            return
        segments = [segment for fact in facts for segment in fact.segments]
        tally.published += any(
            s.exponent_mismatches > 38 or s.mantissa_mean > 10 or s.mantissa_median > 8 for s in segments
        )
        scores = toploc.noise_scores([fact.segments for fact in facts], noise)
        tally.scores.append(max((score.z / score.certain for score in scores), default=0.0))
        tally.plain += self._refused(table.rows, facts, None) is not None
        tally.codes[self._refused(table.rows, facts, noise) or ACCEPTED] += 1

    def _refused(self, rows, facts, noise: Noise | None) -> str | None:  # type: ignore[no-untyped-def]
        try:
            checks.check_facts(rows, facts, self.spec.tolerances, noise)
        except Rejected as rejected:
            return rejected.code
        return None


def kinds(bench: Bench) -> Iterator[tuple[str, Callable[[], Conduct], str | None]]:
    """Name, conduct, and the dtype to compute in if it is another."""
    for lie in LIES:
        if lie not in NEED_A_PAST:
            yield lie, partial(make_conduct, lie, "http://127.0.0.1:1"), None
    other = "bfloat16" if bench.options.dtype == "float32" else "float32"
    yield f"computes in {other}", Conduct, other
    for rate in (1e-6, 1e-5):
        for versions in (1, 2, 8):
            alter = partial(older, rate=rate, versions=versions)
            yield f"stale by {versions} at {rate:g}", partial(OtherWeights, alter), None


def line(name: str, tally: Tally) -> str:
    count = tally.codes.total()
    refused = sum(number for code, number in tally.codes.items() if code.startswith("reject."))
    low, high = wilson(refused / count, count)
    codes = ", ".join(f"{code} {number}" for code, number in tally.codes.most_common())
    return f"{name:<22} {refused:>4} of {count:<4} {low:>6.1%} to {high:>6.1%} {tally.plain:>6} {tally.published:>9}   {codes}"


def plot(tallies: dict[str, Tally], path: Path) -> None:
    """Share of submissions past a bound, against the bound, in units of the one for certainty."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    bounds = [10 ** (power / 40) for power in range(-80, 121)]
    for name, tally in tallies.items():
        if tally.scores:
            shares = [sum(score > bound for score in tally.scores) / len(tally.scores) for bound in bounds]
            axes.plot(bounds, shares, label=name, linewidth=3 if name == "honest" else 1)
    axes.axvline(1, color="black", linestyle=":")
    axes.set(xscale="log", xlabel="score, 1 convicts", ylabel="share of submissions above it")
    axes.legend(fontsize=6, ncols=2)
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="sort")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--submissions", type=int, default=10, help="of each lie")
    parser.add_argument("--honest", type=int, default=100, help="honest submissions")
    parser.add_argument("--calibrate-rows", type=int, default=1024)
    parser.add_argument("--noise", type=Path, help="a file of `shoal toploc calibrate` instead")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    started_s = time.monotonic()
    with model_folder(options.model) as folder, Reader() as reader:
        bench = Bench(options, folder, reader)
        if options.noise:
            noise = Noise.parse(options.noise.read_bytes())
        else:
            rows = bench.segments(options.calibrate_rows)
            noise = toploc.measure_noise({"here": rows}, model=options.model, compute_dtype=options.dtype)
        print(f"{options.model}, {options.dtype}, {options.device}; noise of {', '.join(noise.measured)}")
        print(f"{'':<22} {'refused':>12} {'95 % interval':>16} {'plain':>6} {'published':>9}   verdicts")
        honest = Conduct()
        tallies = {"honest": bench.tally(honest, bench.engine(honest), noise, options.honest)}
        print(line("honest", tallies["honest"]), flush=True)
        for name, make, dtype in kinds(bench):
            conduct = make()
            engine = bench.engine(conduct, dtype=dtype)
            tallies[name] = bench.tally(conduct, engine, noise, options.submissions)
            print(line(name, tallies[name]), flush=True)
        if options.plot:
            plot(tallies, options.plot)
    print(f"{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
