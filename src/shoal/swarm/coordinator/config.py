"""What an operator can set about the coordinator. The public terms of the run are in wire.run.RunSpec."""

from typing import Literal

from pydantic import Field

from shoal.swarm.coordinator.rules.compatibility import Demands
from shoal.wire.record import Record
from shoal.wire.run_spec import PROTOCOL


class CoordinatorConfig(Record):
    groups_per_step: int = Field(default=16, ge=1)
    """Accepted groups with signal that make one batch."""
    prompts_per_lease: int = Field(default=4, ge=1)
    lease_s: float = Field(default=120.0, gt=0)
    """From issue to submission. Raise it when `void.expired` is frequent; lower it when dead workers hold work up."""
    claim_s: float = Field(default=60.0, gt=0)
    """How long a validator may take before its claim is given to another."""
    heartbeat_s: float = Field(default=15.0, gt=0)
    """A node is late after three of these without a sign of life, offline after eight."""
    trusted_after: int = Field(default=3, ge=1)
    """Accepted submissions in a row that end a node's probation."""
    max_open_leases: int = Field(default=2, ge=1)
    """Most of a trusted node, which earns them by streaks; every other holds one at a time."""
    max_prompts_per_lease: int = Field(default=0, ge=0)
    """Leases of fast nodes grow up to this; 0: they never exceed prompts_per_lease. Those of slow nodes shrink."""
    check_rate: float = Field(default=0.05, ge=0, le=1)
    """Of a trusted node's submissions, at least this share gets every check; all others' get them all. 1 checks all."""
    hold_s: float = Field(default=24 * 3600.0, ge=0)
    """Credit is held so long before it is final; while held, what was taken on trust can be revoked."""
    credit_factor: float = Field(default=1.0, gt=0, le=1e6)
    """Credit is output tokens times this: what a token of this run's model is worth among runs."""
    min_software: str = Field(default="", pattern=r"^(shoal [0-9]+\.[0-9]+(\.[0-9]+)?)?$")
    """Older clients ("shoal 0.2.0") are outdated, and get no leases once grace_s has passed."""
    grace_s: float = Field(default=24 * 3600.0, ge=0)
    admission: Literal["open", "invite", "allow", "work", "stake"] = "open"
    """What it takes to enrol: docs/operating.md."""
    work_bits: int = Field(default=20, ge=1, le=40)
    """Of the proof of work: each bit doubles it; 20 are about a second."""
    stake_per_lease: int = Field(default=1, ge=1)
    """Of the stake: a balance of n times this may hold n leases, and a rejection takes this much."""
    stale: Literal["drop", "wait"] = "wait"
    """Lease only what will still count when its turn comes, or never let a node wait and drop what is too old then."""
    leases_per_epoch: int = Field(default=64, ge=1)
    """One secret seeds this many leases, and is revealed when the last of them has ended."""
    eval_every: int = Field(default=10, ge=1)
    """Held-out evaluation of version 0, every this many versions, and the last."""
    eval_prompts: int = Field(default=64, ge=0)
    eval_samples: int = Field(default=4, ge=1)
    max_upload_bytes: int = Field(default=64 << 20, ge=1)
    retry_s: float = Field(default=0.5, gt=0)
    """What a client is told to wait when there is nothing for it yet."""
    requests_per_s: float = Field(default=50.0, gt=0)
    """Of one node's key; ten times as many at once."""
    entry_points: tuple[str, ...] = ()
    """Other URLs of this run's coordinators, told to clients, who use them when the one they know does not answer."""
    database: str = ""
    """postgresql://USER@HOST/NAME; empty: SQLite in the coordinator's folder."""
    store: str = ""
    """s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME; empty: uploads are kept in the coordinator's folder."""
    authorities: tuple[str, ...] = ()
    """HOST:PORT names by which clients reach this coordinator, besides the address it listens on.

    A signature counts only for the name it was made for, so a signed request cannot be carried over from another
    server. On a wildcard address (0.0.0.0) without this list any name is taken.
    """

    def demands(self) -> Demands:
        return Demands(protocol=PROTOCOL, min_software=self.min_software, grace_s=self.grace_s)

    def terms(self) -> dict[str, int | float | str]:
        """What trust and credit follow from, besides the events: it stands in the ledger, so that anybody can add up."""
        names = ("trusted_after", "check_rate", "hold_s", "credit_factor", "admission", "stake_per_lease")
        return {name: getattr(self, name) for name in names}
