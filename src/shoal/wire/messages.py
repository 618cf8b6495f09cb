"""Bodies of the coordinator's routes (docs/wire/api.md), one record each. The sender of a body is the key that signed its request."""

from typing import Annotated

from pydantic import Field

from shoal.wire.delegation import Delegation, RelayDelegation
from shoal.wire.lease import Checks, Hex32, Lease, LeaseId, Sha256
from shoal.wire.ledger import Rederived, TokenCounts
from shoal.wire.manifest import Manifest
from shoal.wire.proof_noise import LaterNoise, NoiseDoubt
from shoal.wire.record import Count, Record, Sealed, Url
from shoal.wire.requirements import Capabilities, Offer
from shoal.wire.run_spec import RunSpec

ABANDON_REASON = 100
"""Most characters of the reason for which a lease is given back. The ledger keeps it for ever."""
ShortText = Annotated[str, Field(max_length=300, pattern=r"^[^\x00]*$")]
"""A text of at most 300 characters without NUL, which PostgreSQL cannot store."""
SoftwareName = Annotated[str, Field(max_length=64, pattern=r"^[^\x00]*$")]
"""Short, because the ledger keeps it for every key, and keys are free."""


class ProblemDetails(Record):
    """The error response of every route (RFC 9457, with the refusal code and the remedy)."""

    code: str
    detail: str
    fix: str
    retry_after_s: float | None = None
    server_time_s: float


class Info(Record):
    """GET /v1/info: everything a new node needs besides the URL."""

    protocol: int
    software: str
    run_key: str
    spec: RunSpec
    newest_version: int | None
    finished: bool
    server_time_s: float
    admission: str = "open"
    """The condition for enrolling: `open`, `invite`, `allow`, `work` or `stake`."""
    work_bits: int = 0
    """Leading zero bits that admission by proof of work asks for (shoal.wire.delegation.solve_work)."""
    credit_factor: float = 1.0
    """Credit is verified output tokens times this."""
    hold_s: float = 0.0
    """Seconds after which credit is final."""
    min_software: str = ""
    """Clients older than this are outdated."""
    entry_points: tuple[Url, ...] = ()
    """Other URLs of the same run."""
    noise_doubt: NoiseDoubt | None = None  # if set, the trainer repeats the calibration


class RunView(Offer):
    """A run as the list of runs shows it."""

    task: str
    newest_version: int | None
    last_version: int
    weights_bytes: int
    """Bytes of the newest version: a worker must fetch and store them."""
    admission: str
    live_workers: int
    entry_points: tuple[Url, ...]
    relays: tuple[Url, ...]  # only live relays


class RunList(Record):
    """GET /v1/runs: the runs of this coordinator. The run that needs workers most comes first."""

    runs: tuple[RunView, ...]


class Enrol(Record):
    """POST /v1/enrol"""

    protocol: Count
    software: SoftwareName
    delegation: Sealed[Delegation] | None = None
    """An owner's statement that this key works for it."""
    invite: Annotated[str, Field(max_length=100)] = ""
    work: Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")] = ""
    """The nonce of the proof of work, if the run asks for one."""


class Enrolled(Record):
    """The answer to POST /v1/enrol."""

    node: str
    trust: str
    run_key: str


class OpenSession(Record):
    """POST /v1/session"""

    software: SoftwareName
    capabilities: Capabilities | None = None
    """What the machine has. Send it only to a coordinator that lists the feature `capabilities`."""


class Session(Record):
    """The answer to POST /v1/session. A higher epoch invalidates every older session of the same key."""

    epoch: int
    heartbeat_s: float


class Heartbeat(Record):
    """POST /v1/heartbeat"""

    epoch: Count
    phase: ShortText
    policy_version: Count | None = None
    tokens_per_s: float = Field(default=0.0, ge=0, le=1e12)


class HeartbeatReply(Record):
    """The answer to a heartbeat."""

    finished: bool
    """True: the run is over, and the client should exit."""
    next_in_s: float


