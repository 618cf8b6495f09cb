"""What `shoal diloco` shows: the peers of a run, and a site's live view."""

import math
from collections.abc import Callable
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
    """Returns one line per peer of a directory."""
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


class SiteView:
    """Redraws a site's state four times a second at a terminal, in a thread, because a round may take minutes.

    Shows nothing elsewhere, where the log is enough.
    """

    def __init__(self, console: Console, show: Callable[[], RenderableType]) -> None:
        self._live = Live(console=console, get_renderable=show) if console.is_terminal else None

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()

    def __exit__(self, *what: object) -> None:
        if self._live is not None:
            self._live.stop()


def show_site(file: "DilocoFile", progress: "SiteProgress", averager: Any) -> Group:
    """Returns the site's progress, its last round, and the other peers."""
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
