"""The inbox: asks the coordinator for the next batch and fetches the files its groups are in.

The batch of a version is the same answer for ever, so asking again after a crash neither loses nor repeats a group.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from shoal.net.http_client import SignedClient
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, build_batch
from shoal.wire.codes import Rejected
from shoal.wire.messages import Batch
from shoal.wire.rollouts import RolloutTable, TableLimits, decode

OBJECT_DEADLINE_S = 120.0
MAX_WORDS = 300
"""Of a sentence in a step's report."""
# The validator has held the file against its lease; here a limit only keeps a broken one from filling the memory.
LIMITS = TableLimits(
    max_rows=1 << 16, max_prompt_tokens=1 << 17, max_output_tokens=1 << 17, max_proof_bytes=1 << 24
)


def most_heard(reasons: Sequence[str]) -> str:
    """On whom a wait was spent: the last sentence of the kind heard most often, "" if there was no wait.

    The coordinator's sentences begin with whom it waits for ("workers: ", "a validator: ", "rollouts: ").
    """
    if not reasons:
        return ""
    ((kind, _),) = Counter(reason.partition(":")[0] for reason in reasons).most_common(1)
    return next(reason for reason in reversed(reasons) if reason.partition(":")[0] == kind)[:MAX_WORDS]


class Inbox:
    """Batches of one run. `deadline_s` bounds the wait for one batch; `meanwhile` is called while it lasts, and may raise."""

    def __init__(
        self,
        client: SignedClient,
        config: TrainerConfig,
        *,
        max_lag: int,
        deadline_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._config = config
        self._max_lag = max_lag
        self._deadline_s = deadline_s
        self._meanwhile = meanwhile

    def take(self, version: int) -> TrainBatch:
        """What the step from `version` trains on; waits for it."""
        reasons: list[str] = []

        def heard(reason: str) -> None:
            reasons.append(reason)
            self._meanwhile()

        batch = self._client.get_until(
            f"rollouts for the step from version {version}",
            f"/v1/batches/{version}",
            Batch,
            deadline_s=self._deadline_s,
            heard=heard,
        )
        if batch.version != version:
            raise ValueError(
                f"asked for the batch of version {version}, the coordinator sent that of {batch.version}"
            )
        digests = dict.fromkeys(group.sha256 for group in batch.groups)
        tables = {sha256: self._fetch(sha256) for sha256 in digests}
        return build_batch(
            batch,
            tables,
            max_lag=self._max_lag,
            advantage=self._config.recipe.advantage,
            waited_on=most_heard(reasons),
        )

    def _fetch(self, sha256: str) -> RolloutTable:
        data = self._client.fetch_object_until(f"object {sha256}", sha256, deadline_s=OBJECT_DEADLINE_S)
        try:
            return decode(data, LIMITS)
        except Rejected as rejected:
            raise ValueError(
                f"object {sha256} was accepted, yet it is not a rollout table: {rejected}"
            ) from None