class AskLease(Record):
    """POST /v1/leases"""

    epoch: Count
    holds: Annotated[tuple[LeaseId, ...], Field(max_length=256)] | None = None
    """Leases that the node knows. An open lease that is not among them is sent again, because its answer was lost. None: the node
    does not report its leases."""


class AskUpload(Record):
    """POST /v1/leases/{id}/upload"""

    epoch: Count
    num_bytes: Count = Field(gt=0)
    sha256: Sha256


class Upload(Record):
    """Where to PUT exactly the announced bytes. The coordinator chooses the name."""

    path: str
    """Path at the coordinator; empty if the bytes go to an object store."""
    expires_at_s: float
    url: Annotated[str, Field(max_length=4096, pattern=r"^(https?://[^\s]+)?$")] = ""
    """URL at the object store. Size, digest and create-only are signed (docs/wire/api.md, "Object stores")."""


class Submit(Record):
    """POST /v1/leases/{id}/submit. A repeated request gets the same receipt."""

    epoch: Count
    num_bytes: Count = Field(gt=0)
    sha256: Sha256
    policy_version: Count


class Abandon(Record):
    """POST /v1/leases/{id}/abandon"""

    epoch: Count
    reason: Annotated[str, Field(max_length=ABANDON_REASON, pattern=r"^[^\x00]*$")]


class Appeal(Record):
    """POST /v1/leases/{id}/appeal: the node claims that a rejection was wrong."""

    text: Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]*$")]


class Leave(Record):
    """POST /v1/leave: the node wants no more leases. It may still deliver those it holds."""

    epoch: Count


class RevokeKey(Record):
    """POST /v1/keys/revoke, signed by the owner: the node's key is no longer valid."""

    node: Hex32
    reason: ShortText


class AdminOrder(Record):
    """POST /v1/admin/{action}: an action of the operator. The ledger records it with its reason."""

    reason: Annotated[str, Field(min_length=3, max_length=300, pattern=r"^[^\x00]*$")]
    subject: Annotated[str, Field(max_length=100, pattern=r"^[^\x00]*$")] = ""
    """The node, owner, lease or invitation that the action is about; docs/guides/operator.md says which for each action."""
    amount: Annotated[int, Field(ge=-(2**53), le=2**53)] = 0


class LeaseStatus(Record):
    """GET /v1/leases/{id}"""

    lease_id: LeaseId
    state: str
    code: str | None
    detail: str | None
    credit: int


class AskClaim(Record):
    """The request of POST /v1/checks/claim. An empty body asks with the defaults."""

    validator: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-z]*$")] = ""
    """A random name of the process: a claim that ran out is given to another one first."""
    fresh: bool = False
    """True: only submissions whose claims never ran out."""


class Claim(Record):
    """POST /v1/checks/claim (validator): one submission to check before `deadline_s`."""

    lease: Lease
    policy_version: int
    sha256: Sha256
    num_bytes: int
    received_at_s: float
    deadline_s: float
    copy_of: str | None
    """The node whose submission of the same bytes was accepted before, if any."""
    lapses: int = 0
    """Claims of this submission that ran out. A validator checks a submission with lapses alone."""
    checks: Checks = "full"
    """`rewards`: the draw did not choose this submission, so the cheap checks and the rewards are enough; no prefill."""
    relays: tuple[str, ...] = ()
    """Relays that serve the version now; those of the lease may have gone offline."""
    origin: str = ""
    """Where the trainer serves its versions now, for when no relay delivers."""
    calibrations: Count = 0  # repeated so far; a validator that knows fewer asks for the terms again


class RelayReport(Record):
    """POST /v1/relays (relay): its URL, the versions it stores, and the bytes it sent. It counts for the relay's own URL only."""

    url: Url
    versions: Annotated[tuple[Count, ...], Field(max_length=1000)]
    bytes_sent: Count = 0
    delegation: Sealed[RelayDelegation] | None = None
    """The operator's statement that the signing key is the relay at `url`. Without it the report is refused."""


class Origin(Record):
    """GET /v1/origin (relay): the URL where the trainer serves the versions that it publishes."""

    url: Url


