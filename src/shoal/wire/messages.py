"""Bodies of the coordinator's routes. docs/wire/api.md lists the routes; every record here is one body.

Nothing here says who the sender is: that is the key that signed the request.
"""

from typing import Annotated, Literal

from pydantic import Field

from shoal.wire.delegation import Delegation
from shoal.wire.lease import Checks, Hex32, Lease, LeaseId, Sha256
from shoal.wire.manifest import Manifest
from shoal.wire.record import Count, Record, Sealed
from shoal.wire.requirements import Capabilities, Offer
from shoal.wire.run_spec import RunSpec

Url = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\-\[\]:]{1,255}(/[A-Za-z0-9._~/-]{0,255})?$")]
Words = Annotated[str, Field(max_length=300, pattern=r"^[^\x00]*$")]
"""Without NUL, which PostgreSQL cannot hold."""


class Problem(Record):
    """Every error of every route (RFC 9457, with our code and the remedy)."""

    code: str
    detail: str
    fix: str
    retry_after_s: float | None = None
    server_time_s: float


class Info(Record):
    """GET /v1/info: all a newcomer needs besides the URL."""

    protocol: int
    software: str
    run_key: str
    spec: RunSpec
    newest_version: int | None
    finished: bool
    server_time_s: float
    admission: str = "open"
    """What it takes to enrol: `open`, `invite`, `allow`, `work` or `stake`."""
    work_bits: int = 0
    """Of admission by proof of work: how many leading zero bits (shoal.wire.delegation.solve_work)."""
    credit_factor: float = 1.0
    """Credit is verified output tokens times this."""
    hold_s: float = 0.0
    """Credit is final after so long."""
    min_software: str = ""
    """Clients older than this are outdated."""
    entry_points: tuple[Url, ...] = ()
    """Other URLs of the same run."""
    features: tuple[str, ...] = ()
    """What this coordinator can do beyond the first release of the protocol."""


class RunView(Offer):
    """A run as somebody who looks for one sees it."""

    task: str
    newest_version: int | None
    last_version: int
    weights_bytes: int
    """Of the newest version: what must be fetched, and fit."""
    admission: str
    live_workers: int
    entry_points: tuple[Url, ...]
    relays: tuple[Url, ...]
    """Live ones."""


class RunList(Record):
    """GET /v1/runs: what can be joined from here, the run that needs workers most first."""

    runs: tuple[RunView, ...]


class Enrol(Record):
    """POST /v1/enrol"""

    protocol: Count
    software: Words
    delegation: Sealed[Delegation] | None = None
    """An owner's word that this key works for it."""
    invite: Annotated[str, Field(max_length=100)] = ""
    work: Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")] = ""
    """The proof of work, where the run asks for one."""


class Enrolled(Record):
    node: str
    trust: str
    run_key: str


class OpenSession(Record):
    """POST /v1/session"""

    software: Words
    capabilities: Capabilities | None = None
    """What the machine brings; only to a coordinator with the feature of that name."""


class Session(Record):
    """A higher epoch fences off every older session of the same key."""

    epoch: int
    heartbeat_s: float


class Heartbeat(Record):
    """POST /v1/heartbeat"""

    epoch: Count
    phase: Words
    policy_version: Count | None = None
    tokens_per_s: float = Field(default=0.0, ge=0, le=1e12)


class HeartbeatReply(Record):
    finished: bool
    """The run is over: finish and exit."""
    next_in_s: float


class AskLease(Record):
    """POST /v1/leases"""

    epoch: Count


class AskUpload(Record):
    """POST /v1/leases/{id}/upload"""

    epoch: Count
    num_bytes: Count = Field(gt=0)
    sha256: Sha256


class Upload(Record):
    """Where to PUT exactly those bytes; the name is the coordinator's."""

    path: str
    """At the coordinator; empty if they go to an object store."""
    expires_at_s: float
    url: Annotated[str, Field(max_length=4096, pattern=r"^(https?://[^\s]+)?$")] = ""
    """At the object store: size, digest and create-only are signed (docs/wire/api.md, "Object stores")."""


class Submit(Record):
    """POST /v1/leases/{id}/submit; asking again gives the same receipt."""

    epoch: Count
    num_bytes: Count = Field(gt=0)
    sha256: Sha256
    policy_version: Count


class Abandon(Record):
    """POST /v1/leases/{id}/abandon"""

    epoch: Count
    reason: Words


class Appeal(Record):
    """POST /v1/leases/{id}/appeal: the node says that a rejection was wrong."""

    text: Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]*$")]


class Leave(Record):
    """POST /v1/leave: no more leases; what is open may still be delivered."""

    epoch: Count


class RevokeKey(Record):
    """POST /v1/keys/revoke, signed by the owner: the node's key counts no more."""

    node: Hex32
    reason: Words


class AdminOrder(Record):
    """POST /v1/admin/{action}: an order of the operator, with its reason, for the ledger."""

    reason: Annotated[str, Field(min_length=3, max_length=300, pattern=r"^[^\x00]*$")]
    subject: Annotated[str, Field(max_length=100, pattern=r"^[^\x00]*$")] = ""
    """A node, an owner, a lease or an invitation; docs/operating.md says which for each action."""
    amount: Annotated[int, Field(ge=-(2**53), le=2**53)] = 0


class LeaseStatus(Record):
    """GET /v1/leases/{id}"""

    lease_id: LeaseId
    state: str
    code: str | None
    detail: str | None
    credit: int


