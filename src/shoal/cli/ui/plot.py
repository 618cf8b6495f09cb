"""The reward plot of a run, as a PNG."""

from pathlib import Path

from shoal.wire.messages import History


def plot_rewards(history: History, path: Path, title: str) -> bool:
    """Write the plot; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(
        [step.version for step in history.steps],
        [step.reward_mean for step in history.steps],
        color="#9bb7d4",
        label="training batches",
    )
    done = [evaluation for evaluation in history.evaluations if evaluation.complete]
    axes.plot(
        [evaluation.version for evaluation in done],
        [evaluation.reward_mean for evaluation in done],
        "o-",
        color="#1f4e79",
        label="held-out prompts",
    )
    axes.set_xlabel("policy version")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1.02)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
