"""Publishes what a run leaves: its ledger, metrics, run file and report, compressed, and what they say.

    python bench/publish.py out/demo --name demo          writes bench/results/demo and prints its figures; then: make figures
    python bench/publish.py out/gsm8k --out FOLDER        writes to FOLDER, on a machine from which few files can be fetched
    python bench/publish.py bench/results/demo            prints the figures again, and those of eval.jsonl if it is there: lines of
                                                          `shoal eval --json`

Held-out rewards have 95 % intervals over the problems: Wilson's for one answer to each that is right or wrong, else a normal one of the
means. An evaluation asks the same problems at every version, so gains are differences by problem. Tokens are output tokens of accepted
work; those of a lease are divided equally among its groups. FLOPs are forward passes of one token.
"""

import argparse
import gzip
import itertools
import json
import re
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.cli.commands.watch import write_report
from shoal.cli.run_folder import RunFolder
from shoal.cli.ui.values import Z_95, wilson
from shoal.trainer.config import TrainerConfig
from shoal.wire.ledger import LedgerEvent, TokenCounts, verify_chain

RESULTS = Path(__file__).parent / "results"
LEDGER, METRICS, EVALUATED = "ledger.jsonl.gz", "metrics.jsonl.gz", "eval.jsonl"
PATHS = re.compile(rb"[\"'](/(?:home|root|tmp|work|mnt)/[^\"'\\\\]*)")
Scores = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a run, or one that this command has written")
    parser.add_argument("--name", help="folder in bench/results")
    parser.add_argument("--out", type=Path, help="another folder to write to")
    parser.add_argument(
        "--model", help="name of the model for the run file, in the place of a path of this machine"
    )
    options = parser.parse_args()
    folder = options.folder
    if not (folder / LEDGER).exists():
        if options.out is None and options.name is None:
            parser.error(f"{folder} is a run's folder: give --name or --out")
        folder = options.out or RESULTS / options.name
        publish(options.folder, folder, options.model)
    show(folder)


def publish(run: Path, out: Path, model: str | None) -> None:
    """Writes what is published of a run."""
    out.mkdir(parents=True, exist_ok=True)
    with RunFolder(run) as open_run:
        ledger = "".join(f"{event.model_dump_json()}\n" for event in open_run.events())
    compress(ledger.encode(), out / LEDGER)
    compress((run / "trainer" / "metrics.jsonl").read_bytes(), out / METRICS)
    with tempfile.TemporaryDirectory() as scratch:
        if report := write_report(run, Path(scratch) / "report.html"):
            compress(report.read_bytes(), out / "report.html.gz")
    text = (run / "run.toml").read_text(encoding="utf-8")
    if model is not None:
        lines = [
            f"model = {json.dumps(model)}" if line.startswith("model = ") else line
            for line in text.splitlines()
        ]
        text = "\n".join(lines) + "\n"
    (out / "run.toml").write_text(text, encoding="utf-8")


