"""The lease: one unit of work for one node. A submission without a lease is refused.

The seed is HMAC(epoch secret, lease id, node id). The coordinator commits to the secret in the ledger before it issues the
first lease of the epoch and reveals it after the last one ended, so neither side can choose the prompts. Prompts follow
from the seed; the lease contains them so that a worker needs no data set. seeded_draw.py shows how sampling follows from it.
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
"""How a submission is checked: by every check, or only by the cheap checks and the computation of rewards."""


class PolicyRef(Record):
    """Names a policy version by number and by the digest of its weights."""

    version: int = Field(ge=0)
    weights_digest: Blake3


class Message(Record):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Lease(Sealable):
    """One unit of work for one node, sealed by the run key: prompts, seed, allowed versions and deadline."""

    tag = "shoal/lease/1"
    lease_id: LeaseId
    run: str
    node: str
    purpose: Purpose
    """`train` is for training; `eval` poses held-out problems, whose results only go into the held-out curve."""
    epoch: int
    """Number of the epoch whose secret the seed comes from."""
    seed: Hex32
    chunk: int = Field(ge=0)
    """Number of the part of the held-out set that an `eval` lease poses; 0 for `train`."""
    policies: tuple[PolicyRef, ...]
    """Versions that may generate the rollouts, newest last. All rows of a submission use the same one."""
    relays: tuple[str, ...]
    """Where the weights are served: relays with at least two different keys, if there are that many."""
    origin: str = ""
    """URL at which the trainer serves them. A worker asks there if no relay delivers."""
    task: TaskSpec
    prompts: tuple[str, ...]
    chat: bool = False
    """True: a prompt is a user's turn for the model's chat template. False: a prompt is plain text to continue. The lease
    says it so that a worker needs neither the task's code nor its data."""
    contexts: tuple[tuple[Message, ...], ...] = ()
    """The turns before each prompt, which is the last user's turn; empty: there are none."""
    sampling: Sampling
    proof: ProofSpec
    max_bytes: int
    issued_at_s: float
    deadline_s: float
    attempts: tuple[int, ...] = ()
    """With difficulty sampling, the attempt that chose each problem; empty: the first. seeded_draw.py shows how seeds follow."""
    unit: LeaseId | None = None
    """The earlier lease whose work this one repeats, with the same seed, because the node did not deliver it. None: new work."""

    def context(self, prompt_index: int) -> tuple[Message, ...]:
        """Returns the turns before a prompt."""
        return self.contexts[prompt_index] if self.contexts else ()

    @property
    def num_rows(self) -> int:
        return len(self.prompts) * self.sampling.samples_per_prompt


class Receipt(Sealable):
    """The coordinator's signed confirmation that it stores a submission; ledger event `seq` records the same."""

    tag = "shoal/receipt/1"
    lease_id: LeaseId
    node: str
    sha256: Sha256
    num_bytes: int
    policy_version: int
    received_at_s: float
    seq: int


class Verdict(Record):
    """A validator's result: `accepted` or a code of wire/codes.py, with the numbers behind it."""

    lease_id: LeaseId
    code: str
    detail: str
    rewards: tuple[float, ...] = ()
    """One reward per row in file order, computed by the validator with the task's code; empty unless accepted."""
    output_tokens: int = 0
    checks: Checks = "full"
    """The checks that an accepted submission passed."""
    evidence: dict[str, float | int | str] = Field(default_factory=dict)
    transcript: Annotated[str, Field(max_length=3 << 20, pattern=r"^[A-Za-z0-9+/=]*$")] = ""
    """The answers as text (wire/transcript.py), compressed, in base64; empty unless accepted. Not in the ledger."""
