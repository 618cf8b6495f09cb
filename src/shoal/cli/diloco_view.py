"""What `shoal diloco` shows: the peers of a run, a site's live view, its loss curve as a picture."""

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from shoal.diloco.messages import Card
from shoal.wire.codes import Rejected

if TYPE_CHECKING:
    from shoal.diloco.config import DilocoFile
    from shoal.diloco.site import Progress


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
    """The view on a terminal, ten times a second at most; on anything else the log is enough."""

    def __init__(self, console: Console, show: Any) -> None:
        self._console, self._show, self._next_s = console, show, 0.0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Any:
        if self._live is not None:
            self._live.start()
        return self.refresh

    def __exit__(self, *what: object) -> None:
        if self._live is not None:
            self._live.stop()

    def refresh(self) -> None:
        if self._live is not None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + 0.1
            self._live.update(self._show(), refresh=True)


def show_site(file: "DilocoFile", progress: "Progress", averager: Any) -> Group:
    """What a site's owner sees: where it stands, how the rounds go, who else is there."""
    own = Table(title=f"{file.run.name} at this site", show_header=False)
    landed = progress.landed
    rows = {
        "step": f"{progress.steps} of {progress.last_step}",
        "loss": f"{progress.loss:.4f}",
        "validation loss": "" if math.isnan(progress.validation) else f"{progress.validation:.4f}",
        "utilisation": "" if math.isnan(progress.utilisation) else f"{100 * progress.utilisation:.1f} %",
        "sent": f"{progress.sent_bytes / 1e6:.1f} MB",
    }
    if landed is not None:
        result = landed.result
        speed = 8e-6 * result.num_bytes / result.took_s if result.took_s else 0.0
        rows["last round"] = (
            f"{landed.round}: {result.outcome.name.lower()}, {len(result.members)} peers, "
            f"{result.took_s:.2f} s, {speed:.0f} Mbit/s, waited {landed.waited_s:.2f} s"
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


def plot_losses(metrics: Path, picture: Path, title: str) -> bool:
    """Training and validation loss against inner steps, as a PNG; False if there is nothing to plot it with."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [(event["step"], event["loss"]) for event in events if event["event"] == "step"]
    rounds = [
        (event["step"], event["validation"])
        for event in events
        if event["event"] == "round" and event["validation"] is not None
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    if steps:
        axes.plot(*zip(*steps, strict=True), color="#9bb7d4", label="training")
    if rounds:
        axes.plot(*zip(*rounds, strict=True), color="#1f4e79", label="validation", marker="o", markersize=3)
    axes.set_xlabel("inner step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    if steps or rounds:
        axes.legend()
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)
    return True
