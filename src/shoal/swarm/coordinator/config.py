"""What an operator can set about the coordinator. The public terms of the run are in wire.run.RunSpec."""

from typing import Literal

from pydantic import Field

from shoal.wire.record import Record


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
    """Of a trusted node; every other holds one at a time."""
    stale: Literal["drop", "wait"] = "drop"
    """Work ahead of the trainer and drop what is too old when its turn comes, or lease only what will still count."""
    leases_per_epoch: int = Field(default=64, ge=1)
    """One secret seeds this many leases, and is revealed when the last of them has ended."""
    eval_every: int = Field(default=10, ge=1)
    """Held-out evaluation of version 0, every this many versions, and the last."""
    eval_prompts: int = Field(default=64, ge=0)
    eval_samples: int = Field(default=4, ge=1)
    max_upload_bytes: int = Field(default=64 << 20, ge=1)
    retry_s: float = Field(default=0.5, gt=0)
    """What a client is told to wait when there is nothing for it yet."""
    authorities: tuple[str, ...] = ()
    """HOST:PORT names by which clients reach this coordinator, besides the address it listens on.

    A signature counts only for the name it was made for, so a signed request cannot be carried over from another
    server. On a wildcard address (0.0.0.0) without this list any name is taken.
    """
