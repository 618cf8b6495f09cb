"""Answers of accepted submissions as text: kept with the verdict, thinned out when they take too much room, read by filters."""

import base64
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, select

from shoal.swarm.coordinator.context import Transaction
from shoal.swarm.coordinator.store.schema import groups, leases, nodes, transcripts, verdicts
from shoal.swarm.coordinator.store.statements import TableStatements
from shoal.wire.lease import Lease, Verdict
from shoal.wire.page_data import RolloutGroup, RolloutPage
from shoal.wire.record import Sealed
from shoal.wire.transcript import GroupText, Transcript

RECENT_VERSIONS = 32
"""Newest versions of which every transcript is kept as long as possible."""
MAX_SCANNED = 2000
"""Submissions whose columns one request looks at."""
MAX_OPENED = 24
"""Submissions whose text one request decompresses."""
MAX_OPENED_BYTES = 512 << 10
"""Compressed bytes after which one request decompresses no more."""
MAX_GROUPS = 64
MAX_NODES = 8
"""Most nodes that a search by the first digits of an id finds."""
_HIDDEN = ("sample_prompt", "sample_answer", "sample_reward", "sample_expected", "policy_version")
_TRANSCRIPTS = TableStatements(transcripts)
_COLUMNS = [column for column in transcripts.c if column.name != "body"]


def keep(tx: Transaction, lease: Row[Any], submission: Row[Any], verdict: Verdict, *, seq: int) -> None:
    """Stores the transcript of an accepted submission, if its verdict has one. `seq` is the verdict's number in the ledger."""
    if not verdict.transcript or not verdict.rewards:
        return
    body = base64.b64decode(verdict.transcript)
    tx.insert(
        _TRANSCRIPTS,
        lease_id=lease.lease_id,
        seq=seq,
        purpose=lease.purpose,
        task=lease.task,
        policy_version=submission.policy_version,
        node=lease.node,
        reward_min=min(verdict.rewards),
        reward_max=max(verdict.rewards),
        num_bytes=len(body),
        body=body,
    )


def prune(tx: Transaction, max_bytes: int) -> None:
    """Deletes transcripts until the rest has at most `max_bytes`. Runs once a minute.

    Of versions before the newest RECENT_VERSIONS, every second one is deleted, then every second of the rest, and so on, so that
    the whole run stays in view. If that is not enough, the oldest are deleted.
    """
    if _total_bytes(tx.db) <= max_bytes:
        return
    newest = tx.db.execute(select(func.max(transcripts.c.policy_version))).scalar_one()
    old = transcripts.c.policy_version < newest - RECENT_VERSIONS
    stride = 2
    while stride <= newest:
        tx.write(delete(transcripts).where(old, transcripts.c.policy_version % stride != 0))
        if _total_bytes(tx.db) <= max_bytes:
            return
        stride *= 2
    rows = tx.db.execute(
        select(transcripts.c.seq, transcripts.c.num_bytes).order_by(transcripts.c.seq.desc())
    ).all()
    sums = accumulate(row.num_bytes for row in rows)
    kept = sum(total <= max_bytes for total in sums)
    oldest_kept = rows[kept - 1].seq if kept else rows[0].seq + 1
    tx.write(delete(transcripts).where(transcripts.c.seq < oldest_kept))


def _total_bytes(db: Connection) -> int:
    return int(db.execute(select(func.coalesce(func.sum(transcripts.c.num_bytes), 0))).scalar_one())


