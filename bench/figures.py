"""Draws the pictures of docs/reproduction.md again from bench/results: `make figures`. Needs matplotlib, no GPU.

diloco-workers-1m.json    validation loss by step of every run and seed       -> docs/img/diloco-workers.png
diloco-ablations.json, diloco-codecs.json, diloco-streaming.json    last losses -> docs/img/diloco-ablations.png
diloco-wan.json           utilisation by latency and loss                     -> docs/img/diloco-wan.png
NAME/                     publish.py: what one run leaves; its figures are printed -> docs/img/learn-NAME.png
staleness-tiny.json       staleness.py: reward by step, behaviour and lag       -> docs/img/async-levels.png
filter-tiny.json          learn.py: with and without the offline filter         -> docs/img/offline-filter.png
stability-tiny.json       stability.py: rates, recipes, collapses and warnings  -> docs/img/stability.png
stability-long-tiny.json  the same over 1,200 steps                             -> docs/img/stability-long.png
compile-tiny.json         learn.py: compiled and eager                          -> docs/img/compile.png
budgets-tiny.json         learn.py: error by target length                      -> docs/img/budgets.png

Lines are means of the seeds, pale areas reach from the lowest to the highest seed.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from curves import difference
from publish import LEDGER, METRICS, held_out, interval, read_lines, show

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
RECIPES_AT = 1e-3
"""The learning rate at which stability.py tried the recipes."""
LONG_WINDOW = 40
"""Steps whose mean reward tells a collapse in runs of 1,200 steps."""

PANELS: dict[str, tuple[str, str, dict[str, str]]] = {
    "outer optimizer, against Nesterov": (
        "ablations",
        "20:fp32",
        {"20:fp32~heavy": "heavy ball", "20:fp32~average": "averaging", "20:fp32~adam": "Adam"},
    ),
    "codec, against fp32": (
        "codecs",
        "2x10:fp32",
        {"2x10:fp16-scaled": "fp16, scaled", "2x10:int8": "int8", "2x10:int4": "int4"},
    ),
    "streaming (fragments, delay, own share), against one fragment": (
        "streaming",
        "20:fp32",
        {
            "20:fp32:2:0": "2, 0",
            "20:fp32:4:0": "4, 0",
            "20:fp32:1:5": "1, 5, 0.5",
            "20:fp32:4:5": "4, 5, 0.5",
            "20:fp32:4:5:0": "4, 5, 0",
        },
    ),
    "data, missed rounds, pool, against 4 workers": (
        "ablations",
        "20:fp32",
        {
            "20:fp32!uneven": "one domain each",
            "20:fp32!drop0.1": "10 % missed",
            "20:fp32!drop0.3": "30 % missed",
            "20:fp32!drop0.5": "50 % missed",
            "8x20:fp32!to4": "8 workers, then 4",
            "8x20:fp32!from4": "4 workers, then 8",
            "8x20:fp32": "8 workers",
        },
    ),
}
"""For each panel: the file of results, the run that the others are compared with, and the others."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the pictures")
    options = parser.parse_args()
    draw_workers(RESULTS / "diloco-workers-1m.json", options.out / "diloco-workers.png")
    draw_ablations(options.out / "diloco-ablations.png")
    draw_wan(RESULTS / "diloco-wan.json", options.out / "diloco-wan.png")
    for folder in sorted(path.parent for path in RESULTS.glob(f"*/{LEDGER}")):
        draw_run(folder, options.out / f"learn-{folder.name}.png")
        show(folder)
    draw_async(RESULTS / "staleness-tiny.json", options.out / "async-levels.png")
    draw_filter(RESULTS / "filter-tiny.json", options.out / "offline-filter.png")
    draw_stability(RESULTS / "stability-tiny.json", options.out / "stability.png")
    draw_late_collapses(RESULTS / "stability-long-tiny.json", options.out / "stability-long.png")
    draw_compiled(RESULTS / "compile-tiny.json", options.out / "compile.png")
    draw_budgets(RESULTS / "budgets-tiny.json", options.out / "budgets.png")


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
        for axes, xs in (
            (by_step, steps),
            (by_text, [step * workers * BYTES_PER_WORKER / 1e6 for step in steps]),
        ):
            draw_seeds(axes, xs, seeds, label)
    by_step.set_xlabel("steps of each worker")
    by_text.set_xlabel("MB of text read by all workers")
    by_step.set_ylabel("validation loss, nats per byte")
    by_step.legend(fontsize=8)
    for axes in (by_step, by_text):
        axes.grid(alpha=0.3)
    save(figure, path)


