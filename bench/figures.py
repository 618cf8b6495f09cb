"""Draws the pictures of docs/reproduction.md again from bench/results: `make figures`. Needs matplotlib, no GPU.

diloco-workers-1m.json    validation loss by step of every run and seed       -> docs/img/diloco-workers.png
demo/metrics.jsonl.gz     the trainer's metrics of one run of `make demo`     -> docs/img/demo-run.png
demo/ledger.jsonl.gz      its ledger: the tokens of every accepted submission -> counts that are printed
"""

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parent.parent / "docs" / "img"
BYTES_PER_WORKER = 2 * 128
"""Bytes of text that a worker reads in a step: two rows of 128."""
# The runs at the lower of two inner rates, at which every one of them ends lower.
RUNS = {
    "8xdp@0.25": ("data parallel, 8 workers", 8),
    "8x500:fp32@0.7,0.9,0.25": ("8 workers, H = 500", 8),
    "8x50:fp32@0.7,0.9,0.25": ("8 workers, H = 50", 8),
    "4x500:fp32@0.7,0.9,0.25": ("4 workers, H = 500", 4),
    "2x500:fp32@0.7,0.9,0.25": ("2 workers, H = 500", 2),
    "one@0.25": ("one worker", 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures")
    options = parser.parse_args()
    draw_workers(RESULTS / "diloco-workers-1m.json", options.out / "diloco-workers.png")
    draw_demo(RESULTS / "demo" / "metrics.jsonl.gz", options.out / "demo-run.png")
    for name, count in count_tokens(RESULTS / "demo" / "ledger.jsonl.gz").items():
        print(f"{name:<12} {count:>12,}")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a compressed file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def count_tokens(ledger: Path) -> dict[str, int]:
    """Counts output tokens of a run from its ledger. A group has the mean share of its lease's tokens."""
    events = read_lines(ledger)
    purposes = {
        one["body"]["lease_id"]: one["body"]["purpose"] for one in events if one["type"] == "lease.issued"
    }
    counts: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = {}
    for event in events:
        body = event["body"]
        if event["type"] == "verdict.given" and body["code"] == "accepted":
            tokens[body["lease_id"]] = body["output_tokens"]
            counts["generated"] += body["output_tokens"]
            counts["checked"] += body["output_tokens"] if body["checks"] == "full" else 0
            counts["held out"] += body["output_tokens"] if purposes[body["lease_id"]] != "train" else 0
    groups = {one["body"]["lease_id"]: one["body"] for one in events if one["type"] == "verdict.given"}
    samples = next(
        one["body"]["spec"]["sampling"]["samples_per_prompt"] for one in events if one["type"] == "run.opened"
    )
    for event in events:
        if event["type"] == "batch.formed":
            for group in event["body"]["group_ids"]:
                lease = group.rpartition("-")[0]
                counts["trained"] += tokens[lease] * samples / len(groups[lease]["rewards"])
    return {name: round(count) for name, count in counts.items()}


def draw_workers(results: Path, path: Path) -> None:
    """Draws validation loss against steps and against bytes of text, with the range of the seeds."""
    pyplot = load_pyplot()
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in json.loads(results.read_text()):
        found[record["run"]].append(record)
    figure, (by_step, by_text) = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=110, sharey=True)
    for run, (label, workers) in RUNS.items():
        seeds = [[loss for _, loss in one["points"]] for one in found[run]]
        steps = [step for step, _ in found[run][0]["points"]]
        mean = [sum(values) / len(values) for values in zip(*seeds, strict=True)]
        low, high = ([kind(values) for values in zip(*seeds, strict=True)] for kind in (min, max))
        for axes, xs in (
            (by_step, steps),
            (by_text, [step * workers * BYTES_PER_WORKER / 1e6 for step in steps]),
        ):
            (line,) = axes.plot(xs, mean, label=f"{label} ({len(seeds)} seeds)")
            axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.2)
    by_step.set_xlabel("steps of each worker")
    by_text.set_xlabel("MB of text read by all workers")
    by_step.set_ylabel("validation loss, nats per byte")
    by_step.legend(fontsize=8)
    for axes in (by_step, by_text):
        axes.grid(alpha=0.3)
    save(figure, path)


def draw_demo(metrics: Path, path: Path) -> None:
    """Draws training and held-out reward of one run by version."""
    pyplot = load_pyplot()
    events = read_lines(metrics)
    steps = [one for one in events if one["event"] == "step"]
    held_out = [one for one in events if one["event"] == "evaluation"]
    figure, axes = pyplot.subplots(figsize=(7, 3.8), dpi=110)
    axes.plot(
        [one["version"] for one in steps], [one["reward_mean"] for one in steps], label="training batches"
    )
    axes.plot(
        [one["version"] for one in held_out],
        [one["held_out_reward"] for one in held_out],
        "o-",
        label="held-out problems",
    )
    axes.set_xlabel("policy version")
    axes.set_ylabel("mean reward, one seed")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def load_pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    # Without the version of matplotlib in it, the file changes only if the picture does.
    figure.savefig(path, metadata={"Software": None})
    print(path)


if __name__ == "__main__":
    main()
