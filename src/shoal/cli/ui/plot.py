"""Plots as PNG files: the rewards of a run, and the losses of a DiLoCo site. Both need matplotlib."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from shoal.cli.ui.values import completed_by_task
from shoal.files import write_bytes_atomically
from shoal.wire.messages import History

HELD_OUT_COLOURS = ("#1f4e79", "#b5651d", "#2e7d4f", "#7b4397", "#a83232")


def plot_rewards(history: History, path: Path, title: str) -> bool:
    """Writes training and held-out reward by version; returns False if matplotlib is not installed."""
    if (drawing := _new_figure()) is None:
        return False
    figure, axes = drawing
    axes.plot(
        [step.version for step in history.steps],
        [step.reward_mean for step in history.steps],
        color="#9bb7d4",
        label="training batches",
    )
    done = completed_by_task(history.evaluations) or {"": []}
    for place, (task, own) in enumerate(done.items()):
        axes.plot(
            [evaluation.version for evaluation in own],
            [evaluation.reward_mean for evaluation in own],
            "o-",
            color=HELD_OUT_COLOURS[place % len(HELD_OUT_COLOURS)],
            label=f"held-out prompts: {task}" if len(done) > 1 else "held-out prompts",
        )
    axes.set_xlabel("policy version")
    axes.set_ylabel("mean reward")
    rewards = [step.reward_mean for step in history.steps]
    rewards += [evaluation.reward_mean for own in done.values() for evaluation in own]
    axes.set_ylim(min(0.0, *rewards, 0.0), 1.02 * max(1.0, *rewards, 1.0))
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    _save(figure, path)
    return True


def read_events(metrics: Path) -> list[dict[str, Any]]:
    """Returns the events of a site's metrics.jsonl, without a line that a kill cut off."""
    events = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line))
    return events


def plot_losses(metrics: Path, path: Path, title: str) -> bool:
    """Writes training and validation loss by inner step; returns False without data or without matplotlib."""
    # A step that was repeated after a kill counts with its last loss.
    steps: dict[int, float] = {}
    rounds: dict[int, float] = {}
    for event in read_events(metrics):
        if event["event"] == "step":
            steps[event["step"]] = event["loss"]
        elif event["event"] == "round" and event["validation"] is not None:
            rounds[event["step"]] = event["validation"]
    if not (steps or rounds) or (drawing := _new_figure()) is None:
        return False
    figure, axes = drawing
    for points, look in (
        (steps, {"color": "#9bb7d4", "label": "training"}),
        (rounds, {"color": "#1f4e79", "label": "validation", "marker": "o", "markersize": 3}),
    ):
        if points:
            axes.plot(*zip(*sorted(points.items()), strict=True), **look)
    axes.set_xlabel("inner step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.legend()
    _save(figure, path)
    return True


def _new_figure() -> tuple[Any, Any] | None:
    """Returns a figure and its axes; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(8, 4.5), dpi=120)


def _save(figure: Any, path: Path) -> None:
    """Writes a figure as PNG. A full disk leaves the earlier picture as it was."""
    from matplotlib import pyplot

    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture)
    pyplot.close(figure)
    write_bytes_atomically(path, picture.getvalue(), durable=False)