def draw_ablations(path: Path) -> None:
    """Draws differences in loss: a dot for each seed, a bar for the 95 % interval of the mean of three seeds or more."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 6.4), dpi=110)
    for axes, (title, (file, against, runs)) in zip(panels.flat, PANELS.items(), strict=True):
        records = json.loads((RESULTS / f"diloco-{file}.json").read_text())
        for at, run in enumerate(runs):
            percent_S = (found := difference(records, run, against)).percent_S
            axes.plot(percent_S, [at] * len(percent_S), "o", color="C0", alpha=0.6)
            half = found.half if len(percent_S) > 2 else 0.0
            axes.errorbar(percent_S.mean(), at, xerr=half, fmt="|", color="black", capsize=4)
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set_yticks(range(len(runs)), runs.values())
        axes.invert_yaxis()
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("validation loss, %")
        axes.grid(alpha=0.3, axis="x")
    save(figure, path)


def draw_wan(results: Path, path: Path) -> None:
    """Draws utilisation by latency, a line for each share of lost pieces, a dot for each seed."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 3.8), dpi=110)
    lines: dict[tuple[float, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in json.loads(results.read_text()):
        lines[one["loss"], one["overlap"]][one["latency_ms"]].append(100 * one["utilisation"])
    for (loss, overlap), by_latency in sorted(lines.items(), key=lambda item: (item[0][1], item[0][0])):
        xs = sorted(by_latency)
        label = f"{100 * loss:g} % of pieces lost" + (", overlapped" if overlap else "")
        (line,) = axes.plot(xs, [sum(by_latency[x]) / len(by_latency[x]) for x in xs], label=label)
        for x in xs:
            axes.plot(
                [x] * len(by_latency[x]), by_latency[x], "s" if overlap else "o", color=line.get_color()
            )
    axes.set_xlabel("latency, ms one way")
    axes.set_ylabel("share of the time in inner steps, %")
    axes.set_ylim(80, 100)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def draw_run(folder: Path, path: Path) -> None:
    """Draws training and held-out reward of one run by version, with 95 % intervals over the held-out problems."""
    figure, axes = load_pyplot().subplots(figsize=(7, 3.8), dpi=110)
    steps = [one for one in read_lines(folder / METRICS) if one.get("accepted_reward_mean") is not None]
    rewards = smooth([one["accepted_reward_mean"] for one in steps], width=5)
    label = "accepted rollouts, mean of 5 steps"
    axes.plot([one["version"] for one in steps], rewards, color="0.6", linewidth=1, label=label)
    for task, by_version in held_out(read_lines(folder / LEDGER)).items():
        shares = [interval(scores_P) for scores_P in by_version.values()]
        half = [[one.mean - one.low for one in shares], [one.high - one.mean for one in shares]]
        axes.errorbar(
            list(by_version),
            [one.mean for one in shares],
            yerr=half,
            fmt="o-",
            capsize=3,
            label=f"{task}, held out",
        )
    finish(axes, "policy version", "mean reward, one seed")
    save(figure, path)


def draw_seeds(axes: Any, xs: Sequence[float], seeds: Sequence[Sequence[float]], label: str) -> None:
    """Draws the mean of the seeds and the area between the lowest and the highest."""
    columns = list(zip(*seeds, strict=True))
    (line,) = axes.plot(xs, [fmean(values) for values in columns], label=f"{label} ({len(seeds)} seeds)")
    axes.fill_between(
        xs, *([kind(values) for values in columns] for kind in (min, max)), color=line.get_color(), alpha=0.2
    )


def smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """Returns the mean of the last `width` values at every step."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def grouped(results: Path, name: str) -> dict[Any, list[dict[str, Any]]]:
    """Returns the records of a file by the value of one field."""
    found: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for record in json.loads(results.read_text()):
        found[record[name]].append(record)
    return found


def points_of(records: list[dict[str, Any]], field: str) -> tuple[list[int], list[list[Any]]]:
    """Returns the steps of learn.py's records and one field of their points by seed."""
    steps = [point["step"] for point in records[0]["points"]]
    return steps, [[point[field] for point in record["points"]] for record in records]


def draw_async(results: Path, path: Path) -> None:
    """Draws reward by step for every lag, for each kind of behaviour log-probs."""
    found = grouped(results, "behaviour")
    size = (1.5 + 5.5 * len(found), 4)
    figure, all_axes = load_pyplot().subplots(
        1, len(found), figsize=size, dpi=110, sharey=True, squeeze=False
    )
    for axes, (behaviour, records) in zip(all_axes[0], found.items(), strict=True):
        for lag in sorted({record["lag"] for record in records}):
            seeds = [smooth(record["rewards"]) for record in records if record["lag"] == lag]
            draw_seeds(axes, range(1, len(seeds[0]) + 1), seeds, f"lag {lag}")
        finish(axes, "policy version", "reward, mean of 10 steps", title=f"log-probs: {behaviour}")
    save(figure, path)


def draw_filter(results: Path, path: Path) -> None:
    """Draws held-out reward of all problems, and of the sizes that are neither easy nor impossible for the start model."""
    figure, (whole, middle) = load_pyplot().subplots(1, 2, figsize=(11, 4), dpi=110)
    for name, records in grouped(results, "run").items():
        steps, rewards = points_of(records, "reward")
        draw_seeds(whole, steps, rewards, name)
        steps, by_size = points_of(records, "right_by_task")
        draw_seeds(middle, steps, [[fmean(sizes[2:4]) for sizes in seed] for seed in by_size], name)
    finish(whole, "step of 128 rollouts", "held-out reward", title="2, 3, 4, 6, 9 and 12 digits")
    finish(middle, "step of 128 rollouts", "held-out reward", title="4 and 6 digits")
    save(figure, path)


def draw_stability(results: Path, path: Path) -> None:
    """Draws reward by learning rate, and what happened to the reward with each change of the recipe at one rate."""
    figure, ((rates, recipes), (norms, entropy)) = load_pyplot().subplots(2, 2, figsize=(11, 7.5), dpi=110)
    plain = grouped(results, "variant")["plain"]
    for rate in sorted({record["rate"] for record in plain}):
        same = [record for record in plain if record["rate"] == rate]
        for axes, field in ((rates, "rewards"), (norms, "grad_norm"), (entropy, "entropy")):
            draw_seeds(
                axes,
                range(1, len(same[0][field]) + 1),
                [smooth(one[field]) for one in same],
                f"rate {rate:g}",
            )
    changed = [record for record in json.loads(results.read_text()) if record["rate"] == RECIPES_AT]
    for variant in dict.fromkeys(record["variant"] for record in changed):
        seeds = [smooth(record["rewards"]) for record in changed if record["variant"] == variant]
        recipes.plot(
            [fmean(values) for values in zip(*seeds, strict=True)], label=f"{variant} ({len(seeds)} seeds)"
        )
    finish(rates, "policy version", "reward, mean of 10 steps", title="plain recipe, by learning rate")
    finish(
        recipes,
        "policy version",
        "reward, mean of 10 steps",
        title=f"rate {RECIPES_AT:g}, by recipe",
        columns=2,
    )
    finish(norms, "policy version", "gradient norm before clipping")
    finish(entropy, "policy version", "entropy in nats")
    norms.set_yscale("log")
    save(figure, path)


def draw_late_collapses(results: Path, path: Path) -> None:
    """Draws the reward of every long run: the plain recipe by learning rate, and one panel for each change of the recipe."""
    by_recipe: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in json.loads(results.read_text()):
        by_recipe[f"{record['variant']}, rate {record['rate']:g}"].append(record)
    rows = -(-len(by_recipe) // 2)
    figure, panels = load_pyplot().subplots(rows, 2, figsize=(11, 2.3 * rows), dpi=110, sharey=True)
    for axes, (recipe, records) in zip(panels.flat, by_recipe.items(), strict=False):
        for record in records:
            rewards = smooth(record["rewards"], LONG_WINDOW)
            axes.plot(range(1, len(rewards) + 1), rewards, linewidth=0.9, label=f"seed {record['seed']}")
            if record["collapsed"] is not None:
                axes.axvline(record["collapsed"], color="0.4", linestyle=":", linewidth=0.9)
        finish(axes, "policy version", f"reward, mean of {LONG_WINDOW} steps", title=recipe)
    for axes in panels.flat[len(by_recipe) :]:
        axes.set_visible(False)
    save(figure, path)


def draw_compiled(results: Path, path: Path) -> None:
    """Draws held-out reward of compiled and eager training."""
    figure, axes = load_pyplot().subplots(figsize=(7, 3.8), dpi=110)
    for name, records in grouped(results, "run").items():
        draw_seeds(axes, *points_of(records, "reward"), name)
    finish(axes, "step of 8 rollouts", "held-out reward")
    save(figure, path)


def draw_budgets(results: Path, path: Path) -> None:
    """Draws how far answers are from their target length, by target."""
    figure, axes = load_pyplot().subplots(figsize=(7, 3.8), dpi=110)
    records = json.loads(results.read_text())
    steps, errors = points_of(records, "off_by_target")
    for target in errors[0][0]:
        draw_seeds(axes, steps, [[point[target] for point in seed] for seed in errors], f"target {target}")
    finish(axes, "policy version", "tokens off the target, held out")
    save(figure, path)


def finish(axes: Any, x: str, y: str, title: str = "", columns: int = 1) -> None:
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=columns)


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
