"""The validator's process.

    claims ──▶ bytes ──▶ policy version ──▶ checks ──▶ verdicts
      ▲                                                  │
      └──────────────────────────────────────────────────┘

Claims that wait are taken several at a time, and those of one policy version share their prefills.

It keeps nothing that it could not lose: a claim that is not answered goes back into the coordinator's queue. What fails
on its own side (weights that cannot be had, a reader that does not start) ends as void.infra, never as blame.
"""

import secrets
import threading
import time
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import torch

from shoal.model.load_model import DTYPES, load_decoder
from shoal.net.http_client import Refused, SignedClient, Unreachable, fetch_files
from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.swarm.validator.crash_guard import Poison
from shoal.swarm.validator.judge import judge_claim, judge_many
from shoal.swarm.validator.loaded_versions import PolicyShelf
from shoal.swarm.validator.recompute import BATCH_TOKENS, DEVICE_BATCH_TOKENS, CannotCheck
from shoal.swarm.validator.table_reader import Reader, ReaderDown
from shoal.tasks import make_task
from shoal.tasks.datasets.file_options import file_digests, with_files_from
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
from shoal.wire.lease import Verdict
from shoal.wire.messages import Claim, Info, LeaseStatus
from shoal.wire.run_spec import PROTOCOL, RunSpec

IDLE_S = 10.0
"""How long to ask for work before asking whether the run is over."""
MAX_TOGETHER = 16
"""Submissions claimed at a time, as long as their tokens do not fill a prefill. A claim has a deadline, so not more than that."""
_SETTLED = ("request.conflict", "request.lease_closed", "request.not_found")
"""What the coordinator says to a verdict that came too late to count."""


class Ended(Enum):
    """Why a validator ended, in words."""

    FINISHED = "the run is finished"
    STOPPED = "stopped by request"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorConfig:
    coordinator: str
    """URL."""
    key: Path
    """The run's validator.key, from the coordinator's keys folder."""
    dir: Path
    """Holds the versions it fetched."""
    run_key: str | None = None
    """Public key of the run, if known beforehand; None takes what the coordinator says."""
    device: str = "cpu"
    num_threads: int = 0
    """For torch; 0 leaves torch's own choice."""
    max_loaded: int = 3
    """Policy versions in memory at once: at least max_lag + 1 saves loading the same ones again and again."""
    batch_tokens: int | None = None
    """Tokens of one prefill, padding included. More is faster until memory is full. None: as many as suit the device."""
    fetch_s: float = 120.0
    """How long to try for a policy version before its submissions are void."""
    deadline_s: float = 900.0
    """Of each wait for the coordinator itself."""

    @property
    def tokens_at_once(self) -> int:
        return self.batch_tokens or (BATCH_TOKENS if self.device == "cpu" else DEVICE_BATCH_TOKENS)


def run_validator(config: ValidatorConfig, *, stop: threading.Event) -> Ended:
    """Check submissions until the run is finished or `stop` is set.

    Raises ValueError for what its owner must put right, Refused if the coordinator does not take the key, DeadlinePassed
    if it cannot be reached.
    """
    log = Log("validator")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    client = SignedClient(config.coordinator, Key.load(config.key), log=log, stop=stop)
    try:
        with Reader() as reader:
            validator = Validator(config, client, reader, log=log)
            validator.startup()
            ended = validator.main_loop()
    except Stopped:
        ended = Ended.STOPPED
    except ReaderDown as down:
        raise ValueError(f"this machine cannot read submissions: {down}") from None
    finally:
        client.close()
    log.info(ended.value)
    return ended


