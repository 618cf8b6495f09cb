"""What work there is for a node that asks: a pure function of all that decides it. And how large its file may be."""

import math
from dataclasses import dataclass
from typing import Literal

from shoal.swarm.coordinator.rules.trust import Standing, Trust, lease_prompts
from shoal.wire.lease import Purpose
from shoal.wire.messages import RelayView
from shoal.wire.run_spec import ProofSpec, Sampling

NEWCOMER_SHARE = 1.0
"""Work leased to nodes that have shown nothing yet does not count as coming: beyond what the trainer can use, this share
of it again is leased to them, needed or not. So idle newcomers hold up nobody who has delivered before, and each other only past
that; and where those who deliver suffice, a newcomer still gets to show that it does too."""
LEASE_SHARE = 0.25
"""A lease is sized so that its node should be done within this share of the time it has."""
PROMPT_SLACK_TOKENS = 1024
"""What a chat template may add to a prompt. A prompt has at most as many tokens as bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTerms:
    """What the configuration and the run's specification say about leases."""

    groups_per_step: int
    prompts_per_lease: int
    max_prompts_per_lease: int
    lease_s: float
    eval_samples: int
    stale: Literal["drop", "wait"]
    max_lag: int
    samples_per_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalChunk:
    """The part of a held-out evaluation that one lease covers."""

    version: int
    index: int
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """All that decides whether there is work for a node."""

    newest_version: int | None
    last_version: int
    finished: bool
    relays: tuple[RelayView, ...]
    """Live ones."""
    standing: Standing
    proven: bool
    """The node has delivered before, and does not let leases lapse."""
    rows_per_s: float
    chunk: EvalChunk | None
    """Held-out work that nobody has."""
    ready_groups: int
    """With `stale = "wait"`, those only that the next batch may still take; so too what is in flight."""
    coming_groups: int
    """In train leases that have not ended: delivered, or in the hands of proven nodes."""
    hoped_groups: int
    """In the hands of nodes that have shown nothing yet."""
    ahead: int = 0
    """Nodes that were turned away before this one asked, and will be back."""
    batch_formed: bool = False
    """The trainer has its batch of the newest version: new groups serve a later one."""
    next_formed: bool = False
    """And that of the one after it, which is on its way out."""
    signal_share: float = 1.0
    """Of the groups accepted lately, those with signal: what of the coming ones will count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a lease is made of: `versions` are those allowed, the newest last."""

    purpose: Purpose
    versions: tuple[int, ...]
    relays: tuple[str, ...]
    chunk: int
    num_prompts: int
    samples_per_prompt: int


class NoWork(Exception):
    """Nothing for this node now; the reason in words."""


def plan(outlook: Outlook, terms: PlanningTerms) -> Work:
    """Returns the work for a node that asks, or raises NoWork."""
    if outlook.finished:
        raise NoWork("the run is finished")
    if outlook.newest_version is None:
        raise NoWork("no policy yet: the trainer has not published version 0")
    if not outlook.relays:
        raise NoWork("no relay is live, so nobody could fetch the weights")
    newest = outlook.newest_version
    # The curve must not hang on a node that is under suspicion.
    if outlook.chunk is not None and outlook.standing.trust is not Trust.QUARANTINED:
        version = outlook.chunk.version
        urls, held = serving(outlook.relays, range(version, version + 1))
        if urls:
            return Work(
                purpose="eval",
                versions=held,
                relays=urls,
                chunk=outlook.chunk.index,
                num_prompts=outlook.chunk.num_prompts,
                samples_per_prompt=terms.eval_samples,
            )
    if newest >= outlook.last_version:
        raise NoWork(f"version {newest} is the last; only its held-out evaluation is still out")
    oldest = oldest_worth_leasing(outlook, terms)
    wanted = terms.groups_per_step * open_batches(outlook, terms)
    _refuse_surplus(outlook, wanted, reserved=outlook.ahead * terms.prompts_per_lease)
    urls, held = serving(outlook.relays, range(oldest, newest + 1))
    if not urls:
        raise NoWork(f"no live relay has version {newest} yet, or one at most {terms.max_lag} behind it")
    return Work(
        purpose="train",
        versions=held,
        relays=urls,
        chunk=0,
        num_prompts=_num_prompts(outlook, terms, wanted),
        samples_per_prompt=terms.samples_per_prompt,
    )


