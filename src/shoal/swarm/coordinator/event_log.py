"""Writes ledger events to the coordinator's log: one line each, with the meaning of refusal codes."""

from typing import Any

from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED, explain_code
from shoal.wire.ledger import LedgerEvent

_PLAIN = {
    "run.opened": ("run opened", ("run",)),
    "node.enrolled": ("node enrolled", ("node", "software")),
    "node.trusted": ("node trusted", ("node", "reason")),
    "policy.published": ("policy published", ("version", "num_bytes")),
    "lease.issued": ("lease issued", ("lease_id", "node", "purpose")),
    "epoch.revealed": ("epoch revealed", ("epoch",)),
    "group.stale": ("groups went stale", ("version", "num_groups")),
    "evaluation.completed": ("held-out evaluation complete", ("version", "reward_mean", "rollouts")),
    "run.finished": ("run finished", ("version",)),
}


def log_event(log: Log, event: LedgerEvent) -> None:
    """Writes one event to the log. Types that are not listed here are not logged."""
    body = event.body
    if event.type == "verdict.given":
        _log_verdict(log, body)
    elif event.type == "node.quarantined":
        log.warning(f"node quarantined: {body['reason']}", node=_short(body["node"]))
    elif event.type == "node.banned":
        log.warning(f"node ejected: {body['reason']}", node=_short(body["node"]))
    elif event.type == "lease.void":
        log.info(f"lease void: {explain_code(body['code'])}", **_values(body, ("lease_id", "node", "detail")))
    elif event.type == "batch.formed":
        log.info(
            "batch formed",
            version=body["version"],
            groups=len(body["group_ids"]),
            reward_mean=body["reward_mean"],
        )
    elif event.type in _PLAIN:
        message, names = _PLAIN[event.type]
        log.info(message, **_values(body, names))


def _log_verdict(log: Log, body: dict[str, Any]) -> None:
    values = _values(body, ("node", "lease_id"))
    if body["code"] == ACCEPTED:
        log.info("accepted", **values, output_tokens=body["output_tokens"])
    else:
        word = "refused" if body["code"].startswith("reject.") else "void"
        log.warning(
            f"{word}: {explain_code(body['code'])}", **values, code=body["code"], detail=repr(body["detail"])
        )


def _values(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, object]:
    return {name: _short(body[name]) if name in ("node", "lease_id") else body[name] for name in names}


def _short(identifier: str) -> str:
    return identifier[:12]
