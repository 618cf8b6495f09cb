"""Decides what work a node gets when it asks for a lease, and how large its file may be. Pure functions."""

import math
from dataclasses import dataclass
from typing import Literal

from shoal.swarm.coordinator.rules.trust import NodeStanding, Trust, lease_prompts
from shoal.wire.lease import Purpose
from shoal.wire.messages import RelayView
from shoal.wire.run_spec import ProofSpec, Sampling

NEWCOMER_SHARE = 1.0
"""Groups leased to newcomers beyond what the trainer can use, as a share of that. Work of newcomers (nodes without an accepted
submission) is not expected to arrive, so idle newcomers take no work away from proven nodes; and where proven nodes are enough,
a newcomer still gets a lease to prove itself."""
LEASE_SHARE = 0.25
"""A lease is sized so that its node needs this share of the time until the deadline."""
MIN_RELAY_KEYS = 2
"""A lease names relays with at least this many different keys, if there are that many."""
PROMPT_SLACK_TOKENS = 1024
"""Tokens that a chat template may add to a prompt. A prompt has at most as many tokens as bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTerms:
    """What the configuration and the run's specification say about leases."""

    groups_per_step: int
    prompts_per_lease: int
    max_prompts_per_lease: int
    lease_s: float
    stale: Literal["drop", "wait"]
    max_lag: int
    samples_per_prompt: int
    """The largest of the run's tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalChunk:
    """The part of a held-out evaluation that one lease covers."""

    version: int
    index: int
    num_prompts: int
    task: str
    """Label of the evaluation."""
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningInputs:
    """Everything that decides whether there is work for a node."""

    newest_version: int | None
    last_version: int
    finished: bool
    relays: tuple[RelayView, ...]
    """The live relays."""
    standing: NodeStanding
    proven: bool
    """True if the node has an accepted submission and fewer than two lapses in a row."""
    rows_per_s: float
    chunk: EvalChunk | None
    """Held-out work that is not leased to any node."""
    ready_groups: int
    """Groups that wait for a batch. With `stale = "wait"`, only those that the next batch may still use; leased groups likewise."""
    proven_groups: int
    """Groups in open train leases that proven nodes hold, or that nodes with accepted work have delivered."""
    newcomer_groups: int
    """Groups in the other open train leases."""
    ahead: int = 0
    """Nodes that were refused before this one asked, and are expected back."""
    batch_formed: bool = False
    """True if the batch of the newest version is formed: new groups are for a later one."""
    next_formed: bool = False
    """True if the batch of the version after the newest is formed too."""
    signal_share: float = 1.0
    """Share of recently accepted groups that have signal: an estimate for leased groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The content of a lease. `versions` are those that may be used, newest last."""

    purpose: Purpose
    versions: tuple[int, ...]
    relays: tuple[str, ...]
    chunk: int
    num_prompts: int
    samples_per_prompt: int
    """Samples per prompt of an eval lease. The seed of a train lease draws its task, which may have another number."""
    evaluation: str = ""
    """Label of the evaluation that an eval lease belongs to."""


class NoWork(Exception):
    """There is no work for this node now; the message says why."""


def plan(inputs: PlanningInputs, terms: PlanningTerms) -> Work:
    """Returns the work for a node that asks, or raises NoWork."""
    if inputs.finished:
        raise NoWork("the run is finished")
    if inputs.newest_version is None:
        raise NoWork("no policy yet: the trainer has not published version 0")
    if not inputs.relays:
        raise NoWork("no relay is live, so nobody could fetch the weights")
    newest = inputs.newest_version
    # The held-out curve must not depend on a node that may be cheating.
    if inputs.chunk is not None and inputs.standing.trust is not Trust.QUARANTINED:
        version = inputs.chunk.version
        urls, held = serving(inputs.relays, range(version, version + 1))
        if urls:
            return Work(
                purpose="eval",
                versions=held,
                relays=urls,
                chunk=inputs.chunk.index,
                num_prompts=inputs.chunk.num_prompts,
                samples_per_prompt=inputs.chunk.samples,
                evaluation=inputs.chunk.task,
            )
    if newest >= inputs.last_version:
        raise NoWork(f"version {newest} is the last; only its held-out evaluation is not finished")
    oldest = oldest_worth_leasing(inputs, terms)
    wanted = terms.groups_per_step * open_batches(inputs, terms)
    _refuse_surplus(inputs, wanted, reserved=inputs.ahead * terms.prompts_per_lease)
    urls, held = serving(inputs.relays, range(oldest, newest + 1))
    if not urls:
        raise NoWork(f"no live relay has version {newest} yet, or one at most {terms.max_lag} behind it")
    return Work(
        purpose="train",
        versions=held,
        relays=urls,
        chunk=0,
        num_prompts=_num_prompts(inputs, terms, wanted),
        samples_per_prompt=terms.samples_per_prompt,
    )


def _num_prompts(inputs: PlanningInputs, terms: PlanningTerms, wanted: int) -> int:
    """Returns the number of prompts that the node answers, by its measured speed, in LEASE_SHARE of the time; halved by each lapse.

    With `stale = "wait"` a proven node gets no more than the `wanted` groups that are still missing.
    """
    usual, most = terms.prompts_per_lease, max(terms.prompts_per_lease, terms.max_prompts_per_lease)
    if terms.stale == "wait" and inputs.proven:
        needed = math.ceil((wanted - expected_groups(inputs)) / inputs.signal_share)
        usual, most = min(usual, needed), min(most, needed)
    if inputs.rows_per_s == 0:
        return lease_prompts(inputs.standing, most=usual)
    rows = inputs.rows_per_s * terms.lease_s * LEASE_SHARE
    fits = int(rows / terms.samples_per_prompt)
    return lease_prompts(inputs.standing, most=max(1, min(most, fits)))


def open_batches(inputs: PlanningInputs, terms: PlanningTerms) -> int:
    """Returns how many batches can still use groups by the newest version. With `drop`, formed batches are counted too."""
    newest = inputs.newest_version
    assert newest is not None, "no version, no lease"
    formed = inputs.batch_formed + inputs.next_formed if terms.stale == "wait" else 0
    return max(0, min(terms.max_lag + 1, inputs.last_version - newest) - formed)


def oldest_worth_leasing(inputs: PlanningInputs, terms: PlanningTerms) -> int:
    """Returns the oldest version that may generate the rollouts of a new train lease.

    drop: any version that the trainer would accept now. Nodes are never idle; groups that become too old are dropped.
    wait: any version that the trainer will still accept when these groups are used, after all that are ready or leased. Raises
    NoWork if there is no such version: the node waits for the next one instead of working in vain. At max_lag 0 no node generates
    while the trainer trains. A newcomer does not wait for the groups of others.
    """
    max_lag, newest = terms.max_lag, inputs.newest_version
    assert newest is not None, "no version, no lease"
    if terms.stale == "drop":
        return max(0, newest - max_lag)
    queued = expected_groups(inputs) if inputs.proven else 0
    serves = newest + inputs.batch_formed + inputs.next_formed + int(queued // terms.groups_per_step)
    if serves - max_lag > newest:
        raise NoWork(
            f"groups by version {newest} would be stale when the step from version {serves} uses them "
            f"(max_lag {max_lag}); wait for the next version"
        )
    return max(0, serves - max_lag)


def expected_groups(inputs: PlanningInputs) -> float:
    """Returns how many groups the trainer can expect: those that are ready, and the leased ones of proven nodes that will have signal."""
    return inputs.ready_groups + inputs.proven_groups * inputs.signal_share


def _refuse_surplus(inputs: PlanningInputs, wanted: int, *, reserved: int) -> None:
    """Raises NoWork if enough groups are ready or leased. `reserved` groups are kept for nodes that asked earlier."""
    others, limit, first = inputs.newcomer_groups, wanted * (1 + NEWCOMER_SHARE), ""
    if inputs.proven:
        others, limit = reserved, wanted
        first = f"; nodes that asked earlier come first: {inputs.ahead}" if reserved else ""
    if expected_groups(inputs) + others * inputs.signal_share >= limit:
        leased = inputs.proven_groups + inputs.newcomer_groups
        raise NoWork(
            f"enough work in flight: {inputs.ready_groups} groups ready and {leased} leased, "
            f"of {wanted} that the trainer can use before they become stale{first}"
        )


def chunk_prompts(prompts_per_lease: int, *, trained_samples: int, samples: int) -> int:
    """Returns the number of prompts in a chunk of an evaluation: it has as many rows as a train lease, or a few more.

    With fewer rows, few samples for each prompt would hold up training: a lease lasts as long as its longest answer.
    """
    return -(-prompts_per_lease * trained_samples // samples)


def max_bytes(prompts: tuple[str, ...], sampling: Sampling, proof: ProofSpec) -> int:
    """Returns the size limit of a file: twice the largest size that an honest one can have."""
    prompt_tokens = max(len(prompt.encode()) for prompt in prompts) + PROMPT_SLACK_TOKENS
    segments = -(-(sampling.max_new_tokens - 1) // proof.segment_tokens)
    row = 4 * prompt_tokens + 8 * sampling.max_new_tokens + segments * (2 * proof.topk + 2) + 64
    return 2 * len(prompts) * sampling.samples_per_prompt * row + (64 << 10)


def serving(relays: tuple[RelayView, ...], versions: range) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the relays to fetch from, and those of `versions` that some relay has.

    The relays are those with the newest version. If one key alone says that it has it, those with the next newest are added, until
    there are two keys: a relay that lies about its versions is never the only one, and an honest one has the version soon.
    """
    held = {version for relay in relays for version in relay.versions if version in versions}
    if not held:
        return (), ()
    by_version = {
        relay.url: max((v for v in relay.versions if v in versions), default=-1) for relay in relays
    }
    # A relay that is still mirroring the newest version would keep a worker waiting for it.
    chosen = [relay for relay in relays if by_version[relay.url] == max(held)]
    keys = {relay.key for relay in chosen}
    for relay in sorted(relays, key=lambda relay: -by_version[relay.url]):
        if len(keys) < MIN_RELAY_KEYS and relay.key not in keys:
            keys.add(relay.key)
            chosen.append(relay)
    return tuple(relay.url for relay in chosen), tuple(sorted(held))