def _num_prompts(outlook: Outlook, terms: PlanningTerms, wanted: int) -> int:
    """As many as the node, by what was measured of it, answers in a quarter of the time; halved by each lapse. No more than
    it takes to fill what is `wanted`, except where work is made to be dropped."""
    usual, most = terms.prompts_per_lease, max(terms.prompts_per_lease, terms.max_prompts_per_lease)
    if terms.stale == "wait" and outlook.proven:
        needed = math.ceil((wanted - expected_groups(outlook)) / outlook.signal_share)
        usual, most = min(usual, needed), min(most, needed)
    if outlook.rows_per_s == 0:
        return lease_prompts(outlook.standing, most=usual)
    rows = outlook.rows_per_s * terms.lease_s * LEASE_SHARE
    fits = int(rows / terms.samples_per_prompt)
    return lease_prompts(outlook.standing, most=max(1, min(most, fits)))


def open_batches(outlook: Outlook, terms: PlanningTerms) -> int:
    """How many batches groups by the newest version can be in. drop: as if none were formed yet."""
    newest = outlook.newest_version
    assert newest is not None, "no version, no lease"
    formed = outlook.batch_formed + outlook.next_formed if terms.stale == "wait" else 0
    return max(0, min(terms.max_lag + 1, outlook.last_version - newest) - formed)


def oldest_worth_leasing(outlook: Outlook, terms: PlanningTerms) -> int:
    """The oldest version a new train lease may be answered with.

    drop: any that the trainer would take now. Nodes are never idle; what is too old when its turn comes is dropped.
    wait: any that it will still take when the turn of these groups comes, after all that are ready or leased. A node
    waits for the next version rather than work for nothing; at max_lag 0 nobody generates while the trainer trains.
    Those who have shown nothing yet do not wait for the others' work: what they show is that they can.
    """
    max_lag, newest = terms.max_lag, outlook.newest_version
    assert newest is not None, "no version, no lease"
    if terms.stale == "drop":
        return max(0, newest - max_lag)
    queued = expected_groups(outlook) if outlook.proven else 0
    serves = newest + outlook.batch_formed + outlook.next_formed + int(queued // terms.groups_per_step)
    if serves - max_lag > newest:
        raise NoWork(
            f"groups by version {newest} would be stale when the step from version {serves} uses them "
            f"(max_lag {max_lag}); wait for the next version"
        )
    return max(0, serves - max_lag)


def expected_groups(outlook: Outlook) -> float:
    """That the trainer will find, of what is ready and what proven nodes hold: some will be without signal."""
    return outlook.ready_groups + outlook.coming_groups * outlook.signal_share


def _refuse_surplus(outlook: Outlook, wanted: int, *, reserved: int) -> None:
    """`reserved`: groups for those who come first."""
    others, limit, first = outlook.hoped_groups, wanted * (1 + NEWCOMER_SHARE), ""
    if outlook.proven:
        others, limit = reserved, wanted
        first = f"; nodes that asked earlier come first: {outlook.ahead}" if reserved else ""
    if expected_groups(outlook) + others * outlook.signal_share >= limit:
        leased = outlook.coming_groups + outlook.hoped_groups
        raise NoWork(
            f"enough work in flight: {outlook.ready_groups} groups ready and {leased} leased, "
            f"of {wanted} that the trainer can use before they go stale{first}"
        )


def max_bytes(prompts: tuple[str, ...], sampling: Sampling, proof: ProofSpec) -> int:
    """What an honest file can come to, twice over."""
    prompt_tokens = max(len(prompt.encode()) for prompt in prompts) + PROMPT_SLACK_TOKENS
    segments = -(-(sampling.max_new_tokens - 1) // proof.segment_tokens)
    row = 4 * prompt_tokens + 8 * sampling.max_new_tokens + segments * (2 * proof.topk + 2) + 64
    return 2 * len(prompts) * sampling.samples_per_prompt * row + (64 << 10)


def serving(relays: tuple[RelayView, ...], versions: range) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the relays to fetch from, and those of `versions` that some relay has. The relays are those with the newest."""
    held = {version for relay in relays for version in relay.versions if version in versions}
    if not held:
        return (), ()
    newest = max(held)
    # A relay that is still mirroring the newest version would keep a worker waiting for it.
    urls = tuple(relay.url for relay in relays if newest in relay.versions)
    return urls, tuple(sorted(held))