class Claim(Record):
    """POST /v1/checks/claim (validator): one submission to check before `deadline_s`."""

    lease: Lease
    policy_version: int
    sha256: Sha256
    num_bytes: int
    received_at_s: float
    deadline_s: float
    copy_of: str | None
    """Node that submitted the same bytes before, if any."""
    checks: Checks = "full"
    """`rewards`: the cheap checks and the rewards suffice; the draw spared it the prefill."""
    relays: tuple[str, ...] = ()
    """Those that serve the version now; the lease's may be gone."""


class RelayReport(Record):
    """POST /v1/relays (relay): where it serves, what it holds, what it sent."""

    url: Url
    versions: tuple[Count, ...]
    bytes_sent: Count = 0


class Origin(Record):
    """GET /v1/origin (relay): where the trainer serves the versions it publishes."""

    url: Url


class StepReport(Record):
    """What the trainer says of one step, with the version the step made."""

    version: int
    loss: float
    reward_mean: float
    """Over every accepted group since the last batch, those without signal included."""
    groups: int
    dropped_groups: int
    """Accepted groups whose rewards were all equal: no signal, not trained on."""
    dropped_share: float = 0.0
    """Of the rollouts accepted since the last batch, those in dropped groups: inference that trained nothing."""
    unparseable: float = 0.0
    """Of the same rollouts, those that gave no answer at all, which is apart from a wrong one."""
    rollouts: int
    tokens: int
    lag_mean: float
    lag_max: int
    grad_norm: float
    """Before clipping; the largest of the step's updates."""
    clip_fraction: float
    logprob_gap: float
    """Mean |engine - trainer| log-prob on the batch, before the update."""
    learning_rate: float
    wait_s: float
    train_s: float
    tokens_per_s: float
    # With defaults: a ledger may hold reports from before these were there.
    stale_groups: int = 0
    """Accepted groups that went stale before they were used."""
    lags: tuple[int, ...] = ()
    """Rollouts by lag: lags[2] were written by a version two behind."""
    logprob_gap_max: float = 0.0
    logprob_gap_kl: float = 0.0
    """Estimate of the KL divergence from engine to trainer, from the same tokens."""
    gap_fresh_tokens: int = 0
    """Tokens of lag 0 that the gap was measured on; 0: it is over stale ones, and also how far the policy has moved."""
    entropy: float = 0.0
    """Mean entropy, in nats, of the distributions that the tokens trained on stand in."""
    kl: float = 0.0
    """Estimate of the KL divergence from version 0, per token; 0 where no reference is kept."""
    corrected_fraction: float = 0.0
    """Tokens whose weight the correction of the gap changed by bounding or leaving out."""
    optimizer_steps: int = 1
    waited_on: Words = ""
    """What the coordinator said the batch was waiting for."""


class Announce(Record):
    """POST /v1/policies (trainer): a version is published; `report` is None for version 0."""

    manifest: Sealed[Manifest]
    origin_url: Url
    report: StepReport | None


class Recorded(Record):
    """The answer to an announcement: it stands in the ledger as event `seq`."""

    seq: int


class Group(Record):
    """All samples of one prompt, accepted: rows of one stored file, with the swarm's rewards."""

    group_id: str
    lease_id: LeaseId
    sha256: Sha256
    prompt_index: int
    policy_version: int
    rewards: tuple[float, ...]


class Batch(Record):
    """GET /v1/batches/{version} (trainer): what the step from `version` trains on. The same answer for ever."""

    version: int
    groups: tuple[Group, ...]
    dropped_groups: int
    stale_groups: int
    reward_mean: float
    dropped_share: float = 0.0
    unparseable: float = 0.0


class Evaluation(Record):
    """Held-out reward of one policy version."""

    version: int
    reward_mean: float
    rollouts: int
    complete: bool


class NodeView(Record):
    node: str
    trust: str
    liveness: str
    phase: str
    policy_version: int | None
    tokens_per_s: float
    accepted: int
    rejected: int
    void: int
    credit: int
    """Held and final; what was revoked is not in it."""
    credit_held: int = 0
    owner: str | None = None
    last_code: str | None
    last_detail: str | None


class RelayView(Record):
    url: str
    liveness: str
    versions: tuple[int, ...]
    bytes_sent: int


class Stats(Record):
    """GET /v1/stats: the run at a glance."""

    run: str
    newest_version: int | None
    last_version: int
    finished: bool
    waiting_for: str
    """One sentence: what the run waits for right now, and on whom."""
    ready_groups: int
    groups_needed: int
    open_leases: int
    queued_checks: int
    submissions: dict[str, int]
    """Counts by verdict code."""
    groups: dict[str, int] = Field(default_factory=dict)
    """Accepted groups by what became of them: ready, batched, dropped (no signal), stale."""
    unparseable: float = 0.0
    """Share of the accepted rollouts that gave no answer at all."""
    batches: int
    trained_groups: int
    generation_tokens_per_s: float
    latest: StepReport | None
    evaluations: tuple[Evaluation, ...]
    nodes: tuple[NodeView, ...]
    relays: tuple[RelayView, ...]
    bytes_published: int
    """Of all versions, as they are sent: deltas count as what they are."""
    ledger_seq: int
    server_time_s: float


class History(Record):
    """GET /v1/history: every step and every held-out evaluation."""

    steps: tuple[StepReport, ...]
    evaluations: tuple[Evaluation, ...]


Role = Literal["trainer", "validator", "relay", "admin"]
