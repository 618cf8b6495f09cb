"""One sentence that says what the run is waiting for now: a pure function of the run's situation."""

from dataclasses import dataclass

VALIDATOR_PATIENCE_S = 5.0
"""If no submission was claimed for this long, the queue waits for a validator to appear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The counts that decide what the run is waiting for."""

    newest_version: int | None
    last_version: int
    finished: bool
    known_relays: int
    live_relays: int
    enrolled: int
    live_workers: int
    eval_workers: int
    """Workers that are live and not in quarantine."""
    queued_checks: int
    queue_untouched_s: float
    """Seconds since the last claim, or since the oldest queued submission arrived, whichever is later."""
    ready_groups: int
    groups_needed: int
    open_leases: int
    batch_formed: bool
    """True if the batch of the newest version is formed."""
    dropped_groups: int = 0
    """Groups without signal that were accepted since the last batch."""
    eval_chunks: tuple[int, int] | None
    """Accepted chunks and all chunks of the newest version's evaluation."""


def waiting_for(now: Situation) -> str:
    """Returns what the run is waiting for. What blocks everything is named before work that is merely not done yet."""
    return _trainer_reason(now) or _missing_role_reason(now) or _work_reason(now)


def _trainer_reason(now: Situation) -> str | None:
    newest = now.newest_version
    if now.finished:
        return "nothing: the run is finished"
    if newest is None:
        return "a policy: the trainer has not published version 0"
    if newest == now.last_version:
        return None
    if now.batch_formed:
        return f"the trainer: it has the batch of version {newest} and has not published version {newest + 1}"
    if now.ready_groups >= now.groups_needed:
        return f"the trainer: {now.groups_needed} groups are ready for version {newest}, not collected yet"
    return None


def _missing_role_reason(now: Situation) -> str | None:
    if not now.live_relays:
        return f"relays: none live (0 of {now.known_relays} known)"
    if now.queued_checks and now.queue_untouched_s > VALIDATOR_PATIENCE_S:
        queued = _count(now.queued_checks, "submission")
        return f"a validator: {queued} queued, none claimed for {now.queue_untouched_s:.0f} s"
    if not now.live_workers:
        return f"workers: none live (0 of {now.enrolled} enrolled)"
    return None


def _work_reason(now: Situation) -> str:
    open_leases = f"{_count(now.open_leases, 'lease')} open on {_count(now.live_workers, 'live worker')}"
    if now.newest_version != now.last_version:
        dropped = (
            f"; {_count(now.dropped_groups, 'group')} dropped, all rewards equal"
            if now.dropped_groups
            else ""
        )
        return f"rollouts: {now.ready_groups} of {now.groups_needed} groups ready, {open_leases}{dropped}"
    if not now.eval_workers:
        return f"workers: {now.live_workers} live, all in quarantine, and an evaluation needs one that is not"
    done, total = now.eval_chunks or (0, 0)
    return f"the evaluation of version {now.newest_version}: {done} of {total} parts accepted, {open_leases}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
