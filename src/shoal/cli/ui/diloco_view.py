"""What `shoal diloco` shows: the peers of a run, a site's live view, its loss curve as a picture."""

import contextlib
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from shoal.diloco.averaging.peer_messages import Card
from shoal.wire.codes import Rejected

if TYPE_CHECKING:
    from shoal.diloco.site.diloco_file import DilocoFile
    from shoal.diloco.site.site import SiteProgress


def describe_peers(cards: dict[str, bytes]) -> list[str]:
    """One line per peer of a directory."""
    lines = []
    for peer, payload in sorted(cards.items()):
        try:
            card = Card.parse(payload)
        except Rejected:
            continue
        held = card.standing
        where = "no state yet" if held is None else f"round {held.round}, state {held.state_digest[:8]}"
        lines.append(f"{peer[-10:]}  {where}{'' if card.reachable else ', outbound only'}")
    return lines


class LiveView:
    """The view on a terminal, four times a second, by a thread of its own: a round may take minutes. On anything else the log
    is enough."""

    def __init__(self, console: Console, show: Callable[[], RenderableType]) -> None:
        self._live = Live(console=console, get_renderable=show) if console.is_terminal else None

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()

    def __exit__(self, *what: object) -> None:
        if self._live is not None:
            self._live.stop()


def show_site(file: "DilocoFile", progress: "SiteProgress", averager: Any) -> Group:
    """What a site's owner sees: where it stands, how the rounds go, who else is there."""
    own = Table(title=f"{file.run.name} at this site", show_header=False)
    report = progress.last_round
    rows = {
        "step": f"{progress.steps} of {progress.last_step}",
        "loss": "" if math.isnan(progress.loss) else f"{progress.loss:.4f}",
        "validation loss": "" if math.isnan(progress.validation) else f"{progress.validation:.4f}",
        "utilisation": "" if math.isnan(progress.utilisation) else f"{100 * progress.utilisation:.1f} %",
        "sent": f"{progress.sent_bytes / 1e6:.1f} MB",
    }
    if report is not None:
        result = report.result
        speed = 8e-6 * result.num_bytes / result.took_s if result.took_s else 0.0
        rows["last round"] = (
            f"{report.round}: {result.outcome.name.lower()}, {len(result.members)} peers, "
            f"{result.took_s:.2f} s, {speed:.0f} Mbit/s, waited {report.waited_s:.2f} s"
        )
    for name, value in rows.items():
        own.add_row(name, value)
    others = Table("peer", "round", "steps since", "state", title="other peers")
    for peer, card in sorted(getattr(averager, "peers", dict)().items()):
        held = card.standing
        others.add_row(
            peer[-10:],
            "" if held is None else str(held.round),
            "in a round" if card.in_round else str(card.phase),
            "" if held is None else held.state_digest[:8],
        )
    return Group(own, others)


def events_of(metrics: Path) -> list[dict[str, Any]]:
    """What a site wrote, without lines that a kill cut off."""
    events = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line))
    return events


def plot_losses(metrics: Path, picture: Path, title: str) -> bool:
    """Training and validation loss against inner steps, as a PNG; False if there is nothing to plot, or to plot it with."""
    # A step that was taken again after a kill counts as it was the last time.
    steps: dict[int, float] = {}
    rounds: dict[int, float] = {}
    for event in events_of(metrics):
        if event["event"] == "step":
            steps[event["step"]] = event["loss"]
        elif event["event"] == "round" and event["validation"] is not None:
            rounds[event["step"]] = event["validation"]
    if not steps and not rounds:
        return False
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
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
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn)
    pyplot.close(figure)
    _put(drawn.getvalue(), picture)
    return True


def _put(content: bytes, path: Path) -> None:
    """Whole or not at all: a full disk leaves the picture that was there."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
