"""From a lease to the table that answers it, and from a submission to its verdict."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from shoal.model.tokenizer import Tokenizer
from shoal.rollout.engine.api import Engine, Finished, Request
from shoal.rollout.worker.session import Session
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED, CODES, explain_code
from shoal.wire.lease import Lease
from shoal.wire.messages import LeaseStatus
from shoal.wire.rollouts import Rollout, RolloutTable
from shoal.wire.seeded_draw import sample_seed

FOLLOWED = 64
"""Submissions whose verdicts are still waited for. Older ones are forgotten here; the ledger has them."""


def make_requests(lease: Lease, tokenizer: Tokenizer) -> list[Request]:
    """Every sample of every prompt, each with the seed that a validator will draw from again."""
    return [
        Request(
            prompt_index=prompt_index,
            sample_index=sample_index,
            prompt_tokens=prompt_tokens,
            sample_seed=sample_seed(lease.seed, prompt_index, sample_index),
            max_new_tokens=lease.sampling.max_new_tokens,
            temperature=lease.sampling.temperature,
        )
        for prompt_index, prompt_tokens in enumerate(
            tuple(tokenizer.encode_prompt(text, chat=lease.chat)) for text in lease.prompts
        )
        for sample_index in range(lease.sampling.samples_per_prompt)
    ]


def generate(
    engine: Engine, requests: Sequence[Request], on_step: Callable[[int, int], None]
) -> list[Finished]:
    """Run the requests to their ends. `on_step(rows done, rows in all)` is called before each step and may raise."""
    engine.submit(requests)
    finished: list[Finished] = []
    while engine.has_work:
        on_step(len(finished), len(requests))
        finished.extend(engine.step())
    return finished


def make_table(lease: Lease, policy_version: int, finished: Iterable[Finished]) -> RolloutTable:
    return RolloutTable(
        lease_id=lease.lease_id, policy_version=policy_version, rows=tuple(map(to_rollout, finished))
    )


def to_rollout(row: Finished) -> Rollout:
    return Rollout(
        prompt_index=row.request.prompt_index,
        sample_index=row.request.sample_index,
        prompt_tokens=tuple(row.request.prompt_tokens),
        output_tokens=tuple(row.output_tokens),
        logprobs=tuple(row.logprobs),
        finish=row.finish,
        proof=row.proof,
    )


class Verdicts:
    """Follows what becomes of submissions, one question at a time, and says it in words."""

    def __init__(self, session: Session, log: Log) -> None:
        self._session, self._log = session, log
        self._awaited: deque[str] = deque(maxlen=FOLLOWED)
        self.credit = 0

    def follow(self, lease_id: str) -> None:
        self._awaited.append(lease_id)

    def ask_one(self) -> None:
        """About the oldest; it goes to the end of the queue while there is no verdict."""
        if not self._awaited:
            return
        lease_id = self._awaited.popleft()
        status = self._session.ask_status(lease_id)
        if status is None or status.code is None:
            self._awaited.append(lease_id)
        else:
            self._say(status)

    def ask_all(self) -> None:
        for _ in range(len(self._awaited)):
            self.ask_one()

    def _say(self, status: LeaseStatus) -> None:
        code = status.code or ""
        self.credit += status.credit
        if code == ACCEPTED:
            self._log.info(f"accepted, credit +{status.credit}", lease=status.lease_id, total=self.credit)
        elif code.startswith("void."):
            self._log.info(
                f"does not count: {explain_code(code)}", lease=status.lease_id, detail=status.detail
            )
        else:
            remedy = CODES[code].remedy if code in CODES else "see docs/threats.md"
            self._log.warning(
                f"refused: {explain_code(code)}",
                lease=status.lease_id,
                detail=status.detail,
                what_to_do=remedy,
            )
