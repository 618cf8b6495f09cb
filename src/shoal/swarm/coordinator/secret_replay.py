"""Repeats, from a ledger, the commitments to secrets and the draws of checks that were made with them. Pure functions."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.swarm.coordinator.rules.trust import gets_every_check
from shoal.swarm.coordinator.task_choices import ReplayedLease

FindLease = Callable[[str], ReplayedLease]
"""Returns a lease by its id; raises CorruptData if it was never issued."""


class Contradiction(Exception):
    """An event contradicts the events before it."""


class RecordedDraw(NamedTuple):
    """The draw that a verdict claims. It can be checked once the epoch's secret is revealed."""

    lease_id: str
    epoch: int
    rate: float
    checks: str


@dataclass
class ReplayedSecrets:
    """The secrets of all epochs. Its methods raise Contradiction."""

    find: FindLease
    commitments: dict[int, str] = field(default_factory=dict)
    revealed: dict[int, bytes] = field(default_factory=dict)
    committed_seq: dict[int, int] = field(default_factory=dict)
    revealed_seq: dict[int, int] = field(default_factory=dict)
    """Numbers of the events that committed to the secret of each epoch and revealed it."""
    unchecked_draws: list[RecordedDraw] = field(default_factory=list)

    def commit(self, body: dict[str, Any], seq: int) -> None:
        if body["epoch"] in self.commitments:
            raise Contradiction(f"epoch {body['epoch']} is committed a second time")
        self.commitments[body["epoch"]] = body["commitment"]
        self.committed_seq[body["epoch"]] = seq

    def reveal(self, body: dict[str, Any], seq: int) -> None:
        secret = bytes.fromhex(body["secret"])
        if hashlib.sha256(secret).hexdigest() != self.commitments.get(body["epoch"]):
            raise Contradiction(f"the secret of epoch {body['epoch']} does not match its commitment")
        self.revealed[body["epoch"]] = secret
        self.revealed_seq.setdefault(body["epoch"], seq)
        self._check_draws()

    def hidden(self) -> list[int]:
        """Returns the epochs whose secrets are not revealed."""
        return sorted(self.commitments.keys() - self.revealed.keys())

    def add_draw(self, draw: RecordedDraw) -> None:
        """Adds a draw, and checks that its secret was committed to, and not known, when the submission came.

        Otherwise the operator or the node could have chosen the draw.
        """
        received_seq = self.find(draw.lease_id).received_seq
        committed, revealed = self.committed_seq.get(draw.epoch), self.revealed_seq.get(draw.epoch)
        known = revealed is not None and revealed < received_seq
        if committed is None or committed > received_seq or known:
            raise Contradiction(
                f"lease {draw.lease_id} was drawn with the secret of epoch {draw.epoch}, which was not committed, or known already"
            )
        self.unchecked_draws.append(draw)
        self._check_draws()

    def _check_draws(self) -> None:
        """Checks the draws whose secrets are revealed, and keeps the others."""
        unchecked = []
        for draw in self.unchecked_draws:
            sha256 = self.find(draw.lease_id).sha256
            if draw.epoch not in self.revealed or sha256 is None:
                unchecked.append(draw)
            # The opposite is allowed: a node that lost its trust after the draw gets every check.
            elif draw.checks != "full" and gets_every_check(
                self.revealed[draw.epoch], draw.lease_id, sha256, draw.rate
            ):
                raise Contradiction(
                    f"the draw gave lease {draw.lease_id} every check, the ledger says {draw.checks}"
                )
        self.unchecked_draws = unchecked