class TaskFigures(Record):
    """The part of one task in a step. Means are None without rollouts."""

    groups: int
    """Groups of the batch."""
    reward_mean: float | None
    """Mean reward of the rollouts that the step trained on."""
    accepted_groups: int
    """Groups accepted since the last batch, with and without signal."""
    accepted_rollouts: int
    accepted_reward_mean: float | None
    dropped_groups: int
    """Those of the accepted groups whose rewards were all equal."""
    answer_tokens_mean: float = 0.0
    """Mean number of output tokens of the rollouts that the step trained on."""


class StepReport(Record):
    """The trainer's figures of one step; `version` is the version that the step produced."""

    version: int
    loss: float
    reward_mean: float
    """Mean reward of the rollouts that the step trained on. Groups without signal are not among them."""
    groups: int
    dropped_groups: int
    """Accepted groups whose rewards were all equal. They carry no signal and are not trained on."""
    dropped_share: float = 0.0
    """Share of the rollouts accepted since the last batch that are in dropped groups: inference that trained nothing."""
    unparseable: float = 0.0
    """Share of the same rollouts that contain no answer at all. Wrong answers are not counted."""
    rollouts: int
    tokens: int
    lag_mean: float
    lag_max: int
    grad_norm: float
    """Norm before clipping; the largest of the step's updates."""
    clip_fraction: float
    logprob_gap: float
    """Mean |engine - trainer| log-prob on the batch, before the update."""
    learning_rate: float
    wait_s: float
    train_s: float
    tokens_per_s: float
    # The fields below have defaults because older ledgers contain reports without them.
    accepted_reward_mean: float | None = None
    """Mean reward of every rollout accepted since the last batch, with and without signal; None if there was none."""
    accepted_rollouts: int = 0
    """Number of those rollouts. With few of them the mean jumps from step to step."""
    answer_tokens_mean: float = 0.0
    """Mean number of output tokens of the rollouts that the step trained on."""
    warnings: tuple[ShortText, ...] = ()
    """What the trainer noticed in the last steps, with what to do."""
    stale_groups: int = 0
    """Accepted groups that became stale before they were used."""
    lags: tuple[int, ...] = ()
    """Rollouts by lag: lags[2] is the number of rollouts by a version two behind."""
    logprob_gap_max: float = 0.0
    logprob_gap_kl: float = 0.0
    """Estimate of the KL divergence from engine to trainer, from the same tokens."""
    gap_fresh_tokens: int = 0
    """Tokens of lag 0 that the gap was measured on. 0: it was measured on stale tokens, and includes how far the policy moved."""
    entropy: float = 0.0
    """Mean entropy, in nats, of the distributions at the trained tokens."""
    kl: float = 0.0
    """Estimate of the KL divergence from version 0, per token; 0 if the trainer keeps no reference."""
    corrected_fraction: float = 0.0
    """Share of tokens whose weight the gap correction capped or set to 0."""
    optimizer_steps: int = 1
    waited_on: ShortText = ""
    """What the batch was waiting for, in the coordinator's words."""
    publish_exposed_s: float = 0.0
    """Seconds that training stood still for a publication: its capture, or the end of the one before."""
    disk_bytes: int = 0
    checkpoint_exposed_s: float = 0.0
    """Seconds that training stood still for a checkpoint."""
    train_passes: int = 3
    """Arithmetic of training on a token, in forward passes: 3, and 1 each for recomputation, recomputed log-probs and KL."""
    tasks: dict[str, TaskFigures] = Field(default_factory=dict)
    """The figures of each task, by its label."""
    generate_s: float = 0.0
    """Mean seconds from lease to upload of a submission that the step trained on. Workers generate beside each other."""
    check_s: float = 0.0


class Announce(Record):
    """POST /v1/policies (trainer): announces a published version. `report` is None for version 0."""

    manifest: Sealed[Manifest]
    origin_url: Url
    report: StepReport | None
    rederived: Rederived | None = None
    """Set if the version was announced before and was made again after a crash."""
    noise: LaterNoise | None = None
    """A new calibration, measured with this version, that judges the work of this version and of later ones."""


