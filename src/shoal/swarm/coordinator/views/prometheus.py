"""Signs of life of the coordinator itself: whether its loops run, and what there is to count, for Prometheus.

Labels are bounded: trusts and codes, never nodes.
"""

from collections import Counter

from sqlalchemy import Connection, func, select

from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.rules.trust import Trust
from shoal.swarm.coordinator.store.schema import nodes
from shoal.swarm.coordinator.views import stats
from shoal.wire.codes import ACCEPTED, CODES, Rejected


def check_ready(coordinator: Coordinator) -> None:
    """Rejected if something that must run does not. That the database answers, whoever asks has found out by then."""
    if stalled := coordinator.vitals.stalled():
        raise Rejected("request.not_ready", "; ".join(stalled), retry_after_s=5.0)


def exposition(db: Connection, coordinator: Coordinator) -> str:
    """The text format of Prometheus."""
    situation = stats.read_situation(db, coordinator)
    trusts = Counter(
        {row[0]: row[1] for row in db.execute(select(nodes.c.trust, func.count()).group_by(nodes.c.trust))}
    )
    ended = stats.ended_by_code(db)
    codes = [ACCEPTED, *(code for code in CODES if not code.startswith("request."))]
    lines = [
        *_family(
            "shoal_nodes", "gauge", {f'{{trust="{trust.value}"}}': trusts[trust.value] for trust in Trust}
        ),
        *_family(
            "shoal_leases_ended_total",
            "counter",
            {f'{{code="{code}"}}': ended.get(code, 0) for code in codes},
        ),
    ]
    gauges = {
        "shoal_policy_version": -1 if situation.newest_version is None else situation.newest_version,
        "shoal_live_workers": situation.live_workers,
        "shoal_live_relays": situation.live_relays,
        "shoal_open_leases": situation.open_leases,
        "shoal_queued_checks": situation.queued_checks,
        "shoal_ready_groups": situation.ready_groups,
        "shoal_finished": int(situation.finished),
        "shoal_verified_tokens_per_second": stats.verified_tokens_per_s(db, coordinator.clock()),
    }
    for name, value in gauges.items():
        lines += _family(name, "gauge", {"": value})
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, values: dict[str, float]) -> list[str]:
    return [f"# TYPE {name} {kind}", *(f"{name}{labels} {value}" for labels, value in values.items())]
