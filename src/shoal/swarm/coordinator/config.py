"""The settings of the coordinator. The public terms of the run are in shoal.wire.run_spec.RunSpec."""

from typing import Literal, Self

from pydantic import Field, model_validator

from shoal.wire.record import Record
from shoal.wire.run_spec import EvalSpec, RunSpec

NOTICES_FILE, NAMES_FILE = "notices.jsonl", "names.json"
"""Files of `shoal run` in the coordinator's folder: a RunWarning on each line, and the workers' names by node id."""


class CoordinatorConfig(Record):
    """The `[coordinator]` section of a run file."""

    groups_per_step: int = Field(default=16, ge=1)
    """Accepted groups with signal in one batch."""
    prompts_per_lease: int = Field(default=4, ge=1)
    lease_s: float = Field(default=120.0, gt=0)
    """Seconds from issue to submission. Raise it when `void.expired` is frequent; lower it when dead workers delay the run."""
    claim_s: float = Field(default=60.0, gt=0)
    """Seconds that a validator may take before another one gets its claim."""
    heartbeat_s: float = Field(default=15.0, gt=0)
    """Seconds between heartbeats. A node is late after three of them without a request, offline after eight."""
    trusted_after: int = Field(default=3, ge=1)
    """Accepted submissions in a row that end a node's probation."""
    loss_half_life_s: float = Field(default=0.0, ge=0)
    """Seconds in which half of a node's, owner's or network's lost leases is forgotten; 0: 15 times lease_s."""
    max_open_leases: int = Field(default=3, ge=1)
    """Most leases that a trusted node may hold; it earns them by streaks. Three: one is uploaded, one generated, one fetched
    ahead. Every other node holds one at a time."""
    max_prompts_per_lease: int = Field(default=0, ge=0)
    """Most prompts in a lease of a fast node; 0: not more than prompts_per_lease. Leases of slow nodes are smaller."""
    check_rate: float = Field(default=1.0, ge=0, le=1)
    """Smallest share of a trusted node's submissions that get every check; 1 with `admission = "open"`. Other nodes'
    submissions always get every check."""
    max_unchecked_share: float = Field(default=0.25, ge=0, le=1)
    """Largest share of a batch that groups of submissions without every check may have."""
    hold_s: float = Field(default=24 * 3600.0, ge=0)
    """Seconds until credit is final. Before that, credit given without every check can be revoked."""
    credit_factor: float = Field(default=1.0, gt=0, le=1e6)
    """Credit per output token, which makes credit of runs with different models comparable."""
    min_software: str = Field(default="", pattern=r"^(shoal [0-9]+\.[0-9]+(\.[0-9]+)?)?$")
    """Clients older than this (for example "shoal 0.2.0") are outdated, and get no leases after grace_s."""
    grace_s: float = Field(default=24 * 3600.0, ge=0)
    admission: Literal["open", "invite", "allow", "work", "stake"] = "open"
    """The condition for enrolling: docs/guides/operator.md."""
    work_bits: int = Field(default=20, ge=1, le=40)
    """Size of the proof of work: each bit doubles the time; 20 bits take about a second."""
    stake_per_lease: int = Field(default=1, ge=1)
    """Stake that each open lease needs, and that a rejection costs."""
    stale: Literal["drop", "wait"] = "wait"
    """`wait`: lease only work that will not be stale when it is used. `drop`: keep nodes busy, and drop groups that become stale."""
    leases_per_epoch: int = Field(default=64, ge=1)
    """Number of leases whose seeds come from one secret. The secret is revealed when the last of them has ended."""
    eval_every: int = Field(default=10, ge=1)
    """Versions between held-out evaluations. Version 0 and the last version are always evaluated. This and the next two keys are
    for runs without [[eval]]."""
    eval_prompts: int = Field(default=64, ge=0)
    eval_samples: int = Field(default=4, ge=1)
    rollouts_mb: int = Field(default=256, ge=0)
    """Room in the database for answers as text, which the page and `shoal rollouts` show. When it is full, fewer and fewer of the
    older versions are kept. 0: none."""
    show_held_out: bool = False
    """Whether the page shows answers to held-out problems while the run goes on; they are shown when it is finished."""
    max_upload_bytes: int = Field(default=64 << 20, ge=1)
    retry_s: float = Field(default=0.5, gt=0)
    """Seconds that a client is told to wait when there is no work for it yet."""
    requests_per_s: float = Field(default=50.0, gt=0)
    """Requests per second that one node's key may send; a burst may have ten times as many."""
    try_relays: bool = True
    """Whether the coordinator fetches a manifest from a relay before leases name it. Set it to false where the coordinator cannot
    reach the URLs that workers use, for example behind a NAT without hairpinning."""
    entry_points: tuple[str, ...] = ()
    """Other URLs of this run's coordinators. Clients use them when the URL that they know does not answer."""
    database: str = ""
    """postgresql://USER@HOST/NAME; empty: SQLite in the coordinator's folder."""
    store: str = ""
    """s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME; empty: uploads are stored in the coordinator's folder."""
    authorities: tuple[str, ...] = ()
    """HOST:PORT names by which clients reach this coordinator, in addition to the address that it listens on.

    A signature is valid only for the name it was made for, so a signed request cannot be used at another server. On a
    wildcard address (0.0.0.0) without this list, any name is accepted.
    """

    @model_validator(mode="after")
    def _check_admission(self) -> Self:
        """Refuses to spare checks where keys are free: a caught liar would return with a new key."""
        if self.admission == "open" and self.check_rate < 1:
            raise ValueError(
                f'check_rate = {self.check_rate:g} with admission = "open": anybody can enrol any number of keys there, so every '
                'submission must get every check; leave check_rate at 1, or set admission to "invite", "allow" or "stake"'
            )
        return self

    def evaluations(self, spec: RunSpec) -> tuple[EvalSpec, ...]:
        """Returns the evaluations of a run: those of its terms, or the held-out part of each task."""
        if spec.evals or not self.eval_prompts:
            return spec.evals
        return tuple(
            EvalSpec(task=task, every=self.eval_every, prompts=self.eval_prompts, samples=self.eval_samples)
            for task in spec.tasks
        )

    def half_life_s(self) -> float:
        """Returns the half-life of lost leases."""
        return self.loss_half_life_s or 15 * self.lease_s

    def terms(self) -> dict[str, int | float | str]:
        """Returns the settings that trust and credit depend on. The ledger contains them, so that anybody can recompute both."""
        names = {
            "trusted_after",
            "check_rate",
            "max_unchecked_share",
            "hold_s",
            "credit_factor",
            "admission",
            "stake_per_lease",
        }
        return self.model_dump(include=names)
