"""Reads what a run shows to everybody: from its coordinator while one runs, or from the tables in its folder as they were at the last event."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from shoal.cli.public_api import PublicApi
from shoal.cli.run_folder import RunFolder
from shoal.cli.ui.values import is_url
from shoal.swarm.coordinator.leases.transcripts import RolloutQuery, read_rollouts
from shoal.swarm.coordinator.views.page_snapshot import node_page, take_snapshot
from shoal.wire.page_data import NodePage, RolloutPage, Snapshot


class RunReader(NamedTuple):
    """Functions that read a run."""

    snapshot: Callable[[], Snapshot]
    node_page: Callable[[str], NodePage]
    rollouts: Callable[[RolloutQuery], RolloutPage]


@contextmanager
def open_reader(run: str, database: str = "") -> Iterator[RunReader]:
    """Opens a coordinator's URL or a run's folder. `database` replaces the one that the folder's run file names."""
    if is_url(run):
        with PublicApi(run) as api:
            yield RunReader(
                snapshot=lambda: api.read("/v1/page", Snapshot),
                node_page=lambda node: api.read(f"/v1/nodes/{node}/page", NodePage),
                rollouts=partial(ask_rollouts, api),
            )
    else:
        with RunFolder(Path(run), database) as folder:
            terms = folder.terms_at_end()
            yield RunReader(
                snapshot=lambda: take_snapshot(folder.db, terms),
                node_page=lambda node: node_page(folder.db, terms, node),
                rollouts=lambda query: read_rollouts(folder.db, query),
            )


def ask_rollouts(api: PublicApi, query: RolloutQuery) -> RolloutPage:
    """Returns the groups that a running coordinator has for this query."""
    given = asdict(query) | {"held_out": "1" if query.held_out else ""}
    given = {name: value for name, value in given.items() if value not in ("", None)}
    return api.read(f"/v1/rollouts?{urlencode(given)}", RolloutPage)
