"""What the page shows: a run at one moment, in the sections that the feed sends when they change. docs/page.md."""

from typing import Literal

from pydantic import Field

from shoal.wire.messages import Evaluation, NodeView, RelayView
from shoal.wire.record import Record

Stage = Literal["generate", "upload", "queue", "check", "train", "broadcast"]


class RunTerms(Record):
    """What stays the same for the whole run."""

    run: str
    run_key: str
    software: str
    task: str
    options: dict[str, int | float | str]
    samples_per_prompt: int
    max_lag: int
    last_version: int
    started_at_s: float | None
    """When version 0 was published."""


class Now(Record):
    """Where the run stands."""

    newest_version: int | None
    finished: bool
    waiting_for: str
    ready_groups: int
    groups_needed: int
    open_leases: int
    queued_checks: int
    live_workers: int
    generation_tokens_per_s: float
    """Of work that was checked and accepted, over the last minute."""
    trained_groups: int
    batches: int
    dropped_groups: int
    stale_groups: int
    unparseable: float
    bytes_published: int
    server_time_s: float


class Curve(Record):
    """The steps as columns. Where there are more than fit, neighbours are averaged: `steps_per_point` of them."""

    steps_per_point: int
    version: tuple[int, ...]
    reward: tuple[float, ...]
    lag: tuple[float, ...]
    lag_max: tuple[int, ...]
    wait_s: tuple[float, ...]
    train_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    """Of the trainer."""


class CodeCount(Record):
    code: str
    words: str
    count: int


class WorkerView(NodeView):
    """A node with what the page adds: the last verdict in words, and its speed by what was accepted of it."""

    words: str
    verified_tokens_per_s: float


class Span(Record):
    """One bar of the timeline. Times are seconds before `Timeline.end_s`, as negative numbers."""

    stage: Stage
    lane: str
    """Whose doing: a node's id, or `trainer`, or `validator`."""
    start_s: float
    end_s: float
    version: int | None
    code: str | None = None
    """Of a check: the verdict."""
    purpose: str = "train"


class Timeline(Record):
    end_s: float
    span_s: float
    spans: tuple[Span, ...]


class Release(Record):
    """What one version cost to broadcast."""

    version: int
    num_bytes: int
    """As it is sent: a delta counts as what it is."""
    published_at_s: float


class Sample(Record):
    """One answer that a validator checked and graded, as its tokenizer spells it, cut where it is long."""

    lease_id: str
    node: str
    policy_version: int
    prompt: str
    answer: str
    reward: float
    given_at_s: float


class Head(Record):
    seq: int
    hash: str
    time_s: float
    type: str


class Snapshot(Record):
    """GET /v1/page. Each field is one section; GET /v1/events sends an object with those that changed."""

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


class WorkItem(Record):
    """One lease of a node, and how it ended."""

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


class NodePage(Record):
    """GET /v1/nodes/{node}/page: a node, why it is trusted as it is, and its last leases, newest first."""

    node: WorkerView
    trust_reason: str
    software: str
    enrolled_at_s: float
    last_seen_s: float | None
    work: tuple[WorkItem, ...]
    samples: tuple[Sample, ...] = Field(default=())
