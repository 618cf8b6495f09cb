"""`shoal report`: a run as one HTML file that needs nothing else. The page itself, with its data written into it."""

import argparse
import base64
import hashlib
import json
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.swarm.coordinator.config import CoordinatorConfig
    from shoal.wire.page_data import NodePage, Snapshot
    from shoal.wire.run_spec import RunSpec

MAX_NODES = 100
"""Nodes whose own pages go into the file."""
TIMEOUT_S = 20.0


def add_report(commands: Any) -> None:
    parser = commands.add_parser("report", help="a run as one HTML file, to keep and to share")
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a coordinator's URL")
    parser.add_argument(
        "--database", metavar="URL", default="", help="of a folder whose tables are in postgresql://..."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html")
    parser.set_defaults(action=report)


def report(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.supervise import EXIT_OK

    is_url = options.run.startswith(("http://", "https://"))
    data = read_url(options.run, stop) if is_url else read_folder(Path(options.run), options.database)
    text = make_report(data)
    options.out.write_text(text, encoding="utf-8")
    print(
        f"{options.out}: run {data['snapshot']['terms']['run']}, {len(text.encode()) / 1000:.0f} kB, opens anywhere"
    )
    return EXIT_OK


# -- the data ---------------------------------------------------------------------------------------------


def read_url(url: str, stop: threading.Event) -> dict[str, Any]:
    """From a coordinator that runs."""
    import httpx2

    from shoal.cli.commands.connectivity import no_coordinator, reaching
    from shoal.cli.ui.progress_bar import progress
    from shoal.net.waiting import Stopped
    from shoal.wire.codes import Rejected
    from shoal.wire.page_data import NodePage, Snapshot

    def get(path: str) -> bytes:
        if stop.is_set():
            raise Stopped("stopped while the run was read")
        return http.get(path).raise_for_status().content

    with httpx2.Client(base_url=url.rstrip("/") + "/", timeout=TIMEOUT_S) as http:
        try:
            with reaching(url):
                snapshot = Snapshot.parse(get("v1/page"))
                workers, pages = snapshot.workers[:MAX_NODES], []
                with progress("pages of nodes", len(workers)) as advance:
                    for one in workers:
                        pages.append(NodePage.parse(get(f"v1/nodes/{one.node}/page")))
                        advance(1)
        except Rejected as rejected:
            raise no_coordinator(url, rejected.detail) from None
    return to_data(snapshot, pages)


@dataclass(frozen=True)
class FolderTerms:
    """What a coordinator would know, read from what it left."""

    config: "CoordinatorConfig"
    spec: "RunSpec"
    clock: Callable[[], float]


def read_folder(folder: Path, database: str = "") -> dict[str, Any]:
    """From the tables of a run that is over, or goes on. They are only read."""
    from sqlalchemy import func, select

    from shoal.swarm.coordinator.context import DATABASE_FILE
    from shoal.swarm.coordinator.store.database import read_only
    from shoal.swarm.coordinator.store.schema import SCHEMA_VERSION, ledger, run
    from shoal.swarm.coordinator.views.page_snapshot import node_page, take_snapshot
    from shoal.wire.run_spec import RunSpec

    config = config_of(folder)
    where = database or config.database or find_database(folder, DATABASE_FILE)
    with read_only(where) as db:
        # The layout first: of another one, the other columns may not be there.
        layout = db.execute(select(run.c.schema_version)).scalar_one_or_none()
        held = db.execute(select(run)).one() if layout == SCHEMA_VERSION else None
        if held is None:
            raise ValueError(
                f"{folder} holds no run of layout {SCHEMA_VERSION}; make the report with the version that ran it"
            )
        # The run is shown as it was at its last event, not as it looks from today.
        last_s = float(db.execute(select(func.coalesce(func.max(ledger.c.time_s), 0.0))).scalar_one())
        terms = FolderTerms(config=config, spec=RunSpec.parse(held.spec), clock=lambda: last_s)
        snapshot = take_snapshot(db, terms)
        pages = [node_page(db, terms, worker.node) for worker in snapshot.workers[:MAX_NODES]]
    return to_data(snapshot, pages)


def config_of(folder: Path) -> "CoordinatorConfig":
    """As the run's file has it: only what concerns the coordinator, for the rest may name files of another machine."""
    from shoal.swarm.coordinator.config import CoordinatorConfig

    file = folder / "run.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return CoordinatorConfig.parse(json.dumps(table.get("coordinator", {})))


def write_report(folder: Path, out: Path) -> Path | None:
    """For a run that has just ended; None if its tables are somewhere else."""
    from shoal.swarm.coordinator.context import DATABASE_FILE

    if not config_of(folder).database and not (folder / "coordinator" / DATABASE_FILE).exists():
        return None
    out.write_text(make_report(read_folder(folder)), encoding="utf-8")
    return out


def find_database(folder: Path, name: str) -> Path:
    for path in (folder / "coordinator" / name, folder / name):
        if path.exists():
            return path
    raise ValueError(
        f"{folder} holds no run: neither {name} nor coordinator/{name}; give a run's folder, its --database, or a URL"
    )


def to_data(snapshot: "Snapshot", pages: "list[NodePage]") -> dict[str, Any]:
    return {
        "snapshot": snapshot.model_dump(mode="json"),
        "nodes": {page.node.node: page.model_dump(mode="json") for page in pages},
    }


# -- the file ---------------------------------------------------------------------------------------------


def make_report(data: dict[str, Any]) -> str:
    """The page with style, script and data inside. Its policy lets nothing run or load but those two, by their hashes."""
    from shoal.swarm.coordinator.http.live_page import page_file

    page, style, script = (page_file(name).decode() for name in ("page.html", "page.css", "page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    body = f'<script type="application/json" id="data">{_inert(data)}</script>\n<script>{script}</script>\n</body>'
    page = _replace(page, '<link rel="stylesheet" href="page.css">', head)
    page = _replace(page, '<script src="page.js" defer></script>\n', "")
    return _replace(page, "</body>", body)


def _replace(page: str, old: str, new: str) -> str:
    assert page.count(old) == 1, f"page.html must have {old!r} once"
    return page.replace(old, new)


def _inert(data: dict[str, Any]) -> str:
    """JSON without a character that HTML knows: nothing in it can end the element it stands in, or begin another."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
