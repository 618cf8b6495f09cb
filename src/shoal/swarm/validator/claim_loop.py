"""The validator's process.

    claims ──▶ bytes ──▶ policy version ──▶ checks ──▶ verdicts
      ▲                  ▲                               │
      │                  └ newer ones are fetched ahead, in a thread
      └──────────────────────────────────────────────────┘

It takes several waiting claims at a time; those of one policy version share their prefills.

It keeps no state that it cannot lose: a claim without a verdict returns to the coordinator's queue. A failure of its own side
(weights that are not available, a reader that does not start) gives void.infra, so no node is blamed for it.
"""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import torch

from shoal.background import BackgroundTask
from shoal.files import write_bytes_atomically
from shoal.model.load_model import DTYPES, load_causal
from shoal.net.http_client import Refused, SignedClient, Unreachable, fetch_files
from shoal.net.waiting import DeadlinePassed, LinkedEvent, Stopped
from shoal.swarm.validator.answer_judge import load_judge
from shoal.swarm.validator.decode_replay import DecodeReplay
from shoal.swarm.validator.judge import judge_many, refuse_claim
from shoal.swarm.validator.loaded_versions import LEAST_FETCH_S, LoadedVersions, tokens_that_fit
from shoal.swarm.validator.prefill import BATCH_TOKENS, DEVICE_BATCH_TOKENS, CannotCheck
from shoal.swarm.validator.table_reader import ReaderFailed, TableReader
from shoal.tasks import CannotGrade, make_task
from shoal.tasks.datasets.file_options import run_digests, with_files_from
from shoal.tasks.datasets.judged_answers import JudgedAnswers
from shoal.tasks.task_errors import TaskError, UnseededProblem, print_trace, try_task
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
from shoal.wire.lease import Verdict
from shoal.wire.messages import AskClaim, Claim, Info, LeaseStatus
from shoal.wire.run_spec import PROTOCOL, RunSpec

STOP_S = 3.0
"""Seconds that a validator that ends waits for its fetch ahead to stop."""
IDLE_S = 10.0
"""Seconds to wait for a claim before asking whether the run is finished."""
MAX_TOGETHER = 16
"""Most submissions claimed at a time. Each claim has a deadline, so the validator must not hold too many."""
CLAIM_SHARE = 0.25
"""Share of a claim's time in which all submissions that are claimed at a time should be checked, by the pace of the last ones."""
MAX_CRASHES = 2
"""Checks of one submission that may end the process before it is void."""
MAX_TASK_FAILURES = 2
"""Failures of the task's code after which a validator that has never graded a submission ends."""
SLOW_GRADING_S, SLOW_EVERY_S = 5.0, 60.0
"""Grading that takes longer than SLOW_GRADING_S is reported, at most once in SLOW_EVERY_S."""
_TOO_LATE = ("request.conflict", "request.lease_closed", "request.not_found")
"""Codes with which the coordinator refuses a verdict that came too late to count."""


class ValidatorExit(Enum):
    """Why a validator ended. The value is logged."""

    FINISHED = "the run is finished"
    STOPPED = "stopped by request"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorConfig:
    """Settings of a validator's process."""

    coordinator: str
    """The coordinator's URL."""
    key: Path
    """The run's validator.key, from the coordinator's keys folder."""
    dir: Path
    """The validator's folder, for fetched versions and data files."""
    run_key: str | None = None
    """The run's public key, if it is known; None accepts the key that the coordinator names."""
    device: str = "cpu"
    num_threads: int = 0
    """Torch threads; 0 lets torch choose."""
    max_loaded: int | None = None
    """Policy versions in memory. With fewer than max_lag + 1, the same versions are loaded again and again. None: as many as fit
    into memory, at most 3."""
    batch_tokens: int | None = None
    """Tokens of one prefill, with padding. More is faster until memory is full. None: what fits into half of the free memory, at
    most the default of the device."""
    fetch_s: float | None = None
    """Seconds to try for a policy version before its submissions are void. None: 120, or more for a large model."""
    deadline_s: float = 900.0
    """Seconds to wait for the coordinator before giving up."""

    @property
    def most_tokens(self) -> int:
        """Tokens of one prefill if memory is no limit."""
        return self.batch_tokens or (BATCH_TOKENS if self.device == "cpu" else DEVICE_BATCH_TOKENS)