class Recorded(Record):
    """The answer to a request that the ledger records: `seq` is the number of its event."""

    seq: int


class Group(Record):
    """All samples of one prompt of an accepted submission: rows of one stored file, with the rewards that a validator computed."""

    group_id: str
    lease_id: LeaseId
    sha256: Sha256
    prompt_index: int
    policy_version: int
    rewards: tuple[float, ...]
    task: str = ""
    """Label of its task."""


class Batch(Record):
    """GET /v1/batches/{version} (trainer): the groups that the step from `version` trains on. The answer never changes."""

    version: int
    groups: tuple[Group, ...]
    dropped_groups: int
    stale_groups: int
    reward_mean: float
    """Mean reward of the groups in this batch."""
    accepted_reward_mean: float | None = None
    accepted_rollouts: int = 0
    dropped_share: float = 0.0
    unparseable: float = 0.0
    tasks: dict[str, TaskFigures] = Field(default_factory=dict)
    generate_s: float = 0.0
    check_s: float = 0.0


class Evaluation(Record):
    """The result of one held-out evaluation of one policy version."""

    version: int
    reward_mean: float
    rollouts: int
    complete: bool
    answer_tokens_mean: float = 0.0
    """Mean number of output tokens of an answer."""
    task: str = ""
    """Label of the evaluation."""
    samples: int = 0
    """Answers to each prompt, the k of the figures below."""
    pass_at_1: float = 0.0
    """Share of right answers."""
    pass_at_k: float = 0.0
    """Share of prompts with at least one right answer."""
    majority: float = 0.0
    """Share of prompts whose most frequent answer is right."""


class NodeView(Record):
    """The public state of a node."""

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
    """Held and final credit, without what was revoked."""
    credit_held: int = 0
    owner: str | None = None
    last_code: str | None
    last_detail: str | None
    name: str = ""
    """The name that `shoal run` gave it; empty for a node that it did not start."""


class RelayView(Record):
    """The public state of a relay."""

    url: str
    liveness: str
    versions: tuple[int, ...]
    """The announced versions that it says it has."""
    bytes_sent: int
    key: str = ""
    problem: str = ""
    """Why leases do not name it, if it is live: the coordinator tried the URL and it does not work."""


class RunWarning(Record):
    """Something that the run's owner should know, with what to do about it."""

    source: str
    """The role that noticed it, such as `trainer`."""
    text: str
    version: int | None = None
    time_s: float | None = None


class Stats(Record):
    """GET /v1/stats: the current state of the run."""

    run: str
    newest_version: int | None
    last_version: int
    finished: bool
    waiting_for: str
    """One sentence that says what the run is waiting for now, and for which role."""
    ready_groups: int
    groups_needed: int
    open_leases: int
    queued_checks: int
    submissions: dict[str, int]
    """Number of ended leases by code."""
    groups: dict[str, int] = Field(default_factory=dict)
    """Number of accepted groups by state: ready, held (its node awaits a full check), batched, dropped (no signal), stale, withdrawn."""
    unparseable: float = 0.0
    """Share of the accepted rollouts that contain no answer at all."""
    batches: int
    trained_groups: int
    generation_tokens_per_s: float
    latest: StepReport | None
    evaluations: tuple[Evaluation, ...]
    nodes: tuple[NodeView, ...]
    relays: tuple[RelayView, ...]
    origin: str = ""
    """Where the trainer serves the versions that it publishes; empty before version 0."""
    bytes_published: int
    """Bytes sent for all versions; of a delta, the bytes of the delta."""
    tokens: TokenCounts | None = None
    ledger_seq: int
    server_time_s: float
    warnings: tuple[RunWarning, ...] = ()
    """The newest warnings of the trainer, and what `shoal run` noticed about the processes it started, oldest first."""


class History(Record):
    """GET /v1/history: every step and every held-out evaluation."""

    steps: tuple[StepReport, ...]
    evaluations: tuple[Evaluation, ...]
