"""The coordinator's figures in the text format of Prometheus, served at /metrics.

Labels are bounded: trust levels and codes, never nodes.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import Connection, func, select

from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.rules.trust import Trust
from shoal.swarm.coordinator.store.schema import nodes
from shoal.swarm.coordinator.views import stats
from shoal.wire.codes import ACCEPTED, CODES

MEDIA_TYPE = CONTENT_TYPE_LATEST


def exposition(db: Connection, coordinator: Coordinator) -> bytes:
    """Returns all metrics in the text format, read from one view of the database."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(db, coordinator))
    return generate_latest(registry)


class _Collector:
    """Reads the metrics when the registry asks for them."""

    def __init__(self, db: Connection, coordinator: Coordinator) -> None:
        self._db, self._coordinator = db, coordinator

    def collect(self) -> Iterator[Metric]:
        query = select(nodes.c.trust, func.count()).group_by(nodes.c.trust)
        counts = Counter({row[0]: row[1] for row in self._db.execute(query)})
        by_trust = GaugeMetricFamily("shoal_nodes", "enrolled nodes by trust", labels=["trust"])
        for trust in Trust:
            by_trust.add_metric([trust.value], counts[trust.value])
        yield by_trust
        ended = stats.ended_by_code(self._db)
        by_code = CounterMetricFamily(
            "shoal_leases_ended", "leases that have ended, by code", labels=["code"]
        )
        for code in [ACCEPTED, *(code for code in CODES if not code.startswith("request."))]:
            by_code.add_metric([code], ended.get(code, 0))
        yield by_code
        situation = stats.read_situation(self._db, self._coordinator)
        newest = -1 if situation.newest_version is None else situation.newest_version
        speed = stats.verified_tokens_per_s(self._db, self._coordinator.clock())
        yield _gauge("policy_version", "newest published version; -1 before the first", newest)
        yield _gauge("live_workers", "nodes that sent a request recently", situation.live_workers)
        yield _gauge("live_relays", "relays with a recent report", situation.live_relays)
        yield _gauge("open_leases", "leases that are not submitted yet", situation.open_leases)
        yield _gauge("queued_checks", "submissions that no validator has claimed", situation.queued_checks)
        yield _gauge("ready_groups", "groups that wait for a batch", situation.ready_groups)
        yield _gauge("held_groups", "groups that wait for a full check of their node", situation.held_groups)
        yield _gauge("finished", "1 if the run is over", int(situation.finished))
        yield _gauge("verified_tokens_per_second", "tokens of recently accepted submissions", speed)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"shoal_{name}", meaning, value=value)
