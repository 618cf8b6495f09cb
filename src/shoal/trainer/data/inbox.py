"""Asks the coordinator for the next batch and fetches the rollout tables of its groups.

The coordinator always gives the same batch for a version, so asking again after a crash neither loses nor repeats a group.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, build_batch
from shoal.wire.codes import Rejected
from shoal.wire.messages import Batch
from shoal.wire.rollouts import RolloutTable, TableLimits, decode

OBJECT_DEADLINE_S = 120.0
MAX_REASON_CHARS = 300
"""Longest reason in a step's report."""
# The validator has compared the file with its lease; these limits only keep a broken one from filling the memory.
LIMITS = TableLimits(
    max_rows=1 << 16, max_prompt_tokens=1 << 17, max_output_tokens=1 << 17, max_proof_bytes=1 << 24
)


def main_reason(reasons: Sequence[str]) -> str:
    """Returns the newest reason of the most frequent kind, or "" if there was no wait.

    The coordinator's reasons begin with what it waits for ("workers: ", "a validator: ", "rollouts: ").
    """
    if not reasons:
        return ""
    ((kind, _),) = Counter(reason.partition(":")[0] for reason in reasons).most_common(1)
    return next(reason for reason in reversed(reasons) if reason.partition(":")[0] == kind)[:MAX_REASON_CHARS]


class Inbox:
    """Fetches the batches of one run. `temperatures` are those of its tasks, by title.

    `while_waiting` is called during a wait for a batch, and may raise to end it.
    """

    def __init__(
        self,
        client: SignedClient,
        config: TrainerConfig,
        *,
        max_lag: int,
        temperatures: Mapping[str, float],
        deadline_s: float,
        while_waiting: Callable[[], None],
    ) -> None:
        self._client = client
        self._config = config
        self._max_lag = max_lag
        self._temperatures = temperatures
        self._deadline_s = deadline_s
        self._while_waiting = while_waiting

    def take(self, version: int) -> TrainBatch:
        """Waits for the batch of the step from `version`, for `deadline_s` at most, and returns its samples."""
        reasons: list[str] = []

        def note_reason(failure: Refused | Unreachable) -> None:
            reasons.append(failure.problem.detail if isinstance(failure, Refused) else str(failure))
            self._while_waiting()

        batch = self._client.call_until(
            f"rollouts for the step from version {version}",
            "GET",
            f"/v1/batches/{version}",
            None,
            Batch,
            deadline_s=self._deadline_s,
            heard=note_reason,
        )
        if batch.version != version:
            raise ValueError(
                f"asked for the batch of version {version}, the coordinator sent the batch of version {batch.version}"
            )
        digests = dict.fromkeys(group.sha256 for group in batch.groups)
        tables = {sha256: self._fetch(sha256) for sha256 in digests}
        return build_batch(
            batch,
            tables,
            max_lag=self._max_lag,
            advantage=self._config.recipe.advantage,
            temperatures=self._temperatures,
            waited_on=main_reason(reasons),
        )

    def _fetch(self, sha256: str) -> RolloutTable:
        data = self._client.fetch_object_until(f"object {sha256}", sha256, deadline_s=OBJECT_DEADLINE_S)
        try:
            return decode(data, LIMITS)
        except Rejected as rejected:
            raise ValueError(
                f"object {sha256} was accepted by the coordinator but is not a rollout table: {rejected}"
            ) from None