# -- reading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """The filters of the rollout viewer. None and "" match everything."""

    held_out: bool = False
    task: str = ""
    version: int | None = None
    node: str = ""
    """A node's id, or its first digits."""
    reward: float | None = None
    """Only groups with an answer of this reward."""
    search: str = ""
    """Only groups with this text in the prompt or in an answer; upper and lower case are the same."""
    before: int | None = None
    """Only submissions whose verdict has a lower number in the ledger: `next` of the page before."""
    limit: int = 8
    """Number of groups. A page has whole submissions, so it may have more."""

    def conditions(self) -> list[ColumnElement[bool]]:
        found = [transcripts.c.purpose == ("eval" if self.held_out else "train")]
        if self.task:
            found.append(transcripts.c.task == self.task)
        if self.version is not None:
            found.append(transcripts.c.policy_version == self.version)
        if self.before is not None:
            found.append(transcripts.c.seq < self.before)
        return found

    def matches(self, prompt: str, group: GroupText) -> bool:
        if self.reward is not None and all(abs(one.reward - self.reward) > 1e-6 for one in group.samples):
            return False
        wanted = self.search.casefold()
        texts = [prompt, *("".join(one.pieces) for one in group.samples)] if wanted else []
        return not wanted or any(wanted in text.casefold() for text in texts)


def read_rollouts(db: Connection, query: RolloutQuery) -> RolloutPage:
    """Returns groups that match, newest first. The work of one call is bounded: `next` continues where it ended."""
    conditions = query.conditions()
    if query.node:
        after = query.node + "g"  # above every id with this prefix: ids are hexadecimal
        with_prefix = select(nodes.c.node).where(nodes.c.node >= query.node, nodes.c.node < after)
        some = list(db.execute(with_prefix.limit(MAX_NODES)).scalars())
        conditions.append(transcripts.c.node.in_(some))
    rows = db.execute(
        select(*_COLUMNS).where(*conditions).order_by(transcripts.c.seq.desc()).limit(MAX_SCANNED)
    ).all()
    found: list[RolloutGroup] = []
    opened, num_bytes, last = 0, 0, None
    for row in rows:
        last = row.seq
        if query.reward is not None and not row.reward_min <= query.reward <= row.reward_max:
            continue
        found += _read_groups(db, query, row)
        opened += 1
        num_bytes += row.num_bytes
        full = opened >= MAX_OPENED or num_bytes >= MAX_OPENED_BYTES
        if full or len(found) >= min(query.limit, MAX_GROUPS):
            break
    is_end = len(rows) < MAX_SCANNED and (not rows or last == rows[-1].seq)
    return RolloutPage(groups=tuple(found), next=None if is_end else last)


def _read_groups(db: Connection, query: RolloutQuery, row: Row[Any]) -> list[RolloutGroup]:
    """Returns the groups of one submission that match."""
    body, sealed, verdict_body, given_at_s = db.execute(
        select(transcripts.c.body, leases.c.sealed, verdicts.c.body, verdicts.c.given_at_s)
        .join(leases, leases.c.lease_id == transcripts.c.lease_id)
        .join(verdicts, verdicts.c.lease_id == transcripts.c.lease_id)
        .where(transcripts.c.lease_id == row.lease_id)
    ).one()
    lease = Sealed[Lease].parse(sealed).body
    texts = Transcript.unpack(body).groups
    matching = [index for index, text in enumerate(texts) if query.matches(lease.prompts[index], text)]
    if not matching:
        return []
    verdict = Verdict.parse(verdict_body)
    of_groups = select(groups.c.prompt_index, groups.c.state, groups.c.batch_version).where(
        groups.c.group_id.in_([f"{row.lease_id}-{index}" for index in matching])
    )
    states = {group.prompt_index: (group.state, group.batch_version) for group in db.execute(of_groups)}
    evidence = {name: value for name, value in verdict.evidence.items() if name not in _HIDDEN}
    return [
        RolloutGroup.copied_from(
            row,
            group_id=f"{row.lease_id}-{index}",
            held_out=row.purpose == "eval",
            given_at_s=round(given_at_s, 1),
            prompt=lease.prompts[index],
            expected=texts[index].expected,
            samples=texts[index].samples,
            state=states.get(index, ("", None))[0],
            trained_version=states.get(index, ("", None))[1],
            code=verdict.code,
            detail=verdict.detail,
            checks=verdict.checks,
            evidence=evidence,
        )
        for index in matching
    ]