def compress(content: bytes, path: Path) -> None:
    """Writes a file that depends on its content alone."""
    path.write_bytes(gzip.compress(content, mtime=0))
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, of {len(content) / 1e3:.0f}")
    for place in sorted(set(PATHS.findall(content))):
        print(f"  names a place of this machine: {place.decode()}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a compressed file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


# -- figures ----------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval(scores_P: Scores) -> Share:
    """Returns the mean of independent scores with its interval."""
    mean = float(scores_P.mean())
    if set(np.unique(scores_P)) <= {0.0, 1.0}:
        return Share(mean, *wilson(mean, len(scores_P)))
    half = Z_95 * float(scores_P.std(ddof=1)) / len(scores_P) ** 0.5
    return Share(mean, mean - half, mean + half)


class Lease(NamedTuple):
    """An accepted lease: its terms and its verdict."""

    issued: dict[str, Any]
    verdict: dict[str, Any]

    @property
    def scores_PS(self) -> Scores:
        """Returns the rewards by problem and sample."""
        rewards = np.asarray(self.verdict["rewards"], np.float64)
        return rewards.reshape(-1, self.issued["samples_per_prompt"])


def accepted_leases(events: list[dict[str, Any]]) -> dict[str, Lease]:
    """Returns the accepted leases in the order of their verdicts."""
    issued = {one["body"]["lease_id"]: one["body"] for one in events if one["type"] == "lease.issued"}
    return {
        one["body"]["lease_id"]: Lease(issued[one["body"]["lease_id"]], one["body"])
        for one in events
        if one["type"] == "verdict.given" and one["body"]["code"] == "accepted"
    }


def held_out(events: list[dict[str, Any]]) -> dict[str, dict[int, Scores]]:
    """Returns the score of every held-out problem by evaluation and version. A problem's score is the mean of its samples."""
    chunks: dict[tuple[str, int], dict[int, Scores]] = defaultdict(dict)
    for lease in accepted_leases(events).values():
        if lease.issued["purpose"] == "eval":
            # A chunk may be leased twice; the first accepted submission counts.
            found = chunks[lease.issued["task"], lease.issued["versions"][0]]
            found.setdefault(lease.issued["chunk"], lease.scores_PS.mean(1))
    complete = [one["body"] for one in events if one["type"] == "evaluation.completed"]
    scores: dict[str, dict[int, Scores]] = defaultdict(dict)
    for task, version in sorted((one["task"], one["version"]) for one in complete):
        found = chunks[task, version]
        scores[task][version] = np.concatenate([found[chunk] for chunk in sorted(found)])
    return dict(scores)


def count_tokens(events: list[dict[str, Any]]) -> TokenCounts:
    """Returns the output tokens of accepted work by what became of them."""
    counts: dict[str, float] = defaultdict(float)
    shares: dict[str, float] = {}
    for lease_id, lease in accepted_leases(events).items():
        tokens = lease.verdict["output_tokens"]
        counts["generated"] += tokens
        counts["checked"] += tokens if lease.verdict["checks"] == "full" else 0
        if lease.issued["purpose"] != "train":
            counts["held_out"] += tokens
            continue
        scores_PS = lease.scores_PS
        for at, alike in enumerate(scores_PS.max(1) == scores_PS.min(1)):
            shares[f"{lease_id}-{at}"] = tokens / len(scores_PS)
            counts["dropped"] += tokens / len(scores_PS) if alike else 0
    trained = sum(
        shares[group] for one in events if one["type"] == "batch.formed" for group in one["body"]["group_ids"]
    )
    unused = sum(shares.values()) - trained - counts["dropped"]
    return TokenCounts(
        **{name: round(counts[name]) for name in ("generated", "held_out", "checked", "dropped")},
        trained=round(trained),
        unused=round(unused),
    )


def passes_of(events: list[dict[str, Any]]) -> int:
    """Returns the forward passes that training on a token costs, from the run's terms."""
    settings = next(one["body"]["settings"]["trainer"] for one in events if one["type"] == "run.opened")
    return TrainerConfig.parse(json.dumps(settings)).passes_per_token


def show(folder: Path) -> None:
    """Prints what a published run says."""
    events, metrics = read_lines(folder / LEDGER), read_lines(folder / METRICS)
    count, _ = verify_chain(LedgerEvent.model_validate(one) for one in events)
    print(f"\n{folder.name}: the hashes of {count} ledger events are right")
    show_steps(metrics)
    for task, by_version in held_out(events).items():
        show_curve(task, by_version)
    if (folder / EVALUATED).exists():
        show_evaluated((folder / EVALUATED).read_text(encoding="utf-8"))
    show_work(events)


def show_steps(metrics: list[dict[str, Any]]) -> None:
    steps = [one for one in metrics if one["event"] == "step"]
    if len(steps) < 2:
        return
    gaps_s = [after["time_s"] - before["time_s"] for before, after in itertools.pairwise(steps)]
    print(
        f"{len(steps)} steps in {steps[-1]['time_s'] - steps[0]['time_s']:.0f} s, median {median(gaps_s):.2f} s, of it training "
        f"{median(one['train_s'] for one in steps):.2f} and waiting {median(one['wait_s'] for one in steps):.2f}; "
        f"{fmean(one['rollouts'] for one in steps):.0f} rollouts and {fmean(one['tokens'] for one in steps):,.0f} tokens a step"
    )


def show_curve(task: str, by_version: dict[int, Scores]) -> None:
    versions = sorted(by_version)
    first_P, last_P = (by_version[version] for version in (versions[0], versions[-1]))
    print(f"\n{task}, held out: mean and 95 % interval over {len(first_P)} problems")
    for version in versions:
        print(f"  version {version:>4}  {interval(by_version[version])}")
    if len(versions) > 1:
        print(f"  gain           {gain(first_P, last_P)}")


def gain(before_P: Scores, after_P: Scores) -> Share:
    """Returns the mean difference of the same problems at two versions with its interval."""
    change_P = after_P - before_P
    half = Z_95 * float(change_P.std(ddof=1)) / len(change_P) ** 0.5
    mean = float(change_P.mean())
    return Share(mean, mean - half, mean + half)


def show_evaluated(lines: str) -> None:
    """Prints what `shoal eval` found."""
    print()
    for one in map(json.loads, lines.splitlines()):
        share = Share(one["pass_at_1"], *one["pass_at_1_interval"])
        print(
            f"{one['task']['name']}, version {one['version']}, {one['prompts']} problems, temperature {one['temperature']:g}: "
            f"pass@1 {share}, {one['tokens_mean']:.0f} tokens an answer"
        )


def show_work(events: list[dict[str, Any]]) -> None:
    tokens, passes = count_tokens(events), passes_of(events)
    codes = Counter(one["body"]["code"].partition(".")[0] for one in events if one["type"] == "verdict.given")
    codes.update("void" for one in events if one["type"] == "lease.void")
    print(f"\nsubmissions: {', '.join(f'{num} {code}' for code, num in codes.most_common())}")
    print("output tokens of accepted work")
    rows = tokens.model_dump() | {"recomputed": (passes - 3) * tokens.trained}
    for name, number in rows.items():
        share = f"{number / tokens.generated:>8.1%}" if tokens.generated else ""
        print(f"  {name.replace('_', ' '):<12}{number:>14,}{share}")
    if tokens.trained:
        inference, training = tokens.generated + tokens.checked, passes * tokens.trained
        print(
            f"  FLOPs of training : inference = 1 : {inference / training:.2f}, {passes} forward passes for a trained token"
        )


if __name__ == "__main__":
    main()
