"""The lease: one unit of work for one node, and the only reason a submission is looked at.

The seed is HMAC(epoch secret, lease id, node id), so neither side can shop for prompts: the coordinator has
committed to the secret in the ledger before, and reveals it after. Prompts follow from the seed; they stand in
the lease so that a worker needs no data set. See draw.py for how sampling follows from it.
"""

from typing import Annotated, Literal

from pydantic import Field

from shoal.wire.manifest import Blake3
from shoal.wire.record import Record, Sealable
from shoal.wire.run_spec import ProofSpec, Sampling, TaskSpec

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LeaseId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Purpose = Literal["train", "eval"]
Checks = Literal["full", "rewards"]
"""How a submission is checked: in full, or by the cheap checks that end in its rewards."""


class PolicyRef(Record):
    """A policy version by number and by the digest of its weights."""

    version: int = Field(ge=0)
    weights_digest: Blake3


class Lease(Sealable):
    lease_id: LeaseId
    run: str
    node: str
    purpose: Purpose
    """`train` feeds the trainer; `eval` poses held-out problems and only ever moves the held-out curve."""
    epoch: int
    """Which epoch secret the seed comes from."""
    seed: Hex32
    chunk: int = Field(ge=0)
    """Which part of the held-out set an `eval` lease poses; 0 for `train`."""
    policies: tuple[PolicyRef, ...]
    """Versions the work may be done with, newest last. All rows of a submission use the same one."""
    relays: tuple[str, ...]
    task: TaskSpec
    prompts: tuple[str, ...]
    chat: bool = False
    """Whether a prompt is a user's turn, put in the model's chat template, or plain text to go on from. It stands here
    so that a worker needs neither the task's code nor its data."""
    sampling: Sampling
    proof: ProofSpec
    max_bytes: int
    issued_at_s: float
    deadline_s: float
    unit: LeaseId | None = None
    """The lease whose work this is once more, because the node let it go; the seed is that one's. None: new work."""

    @classmethod
    def tag(cls) -> str:
        return "shoal/lease/1"

    @property
    def num_rows(self) -> int:
        return len(self.prompts) * self.sampling.samples_per_prompt


class Receipt(Sealable):
    """The coordinator's word that it holds a submission; the ledger event `seq` says the same to everybody."""

    lease_id: LeaseId
    node: str
    sha256: Sha256
    num_bytes: int
    policy_version: int
    received_at_s: float
    seq: int

    @classmethod
    def tag(cls) -> str:
        return "shoal/receipt/1"


class Verdict(Record):
    """What a validator found: `accepted`, or a code of wire/codes.py, with the numbers behind it."""

    lease_id: LeaseId
    code: str
    detail: str
    rewards: tuple[float, ...] = ()
    """One per row in file order, from the swarm's own task code; empty unless accepted."""
    output_tokens: int = 0
    checks: Checks = "full"
    """Which checks it passed, if accepted."""
    evidence: dict[str, float | int | str] = Field(default_factory=dict)