def run_validator(
    config: ValidatorConfig,
    *,
    stop: threading.Event,
    make_replay: Callable[[RunSpec], DecodeReplay] | None = None,
) -> ValidatorExit:
    """Checks submissions until the run is finished or `stop` is set. `make_replay` returns what decodes a share of them again.

    Raises ValueError for an error that the owner must correct, Refused if the coordinator refuses the key, DeadlinePassed if
    it cannot be reached.
    """
    log = Log("validator")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    client = SignedClient(config.coordinator, Key.load(config.key), log=log, stop=stop)
    try:
        with TableReader() as reader:
            validator = Validator(config, client, reader, log=log, make_replay=make_replay)
            validator.startup()
            ahead = SignedClient(config.coordinator, Key.load(config.key), log=log, stop=LinkedEvent(stop))
            fetching = BackgroundTask("fetch ahead", partial(validator.versions.watch, ahead))
            try:
                exit = validator.main_loop()
            finally:
                ahead.stop.set()
                if fetching.wait(STOP_S):
                    ahead.close()
    except Stopped:
        exit = ValidatorExit.STOPPED
    except ReaderFailed as failed:
        raise ValueError(f"this machine cannot read submissions: {failed}") from None
    finally:
        client.close()
    log.info(exit.value)
    return exit


