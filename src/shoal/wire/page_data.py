"""The data of the run's page: a snapshot in sections, which the page receives again when they change. docs/page.md."""

from typing import Literal

from pydantic import Field

from shoal.wire.lease import Checks
from shoal.wire.ledger import TokenCounts
from shoal.wire.messages import Evaluation, NodeView, RelayView, RunWarning
from shoal.wire.record import Record
from shoal.wire.transcript import SampleText

Stage = Literal["generate", "upload", "queue", "check", "train", "broadcast"]


class TaskTerms(Record):
    """A task of the run, or a held-out evaluation."""

    label: str
    name: str
    options: dict[str, bool | int | float | str]
    samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    weight: float = 0.0
    """Share of train leases, from 0 to 1; 0 for an evaluation."""
    every: int = 0
    """Versions between two evaluations; 0 for a task."""
    prompts: int = 0
    """Prompts of an evaluation."""


class RunTerms(Record):
    """The settings that stay the same for the whole run."""

    run: str
    run_key: str
    software: str
    task: str
    options: dict[str, bool | int | float | str]
    files: dict[str, str] = Field(default_factory=dict)
    """Names of the files among the options, whose values are digests."""
    samples_per_prompt: int
    max_lag: int
    last_version: int
    started_at_s: float | None
    """Time when version 0 was published."""
    tasks: tuple[TaskTerms, ...] = ()
    """All tasks that are trained on."""
    evals: tuple[TaskTerms, ...] = ()
    """All held-out evaluations."""


class Now(Record):
    """The current state of the run."""

    newest_version: int | None
    finished: bool
    waiting_for: str
    ready_groups: int
    held_groups: int
    """Groups of submissions without every check that wait for the next full check of their node."""
    groups_needed: int
    open_leases: int
    queued_checks: int
    live_workers: int
    generation_tokens_per_s: float
    """Tokens of accepted work per second, over the last minute."""
    trained_groups: int
    batches: int
    dropped_groups: int
    stale_groups: int
    unparseable: float
    bytes_published: int
    trainer_disk_bytes: int = 0
    """Bytes of the trainer's folder after the last step."""
    tokens: TokenCounts | None = None
    train_passes: int = 3
    """Arithmetic of training on a token, in forward passes; generating and checking one take 1 each."""
    server_time_s: float


class TaskCurve(Record):
    """One task's part of the steps, with as many points as the whole curve. None: no rollouts of the task."""

    reward: tuple[float | None, ...]
    """Mean reward of its rollouts that were trained on."""
    accepted_reward: tuple[float | None, ...]
    """Mean reward of all its accepted rollouts, with and without signal."""
    groups: tuple[int, ...]
    """Its groups in the batches."""
    answer_tokens: tuple[float | None, ...]


class Curve(Record):
    """The steps as columns. With too many steps for the plot, each point is the mean of `steps_per_point` neighbours."""

    steps_per_point: int
    version: tuple[int, ...]
    reward: tuple[float, ...]
    """Mean reward of the rollouts that were trained on."""
    accepted_reward: tuple[float, ...]
    """Mean reward of all accepted rollouts, with and without signal."""
    accepted_rollouts: tuple[int, ...]
    answer_tokens: tuple[float, ...]
    lag: tuple[float, ...]
    lag_max: tuple[int, ...]
    wait_s: tuple[float, ...]
    train_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    """The trainer's speed."""
    tasks: dict[str, TaskCurve] = Field(default_factory=dict)
    """The curves of each task, by its label."""
    loss: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    clip_fraction: tuple[float, ...] = ()
    grad_norm: tuple[float, ...] = ()
    kl: tuple[float, ...] = ()
    """Only zeros if the trainer keeps no reference."""
    dropped_share: tuple[float, ...] = ()
    generate_s: tuple[float, ...] = ()
    check_s: tuple[float, ...] = ()
    publish_s: tuple[float, ...] = ()
    """Seconds that training stood still for publications and checkpoints."""


class CodeCount(Record):
    """The number of leases that ended with a code."""

    code: str
    words: str
    count: int


class WorkerView(NodeView):
    """A node with two more values: the last verdict as a sentence, and the speed computed from accepted work."""

    words: str
    verified_tokens_per_s: float


class Span(Record):
    """One bar of the timeline. Times are relative to `Timeline.end_s`: negative numbers of seconds."""

    stage: Stage
    lane: str
    """The node's id, `trainer` or `validator`."""
    start_s: float
    end_s: float
    version: int | None
    code: str | None = None
    """The verdict, if the bar is a check."""
    purpose: str = "train"


class Timeline(Record):
    """What trainer, validators and workers did in the last `span_s` seconds before `end_s`."""

    end_s: float
    span_s: float
    spans: tuple[Span, ...]


class Release(Record):
    """The bytes that one version takes to send."""

    version: int
    num_bytes: int
    """Bytes as sent; of a delta, the bytes of the delta."""
    published_at_s: float


class Sample(Record):
    """One answer that a validator checked and graded, decoded to text and truncated if it is long."""

    lease_id: str
    node: str
    policy_version: int
    prompt: str
    answer: str
    reward: float
    given_at_s: float
    expected: str = ""
    """The right answer of the task, if it has one."""
    task: str = ""
    """Label of its task."""


class Head(Record):
    """The last event of the ledger."""

    seq: int
    hash: str
    time_s: float
    type: str


class Snapshot(Record):
    """GET /v1/page. Each field is one section; GET /v1/events sends objects with the sections that changed."""

    terms: RunTerms
    now: Now
    curve: Curve
    evaluations: tuple[Evaluation, ...]
    workers: tuple[WorkerView, ...]
    verdicts: tuple[CodeCount, ...]
    timeline: Timeline
    relays: tuple[RelayView, ...]
    releases: tuple[Release, ...]
    samples: tuple[Sample, ...]
    head: Head | None
    warnings: tuple[RunWarning, ...] = ()


class WorkItem(Record):
    """One lease of a node, with its result."""

    lease_id: str
    purpose: str
    state: str
    code: str | None
    words: str
    detail: str
    credit: int
    policy_version: int | None
    num_bytes: int | None
    issued_at_s: float
    received_at_s: float | None
    ended_at_s: float | None
    task: str = ""
    """Label of its task or evaluation."""


class NodePage(Record):
    """GET /v1/nodes/{node}/page: a node, the reason for its trust, and its last leases, newest first."""

    node: WorkerView
    trust_reason: str
    software: str
    enrolled_at_s: float
    last_seen_s: float | None
    work: tuple[WorkItem, ...]
    samples: tuple[Sample, ...] = Field(default=())


class RolloutGroup(Record):
    """All answers to one prompt, with the verdict on the submission that they are from."""

    group_id: str
    held_out: bool
    task: str
    policy_version: int
    node: str
    given_at_s: float
    prompt: str
    expected: str
    samples: tuple[SampleText, ...]
    state: str
    """`ready`, `held`, `dropped`, `stale`, `batched` or `withdrawn`; empty for held-out work, which is never trained on."""
    trained_version: int | None
    """The version from which the step that trained on it started; None if no step did."""
    code: str
    detail: str
    checks: Checks
    evidence: dict[str, float | int | str]
    """Numbers behind the verdict: `z_...` are standard scores over the whole submission, others are counts of the proofs."""


class RolloutPage(Record):
    """GET /v1/rollouts: groups that match, newest first. Ask again with `before` = `next` for older ones."""

    groups: tuple[RolloutGroup, ...]
    next: int | None
    """None: there are no older ones."""
    withheld: str = ""
    """Why nothing is shown, if it is not public yet."""
