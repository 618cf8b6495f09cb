"""`shoal top` shows a running run in this terminal; `shoal report` writes a run's page into one HTML file."""

import argparse
import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.cli.public_api import PublicApi
from shoal.cli.run.supervise import EXIT_INTERRUPTED, EXIT_OK
from shoal.cli.run_folder import is_run_folder
from shoal.cli.run_reader import open_reader
from shoal.cli.ui.progress_bar import progress
from shoal.cli.ui.values import completed_by_task
from shoal.cli.ui.view import make_view, sparkline
from shoal.files import write_bytes_atomically
from shoal.net.http_client import Unreachable
from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.swarm.coordinator.http.live_page import page_file
from shoal.swarm.coordinator.leases.transcripts import RolloutQuery
from shoal.telemetry import printable
from shoal.wire.messages import Stats
from shoal.wire.page_data import RolloutGroup, RolloutPage, Snapshot

POLL_S = 1.0
ANSWER_S = 5.0
SILENCE_S = 60.0
"""Seconds without an answer from the coordinator after which `shoal top` gives up."""
SCRIPTS = ("charts.js", "rollouts.js", "page.js")
"""The page's scripts in the order in which they run."""
REPORT_VERSIONS = 7
"""Versions whose rollouts go into a report, from the first to the last."""
REPORT_GROUPS = 2
"""Groups of each of these versions."""
MAX_NODES = 100
"""Most nodes whose own pages go into a report."""


# -- shoal top ----------------------------------------------------------------------------------------------


def top(options: argparse.Namespace, stop: threading.Event) -> int:
    with PublicApi(options.url, timeout_s=ANSWER_S) as api:
        snapshot = api.read("/v1/page", Snapshot)
        if not options.json:
            return watch_until_finished(api, stop, Console(highlight=False))
        print(snapshot.model_dump_json())
    return EXIT_OK


def watch_until_finished(api: PublicApi, stop: threading.Event, console: Console) -> int:
    """Shows the run until it is finished or stopped. Raises DeadlinePassed after SILENCE_S without an answer."""
    view = make_view({}, console)
    heard_s, lost = time.monotonic(), False
    try:
        while not stop.is_set():
            try:
                stats = api.read("/v1/stats", Stats)
                if lost:
                    view.say("the coordinator answers again")
                heard_s, lost = time.monotonic(), False
                view.show(stats)
                if stats.finished:
                    view.say(final_summary(api.read("/v1/page", Snapshot)))
                    return EXIT_OK
            except Unreachable as error:
                if time.monotonic() - heard_s > SILENCE_S:
                    raise DeadlinePassed(f"no answer for {SILENCE_S:.0f} s: {error}") from None
                if not lost:
                    view.say(f"lost the coordinator ({error}); trying again")
                lost = True
            stop.wait(POLL_S)
    finally:
        view.close()
    return EXIT_INTERRUPTED


def final_summary(snapshot: Snapshot) -> str:
    """Returns the reward curve as one line, with the first and the last held-out reward."""
    ends = ""
    several = len({one.task for one in snapshot.evaluations}) > 1
    for title, held in completed_by_task(snapshot.evaluations).items():
        if len(held) > 1:
            of = f" on {title}" if several else ""
            ends += f"; held-out reward{of} {held[0].reward_mean:.3f} -> {held[-1].reward_mean:.3f}"
    return f"finished at version {snapshot.now.newest_version}: {sparkline(snapshot.curve.reward)}{ends}"


# -- shoal report -------------------------------------------------------------------------------------------


def report(options: argparse.Namespace, stop: threading.Event) -> int:
    data = read_report(options.run, stop, database=options.database)
    text = make_report(data)
    write_bytes_atomically(options.out, text.encode(), durable=False)
    name = printable(data["snapshot"]["terms"]["run"])
    print(f"{options.out}: run {name}, {len(text.encode()) / 1000:.0f} kB, opens in any browser")
    return EXIT_OK


def write_report(folder: Path, out: Path) -> Path | None:
    """Writes the report of a run that has just ended; returns None if its folder holds no tables."""
    if not is_run_folder(folder):
        return None
    text = make_report(read_report(str(folder), threading.Event()))
    write_bytes_atomically(out, text.encode(), durable=False)
    return out


def read_report(run: str, stop: threading.Event, *, database: str = "") -> dict[str, Any]:
    """Returns the data of a report: of a coordinator as it is now, of a folder as it was at its last event."""
    with open_reader(run, database) as reader:
        snapshot = reader.snapshot()
        workers, pages = snapshot.workers[:MAX_NODES], []
        with progress("pages of nodes", len(workers)) as advance:
            for worker in workers:
                if stop.is_set():
                    raise Stopped("stopped while the run was read")
                pages.append(reader.node_page(worker.node))
                advance(1)
        rollouts = choose_rollouts(snapshot, reader.rollouts)
    return {
        "rollouts": [group.model_dump(mode="json") for group in rollouts],
        "snapshot": snapshot.model_dump(mode="json"),
        "nodes": {page.node.node: page.model_dump(mode="json") for page in pages},
    }


def choose_rollouts(snapshot: Snapshot, read: Callable[[RolloutQuery], RolloutPage]) -> list[RolloutGroup]:
    """Returns some groups of the first, the last and a few versions between, and held-out ones of the evaluated versions."""
    newest = snapshot.now.newest_version or 0
    trained = sorted({newest * part // (REPORT_VERSIONS - 1) for part in range(REPORT_VERSIONS)})
    evaluated = sorted({one.version for one in snapshot.evaluations})
    evaluated = sorted({*evaluated[:1], *evaluated[len(evaluated) // 2 :][:1], *evaluated[-1:]})
    found = list(read(RolloutQuery(limit=REPORT_GROUPS)).groups[:REPORT_GROUPS])
    for held_out, versions in ((False, trained), (True, evaluated)):
        for version in reversed(versions):
            page = read(RolloutQuery(held_out=held_out, version=version, limit=REPORT_GROUPS))
            found += page.groups[:REPORT_GROUPS]
    return list({group.group_id: group for group in found}.values())


def make_report(data: dict[str, Any]) -> str:
    """Returns the page with style, script and data in one file.

    Its content security policy allows only this style and this script, by their hashes, and no request.
    """
    page, style = (page_file(name).decode() for name in ("page.html", "page.css"))
    scripts = {name: page_file(name).decode() for name in SCRIPTS}
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
        f"script-src {' '.join(_hash(script) for script in scripts.values())}; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    body = f'<script type="application/json" id="data">{_to_safe_json(data)}</script>\n'
    body += "".join(f"<script>{script}</script>\n" for script in scripts.values())
    page = _replace(page, '<link rel="stylesheet" href="page.css">', head)
    for name in scripts:
        page = _replace(page, f'<script src="{name}" defer></script>\n', "")
    return _replace(page, "</body>", body + "</body>")


def _replace(page: str, old: str, new: str) -> str:
    assert page.count(old) == 1, f"page.html must have {old!r} once"
    return page.replace(old, new)


def _to_safe_json(data: dict[str, Any]) -> str:
    """Returns JSON without <, > and &: text of a node in it cannot end the script element or start another."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