class CrashGuard:
    """Counts in a file how often checking a submission ended the process, so that such a submission is not tried for ever."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._crashes: dict[str, int] = {}
        if path.exists():
            try:
                self._crashes = {
                    str(name): int(count) for name, count in json.loads(path.read_text()).items()
                }
            except (ValueError, AttributeError, TypeError):
                self._crashes = {}  # a broken file must not keep the validator from starting

    def begin(self, lease_id: str) -> bool:
        """Counts a check as crashed until `end`; returns False if it has ended the process too often to try again."""
        crashes = self._crashes.get(lease_id, 0)
        if crashes >= MAX_CRASHES:
            return False
        self._write(self._crashes | {lease_id: crashes + 1})
        return True

    def is_suspect(self, lease_id: str) -> bool:
        """Returns whether an earlier check, alone or with others, ended the process. Call it after `begin`."""
        return self._crashes.get(lease_id, 0) > 1

    def end(self, lease_id: str) -> None:
        self._write({name: count for name, count in self._crashes.items() if name != lease_id})

    def _write(self, crashes: dict[str, int]) -> None:
        self._crashes = crashes
        # Not flushed to disk: it must survive the process, not a power cut.
        write_bytes_atomically(self._path, json.dumps(crashes).encode(), durable=False)


class Validator:
    """Checks one run's submissions: call `startup`, then `main_loop`."""

    versions: LoadedVersions

    def __init__(
        self,
        config: ValidatorConfig,
        client: SignedClient,
        reader: TableReader,
        *,
        log: Log,
        make_replay: Callable[[RunSpec], DecodeReplay] | None,
    ) -> None:
        self._make_replay = make_replay
        self._replay: DecodeReplay | None = None
        self._config, self._client, self._reader, self._log = config, client, reader, log
        self._num_checked = 0
        self._pace_s = 0.0
        """Seconds for each of the submissions that were claimed together last."""
        self._num_graded = 0
        self._task_failures = 0
        self._slow_told_s = float("-inf")
        self._ask = AskClaim(validator=secrets.token_hex(8))

    def startup(self) -> None:
        """Asks the coordinator for the run's terms, checks them, and reads the task's data."""
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
        if self._make_replay is not None:
            self._replay = self._make_replay(self._info.spec)
        config.dir.mkdir(parents=True, exist_ok=True)
        self._crash_guard = CrashGuard(config.dir / "checking.json")
        self.versions = LoadedVersions(
            config.dir / "policies",
            self._client,
            run_key=self._info.run_key,
            load=partial(load_causal, dtype=DTYPES[self._info.spec.compute_dtype], device=config.device),
            max_loaded=config.max_loaded,
            fetch_s=config.fetch_s,
            log=self._log,
        )
        # Reading a data set takes a while and may fail; later it would use up a claim's deadline.
        try:
            for spec in self._spec_with_files().task_specs():
                task = make_task(spec)
                for warning in try_task(task):
                    self._log.warning(warning)
                if isinstance(task, JudgedAnswers):
                    load_judge(task.judge_path, task.judge_dtype, config.device)
        except CannotGrade as error:
            raise ValueError(f"this machine cannot grade the run's answers: {error}") from None
        self._log.info(f"checking for run {self._info.spec.run!r}", coordinator=config.coordinator)

    def main_loop(self) -> ValidatorExit:
        """Claims, checks and delivers until the run is finished. Raises Stopped."""
        while claims := self._next_claims():
            began_s = time.monotonic()
            for claim, verdict in self._check(claims):
                self._deliver(claim, verdict)
            self._pace_s = (time.monotonic() - began_s) / len(claims)
        return ValidatorExit.FINISHED

    def _next_claims(self) -> list[Claim]:
        """Waits for a claim and returns it with others that wait already; returns none when the run is finished."""
        while not self._info.finished:
            if self._client.stop.is_set():
                raise Stopped("stopped between two checks")
            try:
                first = self._client.call_until(
                    "a submission to check",
                    "POST",
                    "/v1/checks/claim",
                    self._ask,
                    Claim,
                    deadline_s=IDLE_S,
                    heard=lambda failure: self.versions.load_ahead(),
                )
                return [first, *self._waiting_claims(first)]
            except DeadlinePassed:
                self._info = self._ask_info()  # also gets terms that changed when the run was resumed
        return []

    def _waiting_claims(self, first: Claim) -> list[Claim]:
        """Returns more claims without waiting, as long as their tokens fit into one prefill with the first, and not so many that
        claims would run out if all of them take as long as the last ones."""
        claims: list[Claim] = []
        if first.lapses:
            return []  # it may be the reason why its claim ran out, so nothing else must wait for it
        tokens = _max_tokens(first)
        ask = self._ask.model_copy(update={"fresh": True})
        most = most_together(self._pace_s, first.deadline_s - time.time())
        while len(claims) + 1 < most and tokens < self._config.most_tokens:
            try:
                claim = self._client.call("POST", "/v1/checks/claim", ask, Claim)
            except (Refused, Unreachable):
                break  # nothing waits, or the next call reports what is wrong
            claims.append(claim)
            tokens += _max_tokens(claim)
        return claims

    def _check(self, claims: list[Claim]) -> Iterator[tuple[Claim, Verdict]]:
        """Yields each claim with its verdict as soon as it is given, so that no verdict waits for other submissions."""
        by_version: dict[int, list[tuple[bytes, Claim]]] = {}
        try:
            for claim in claims:
                found = self._fetch_or_refuse(claim)
                if isinstance(found, Verdict):
                    yield claim, found
                else:
                    by_version.setdefault(claim.policy_version, []).append((found, claim))
            for submissions in by_version.values():
                yield from self._judge(submissions)
        except Stopped:
            for claim in claims:  # the submissions did not cause this end
                self._crash_guard.end(claim.lease.lease_id)
            raise

    def _fetch_or_refuse(self, claim: Claim) -> bytes | Verdict:
        """Returns the bytes to judge, or a verdict that needs none."""
        if (refusal := refuse_claim(claim)) is not None:
            return refusal
        if not self._crash_guard.begin(claim.lease.lease_id):
            return _void(claim, f"checking it has ended the validator's process {MAX_CRASHES} times")
        try:
            # The client compares the digest again. If it differs now, the store or the connection is at fault.
            return self._client.fetch_object_until(
                f"the bytes of submission {claim.sha256[:16]}",
                claim.sha256,
                deadline_s=self._config.fetch_s or LEAST_FETCH_S,
            )
        except (Refused, DeadlinePassed, ValueError) as error:
            return _void(claim, f"the submission's bytes are not available: {error}")

    def _judge(self, submissions: list[tuple[bytes, Claim]]) -> Iterator[tuple[Claim, Verdict]]:
        """Judges submissions of one policy version together, or one by one if that fails or one may crash the process."""
        if len(submissions) > 1 and any(
            self._crash_guard.is_suspect(claim.lease.lease_id) for _, claim in submissions
        ):
            for one in submissions:
                yield from self._judge([one])
            return
        waiting = list(submissions)
        _, first = submissions[0]
        known = self._info.newest_version
        calibrations = len(self._info.spec.later_noise)
        if (
            known is None
            or first.policy_version > known
            or any(claim.calibrations > calibrations for _, claim in submissions)
        ):
            self._info = self._ask_info()  # the calibration may have been repeated
        try:
            policy = self.versions.get(first.policy_version, first.lease, first.relays, first.origin)
            fitting = self._config.batch_tokens or tokens_that_fit(policy.decoder, self._config.most_tokens)
            for found in judge_many(
                submissions,
                self._spec_with_files(),
                replace(policy, batch_tokens=fitting),
                reader=self._reader,
                control_seed=secrets.randbits(64),
                stop=self._client.stop,
                replay=self._replay,
            ):
                _, claim = waiting.pop(0)
                yield claim, found if isinstance(found, Verdict) else _void(claim, str(found))
        except (CannotCheck, TaskError) as error:
            if len(submissions) > 1:
                for one in waiting:
                    yield from self._judge([one])
                return
            if isinstance(error, TaskError):
                self._note_task_error(error)
            yield first, _void(first, str(error))

    def _note_task_error(self, error: TaskError) -> None:
        """Logs a failure of the task's code. Raises it if the task has never graded a submission here, or if problems are random.

        Otherwise it may be one answer that the code does not expect, and a worker must not be able to end the validator.
        """
        print_trace(error.trace)
        self._task_failures += 1
        never_graded = not self._num_graded and self._task_failures >= MAX_TASK_FAILURES
        if never_graded or isinstance(error, UnseededProblem):
            raise error
        self._log.error(str(error))

    def _spec_with_files(self) -> RunSpec:
        """Fetches the task's files and returns the run's terms with them. Raises CannotCheck if they are not available."""
        spec, data = self._info.spec, self._config.dir / "data"
        try:
            fetch_files(
                self._client, run_digests(spec), data, deadline_s=self._config.fetch_s or LEAST_FETCH_S
            )
        except (Refused, DeadlinePassed, ValueError) as error:
            raise CannotCheck(f"the task's data files are not available: {error}") from None
        return spec.with_tasks(lambda task: with_files_from(task, data))

    def _deliver(self, claim: Claim, verdict: Verdict) -> None:
        """Sends a verdict to the coordinator and logs it."""
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
            if refused.code not in _TOO_LATE:
                raise
            self._log.warning("the verdict came too late", lease=verdict.lease_id, reason=refused)
        finally:
            self._crash_guard.end(verdict.lease_id)
        self._num_checked += 1
        self._num_graded += bool(verdict.rewards)
        self._warn_if_slow(verdict)
        good = verdict.code == ACCEPTED or verdict.code.startswith("void.")
        log = self._log.info if good else self._log.warning
        log(
            verdict.code,
            lease=verdict.lease_id[:16],
            node=claim.lease.node[:16],
            version=claim.policy_version,
            waited_s=round(time.time() - claim.received_at_s, 1),
            checked=self._num_checked,
            detail=verdict.detail,
        )

    def _warn_if_slow(self, verdict: Verdict) -> None:
        """Logs, once a minute at most, that grading holds the run up."""
        grade_s = float(verdict.evidence.get("grade_s", 0.0))
        if grade_s < SLOW_GRADING_S or time.monotonic() - self._slow_told_s < SLOW_EVERY_S:
            return
        self._slow_told_s = time.monotonic()
        self._log.warning(
            f"grading {len(verdict.rewards)} answers took {grade_s:.1f} s, and the run waits for it; make reward() faster, or "
            "start more validators (local.validators)"
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


def most_together(pace_s: float, claim_s: float) -> int:
    """Returns how many submissions to claim at a time if each takes `pace_s` and a claim runs out after `claim_s`."""
    if pace_s * MAX_TOGETHER <= CLAIM_SHARE * claim_s:
        return MAX_TOGETHER
    return max(1, int(CLAIM_SHARE * claim_s / pace_s))


def _max_tokens(claim: Claim) -> int:
    return claim.lease.num_rows * claim.lease.sampling.max_new_tokens


def _void(claim: Claim, reason: str) -> Verdict:
    return Verdict(lease_id=claim.lease.lease_id, code="void.infra", detail=reason[:500])
