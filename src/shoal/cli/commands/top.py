"""`shoal top`: a run somewhere else, live in this terminal."""

import argparse
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2
    from rich.console import Console

    from shoal.wire.page_data import Snapshot

POLL_S = 1.0
ANSWER_S = 5.0
SILENCE_S = 60.0
"""A coordinator that answers nothing for so long is given up."""
BLOCKS = "▁▂▃▄▅▆▇█"


def add_top(commands: Any) -> None:
    parser = commands.add_parser("top", help="watch somebody's run in the terminal")
    parser.add_argument("url", metavar="URL", help="the coordinator's")
    parser.add_argument("--json", action="store_true", help="one snapshot as JSON, then leave")
    parser.set_defaults(action=top)


def top(options: argparse.Namespace, stop: threading.Event) -> int:
    import httpx2
    from rich.console import Console

    from shoal.cli.commands.connectivity import no_coordinator, reaching
    from shoal.cli.run.supervise import EXIT_OK
    from shoal.wire.codes import Rejected

    if not options.url.startswith(("http://", "https://")):
        raise ValueError(f"{options.url!r} must look like http://HOST:PORT")
    with httpx2.Client(base_url=options.url.rstrip("/") + "/", timeout=ANSWER_S) as http:
        try:
            with reaching(options.url):
                snapshot = read_snapshot(http)
        except Rejected as rejected:
            raise no_coordinator(options.url, rejected.detail) from None
        if not options.json:
            return watch(http, stop, Console(highlight=False))
        print(snapshot.model_dump_json())
    return EXIT_OK


def watch(http: "httpx2.Client", stop: threading.Event, console: "Console") -> int:
    """Until the run is finished, the coordinator is lost for good, or somebody has seen enough."""
    import httpx2

    from shoal.cli.run.supervise import EXIT_INTERRUPTED, EXIT_OK
    from shoal.cli.ui.view import make_view
    from shoal.net.waiting import DeadlinePassed
    from shoal.wire.messages import Stats

    view = make_view({}, console)
    heard_s, lost = time.monotonic(), False
    try:
        while not stop.is_set():
            try:
                stats = Stats.parse(http.get("v1/stats").raise_for_status().content)
                if lost:
                    view.say("the coordinator answers again")
                heard_s, lost = time.monotonic(), False
                view.show(stats)
                if stats.finished:
                    view.say(closing_words(read_snapshot(http)))
                    return EXIT_OK
            except httpx2.HTTPError as error:
                if time.monotonic() - heard_s > SILENCE_S:
                    raise DeadlinePassed(
                        f"{http.base_url} has not answered for {SILENCE_S:.0f} s: {type(error).__name__}: {error}"
                    ) from None
                if not lost:
                    view.say(f"lost the coordinator ({type(error).__name__}); trying again")
                lost = True
            stop.wait(POLL_S)
    finally:
        view.close()
    return EXIT_INTERRUPTED


def read_snapshot(http: "httpx2.Client") -> "Snapshot":
    from shoal.wire.page_data import Snapshot

    return Snapshot.parse(http.get("v1/page").raise_for_status().content)


def closing_words(snapshot: "Snapshot") -> str:
    """The curve as one line, and where it ended."""
    held = [one for one in snapshot.evaluations if one.complete]
    ends = (
        f"; held-out reward {held[0].reward_mean:.3f} -> {held[-1].reward_mean:.3f}" if len(held) > 1 else ""
    )
    return f"finished at version {snapshot.now.newest_version}: {sparkline(snapshot.curve.reward)}{ends}"


def sparkline(values: tuple[float, ...], width: int = 40) -> str:
    """The values as a row of blocks, from the lowest to the highest of them."""
    size = -(-len(values) // width) or 1
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)