class Validator:
    """`startup`, then `main_loop`, which ends when the run does or by Stopped."""

    def __init__(self, config: ValidatorConfig, client: SignedClient, reader: Reader, *, log: Log) -> None:
        self._config, self._client, self._reader, self._log = config, client, reader, log
        self._num_checked = 0

    def startup(self) -> None:
        """Meet the coordinator and check that it is the run we know."""
        config = self._config
        self._info = self._ask_info()
        if self._info.protocol != PROTOCOL:
            raise ValueError(
                f"{config.coordinator} speaks protocol {self._info.protocol} ({self._info.software}), this is protocol "
                f"{PROTOCOL}; install the version the run uses"
            )
        if config.run_key not in (None, self._info.run_key):
            raise ValueError(
                f"{config.coordinator} runs under key {self._info.run_key}, expected {config.run_key}; check the URL"
            )
        config.dir.mkdir(parents=True, exist_ok=True)
        self._poison = Poison(config.dir / "checking.json")
        self._shelf = PolicyShelf(
            config.dir / "policies",
            self._client,
            run_key=self._info.run_key,
            load=partial(load_decoder, dtype=DTYPES[self._info.spec.compute_dtype], device=config.device),
            max_loaded=config.max_loaded,
            fetch_s=config.fetch_s,
            log=self._log,
        )
        # Now, and not while a claim runs out: reading a data set takes a while, and may say that something is missing.
        make_task(self._spec_at_hand().task).problem("train", 0)
        self._log.info(f"checking for run {self._info.spec.run!r}", coordinator=config.coordinator)

    def main_loop(self) -> Ended:
        while (claim := self._next_claim()) is not None:
            claims = [claim, *self._waiting_claims(claim)]
            for checked, verdict in zip(claims, self._check_all(claims), strict=True):
                self._deliver(checked, verdict)
        return Ended.FINISHED

    def _next_claim(self) -> Claim | None:
        """The next submission to check; None when the run is finished."""
        while not self._info.finished:
            if self._client.stop.is_set():
                raise Stopped("stopped between two checks")
            try:
                return self._client.call_until(
                    "a submission to check", "POST", "/v1/checks/claim", None, Claim, deadline_s=IDLE_S
                )
            except DeadlinePassed:
                self._info = self._ask_info()  # the terms may change while a run is resumed
        return None

    def _waiting_claims(self, first: Claim) -> list[Claim]:
        """More that can be checked with the first one, as far as they are there already."""
        claims: list[Claim] = []
        tokens = _most_tokens(first)
        while len(claims) + 1 < MAX_TOGETHER and tokens < self._config.tokens_at_once:
            try:
                claim = self._client.call("POST", "/v1/checks/claim", None, Claim)
            except (Refused, Unreachable):
                break  # nothing waits, or the next turn will tell what is wrong
            claims.append(claim)
            tokens += _most_tokens(claim)
        return claims

    def _check_all(self, claims: list[Claim]) -> list[Verdict]:
        """A verdict on each, in the order of the claims."""
        try:
            return self._try_all(claims)
        except Stopped:
            for claim in claims:  # no fault of the submissions
                self._poison.end(claim.lease.lease_id)
            raise

    def _try_all(self, claims: list[Claim]) -> list[Verdict]:
        verdicts: dict[str, Verdict] = {}
        by_version: dict[int, list[tuple[bytes, Claim]]] = {}
        for claim in claims:
            begun = self._begin(claim)
            if isinstance(begun, Verdict):
                verdicts[claim.lease.lease_id] = begun
            else:
                by_version.setdefault(claim.policy_version, []).append((begun, claim))
        for submissions in by_version.values():
            for (_, claim), verdict in zip(submissions, self._judge(submissions), strict=True):
                verdicts[claim.lease.lease_id] = verdict
        return [verdicts[claim.lease.lease_id] for claim in claims]

    def _begin(self, claim: Claim) -> Verdict | bytes:
        """The bytes to judge, or a verdict that needs none."""
        if (refusal := judge_claim(claim)) is not None:
            return refusal
        if not self._poison.begin(claim.lease.lease_id):
            return _void(claim, "checking it ended the validator's process before")
        try:
            return self._fetch(claim)
        except CannotCheck as error:
            return _void(claim, str(error))

    def _judge(self, submissions: list[tuple[bytes, Claim]]) -> list[Verdict]:
        """Those of one policy version, together; each for itself if that fails or one of them ended a process before."""
        if len(submissions) > 1 and any(self._poison.suspects(c.lease.lease_id) for _, c in submissions):
            return [verdict for one in submissions for verdict in self._judge([one])]
        _, first = submissions[0]
        try:
            policy = self._shelf.get(first.policy_version, first.lease, first.relays)
            found = judge_many(
                submissions,
                self._spec_at_hand(),
                replace(policy, batch_tokens=self._config.tokens_at_once),
                reader=self._reader,
                control_seed=secrets.randbits(64),
                stop=self._client.stop,
            )
        except CannotCheck as error:
            if len(submissions) == 1:
                return [_void(first, str(error))]
            return [verdict for one in submissions for verdict in self._judge([one])]
        return [
            one if isinstance(one, Verdict) else _void(claim, str(one))
            for one, (_, claim) in zip(found, submissions, strict=True)
        ]

    def _spec_at_hand(self) -> RunSpec:
        """The run's terms, its task reading the files we fetched. CannotCheck if they cannot be had."""
        spec, data = self._info.spec, self._config.dir / "data"
        try:
            fetch_files(self._client, file_digests(spec.task), data, deadline_s=self._config.fetch_s)
        except (Refused, DeadlinePassed, ValueError) as error:
            raise CannotCheck(f"the task's data cannot be had: {error}") from None
        return spec.model_copy(update={"task": with_files_from(spec.task, data)})

    def _fetch(self, claim: Claim) -> bytes:
        try:
            # Compared here too: if they differ now, the store or the way here is at fault.
            return self._client.fetch_object_until(
                f"the bytes of submission {claim.sha256[:16]}", claim.sha256, deadline_s=self._config.fetch_s
            )
        except (Refused, DeadlinePassed, ValueError) as error:
            raise CannotCheck(f"the submission's bytes cannot be had: {error}") from None

    def _deliver(self, claim: Claim, verdict: Verdict) -> None:
        try:
            self._client.call_until(
                "the coordinator to take a verdict",
                "POST",
                f"/v1/checks/{verdict.lease_id}/verdict",
                verdict,
                LeaseStatus,
                deadline_s=self._config.deadline_s,
            )
        except Refused as refused:
            if refused.code not in _SETTLED:
                raise
            self._log.warning("the verdict came too late", lease=verdict.lease_id, reason=refused)
        finally:
            self._poison.end(verdict.lease_id)
        self._num_checked += 1
        say = (
            self._log.info
            if verdict.code == ACCEPTED or verdict.code.startswith("void.")
            else self._log.warning
        )
        say(
            verdict.code,
            lease=verdict.lease_id[:16],
            node=claim.lease.node[:16],
            version=claim.policy_version,
            waited_s=round(time.time() - claim.received_at_s, 1),
            checked=self._num_checked,
            detail=verdict.detail,
        )

    def _ask_info(self) -> Info:
        return self._client.call_until(
            f"the coordinator at {self._config.coordinator}",
            "GET",
            "/v1/info",
            None,
            Info,
            deadline_s=self._config.deadline_s,
        )


def _most_tokens(claim: Claim) -> int:
    return claim.lease.num_rows * claim.lease.sampling.max_new_tokens


def _void(claim: Claim, reason: str) -> Verdict:
    return Verdict(lease_id=claim.lease.lease_id, code="void.infra", detail=reason[:500])
