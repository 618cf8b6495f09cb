"""The validator's loop against a real coordinator, a real origin and real submissions, all on loopback."""

import threading
from pathlib import Path
from typing import Any

import pytest
from honest_work import make_claim, make_lease, make_policy, make_spec, make_table, sharpen
from loopback import Swarm, in_thread, origin_of, published

from shoal.net.http_client import Refused
from shoal.swarm.validator import claim_loop, format_checks
from shoal.swarm.validator.claim_loop import CrashGuard, ValidatorExit, most_together, run_validator
from shoal.swarm.validator.judge import judge_many
from shoal.swarm.validator.table_reader import TableReader
from shoal.tasks.procedural import Sort
from shoal.tasks.task import WRONG, Problem, Reward
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Verdict
from shoal.wire.messages import Claim
from shoal.wire.proof_noise import LaterNoise, Noise
from shoal.wire.rollouts import RolloutTable, TableLimits, encode
from shoal.wire.run_spec import RunSpec

CALIBRATION = Path(__file__).parents[3] / "runs" / "calibration" / "smollm2-135m-bf16-on-cpu.json"


def test_honest_work_is_accepted_and_lies_are_refused(swarm: Swarm) -> None:
    with published(swarm) as policy:
        with in_thread(lambda stop: run_validator(swarm.config(), stop=stop)) as ended:
            honest = swarm.lease()
            data = encode(make_table(honest, policy))
            swarm.submit(honest, data)
            status = swarm.verdict_on(honest)
            assert status.code == ACCEPTED, status.detail
            assert status.credit > 0

            replayed = swarm.lease()
            swarm.submit(replayed, data)
            assert swarm.verdict_on(replayed).code == "reject.replayed"

            bomb = swarm.lease()
            swarm.submit(bomb, b"PAR1" * 100)
            with pytest.raises(Refused, match=r"ejected: .*reject.malformed_file"):  # its second refusal
                swarm.verdict_on(bomb)
        assert ended.result() is ValidatorExit.STOPPED
        assert (swarm.dir / "validator" / "policies" / "v0" / "model.safetensors").exists()


def test_submissions_that_wait_are_checked_together_each_with_its_own_verdict(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []

    def counted(submissions: Any, *arguments: Any, **options: Any) -> Any:
        together.append(len(submissions))
        return judge_many(submissions, *arguments, **options)

    monkeypatch.setattr(claim_loop, "judge_many", counted)
    with published(swarm) as policy:
        honest = swarm.lease()
        swarm.submit(honest, encode(make_table(honest, policy)))
        false = swarm.lease()
        swarm.submit(false, b"PAR1" * 100)
        with in_thread(lambda stop: run_validator(swarm.config(batch_tokens=1 << 20), stop=stop)):
            status = swarm.verdict_on(honest)
            assert status.code == ACCEPTED, status.detail
            assert swarm.verdict_on(false).code == "reject.malformed_file"
    assert together == [2]


def test_a_verdict_does_not_wait_for_other_submissions(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two submissions that were claimed together is graded only after the first has its verdict."""
    first_has_verdict = threading.Event()
    waited: list[bool] = []

    def reward(task: Sort, problem: Problem, text: str, num_tokens: int) -> Reward:
        if problem.prompt in slow.prompts and problem.prompt not in quick.prompts:
            waited.append(first_has_verdict.wait(30))
        return WRONG

    monkeypatch.setattr(Sort, "reward", reward)
    with published(swarm) as policy:
        quick = swarm.lease()
        swarm.submit(quick, encode(make_table(quick, policy)))
        slow = swarm.lease()
        swarm.submit(slow, encode(make_table(slow, policy)))
        with in_thread(lambda stop: run_validator(swarm.config(batch_tokens=1 << 20), stop=stop)):
            assert swarm.verdict_on(quick).code == ACCEPTED
            first_has_verdict.set()
            assert swarm.verdict_on(slow).code == ACCEPTED
    assert waited and all(waited)


def test_a_verdict_does_not_wait_for_the_files_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may take seconds to read. The submissions before it get their verdicts first."""
    spec = make_spec()
    policy = sharpen(make_policy(tmp_path))
    leases = [make_lease(spec, number=number) for number in (1, 2)]
    files = [encode(make_table(lease, policy)) for lease in leases]
    submissions = [(data, make_claim(lease, data)) for data, lease in zip(files, leases, strict=True)]
    read: list[bytes] = []

    class NotingReader(TableReader):
        def read(self, data: bytes, limits: TableLimits) -> RolloutTable:
            read.append(data)
            return super().read(data, limits)

    monkeypatch.setattr("shoal.swarm.validator.judge.OPENING_S", 0.0)  # as if every file took longer
    with NotingReader() as reader:
        judged = judge_many(submissions, spec, policy, reader=reader, control_seed=1)
        first = next(judged)
        assert isinstance(first, Verdict) and first.code == ACCEPTED and read == files[:1]
        (second,) = judged
        assert isinstance(second, Verdict) and second.code == ACCEPTED and read == files


def test_slow_submissions_are_claimed_few_at_a_time() -> None:
    """Otherwise the claims of honest work would run out behind submissions that are slow to grade."""
    assert [most_together(pace_s, 60.0) for pace_s in (0.0, 0.9, 1.0, 5.0, 30.0)] == [16, 16, 15, 3, 1]


def test_work_of_a_version_is_judged_by_the_calibration_that_came_with_it(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validator has asked for the terms before the version with the new calibration exists."""
    judged: dict[int, Noise | None] = {}

    def noted(submissions: Any, spec: RunSpec, *arguments: Any, **options: Any) -> Any:
        judged.update({claim.policy_version: spec.noise_of(claim.policy_version) for _, claim in submissions})
        return judge_many(submissions, spec, *arguments, **options)

    monkeypatch.setattr(claim_loop, "judge_many", noted)
    noise = Noise.parse(CALIBRATION.read_bytes()).model_copy(update={"compute_dtype": "float32"})
    with origin_of(swarm) as url:
        policies = [swarm.publish(0, url)]
        swarm.report_relay(url, 0)
        swarm.join()
        with in_thread(lambda stop: run_validator(swarm.config(), stop=stop)):
            for version in (0, 1):
                if version:
                    later = LaterNoise(from_version=1, moved=0.2, noise=noise)
                    policies.append(swarm.publish(1, url, noise=later))
                    swarm.report_relay(url, 0, 1)
                lease = swarm.lease()
                swarm.submit(lease, encode(make_table(lease, policies[version])), version)
                swarm.verdict_on(lease)
    assert judged == {0: None, 1: noise}


def test_a_claim_is_checked_once(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check_claim = format_checks.check_claim

    def counted(claim: Claim) -> None:
        checked.append(claim.lease.lease_id)
        check_claim(claim)

    monkeypatch.setattr(format_checks, "check_claim", counted)
    with published(swarm) as policy:
        lease = swarm.lease()
        swarm.submit(lease, encode(make_table(lease, policy)))
        with in_thread(lambda stop: run_validator(swarm.config(), stop=stop)):
            assert swarm.verdict_on(lease).code == ACCEPTED
    assert checked == [lease.lease_id]


def test_validators_share_the_queue(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is busy with a submission, the other checks the next; each is checked once."""
    checked: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def slow_at_first(submissions: Any, *arguments: Any, **options: Any) -> Any:
        checked.extend(claim.lease.lease_id for _, claim in submissions)
        if not started.is_set():
            started.set()
            assert go_on.wait(60)
        return judge_many(submissions, *arguments, **options)

    monkeypatch.setattr(claim_loop, "judge_many", slow_at_first)
    with published(swarm) as policy:
        slow = swarm.lease()
        swarm.submit(slow, encode(make_table(slow, policy)))
        with in_thread(lambda stop: run_validator(swarm.config(batch_tokens=1), stop=stop)):
            assert started.wait(60)
            other = swarm.config(batch_tokens=1, dir=swarm.dir / "other")
            with in_thread(lambda stop: run_validator(other, stop=stop)):
                quick = swarm.lease()
                swarm.submit(quick, encode(make_table(quick, policy)))
                assert swarm.verdict_on(quick).code == ACCEPTED
                go_on.set()
                assert swarm.verdict_on(slow).code == ACCEPTED
    assert checked == [slow.lease_id, quick.lease_id]


def test_missing_weights_make_a_submission_void(swarm: Swarm) -> None:
    policy = swarm.publish(0, "http://127.0.0.1:9")
    swarm.report_relay("http://127.0.0.1:9", 0)  # no server there
    swarm.join()
    with in_thread(lambda stop: run_validator(swarm.config(fetch_s=0.3), stop=stop)):
        lease = swarm.lease()
        swarm.submit(lease, encode(make_table(lease, policy)))
        status = swarm.verdict_on(lease)
        assert status.code == "void.infra"
        assert "policy version 0 is not available" in (status.detail or "")


def test_a_finished_run_needs_no_validator(swarm: Swarm) -> None:
    for version in range(4):
        swarm.publish(version, "http://127.0.0.1:9")
    assert run_validator(swarm.config(), stop=threading.Event()) is ValidatorExit.FINISHED


def test_a_wrong_key_or_run_is_reported_at_startup(swarm: Swarm) -> None:
    with pytest.raises(Refused, match="relay key"):
        run_validator(swarm.config(key=swarm.dir / "keys" / "relay.key"), stop=threading.Event())
    with pytest.raises(ValueError, match="runs under key"):
        run_validator(swarm.config(run_key="0" * 64), stop=threading.Event())


def test_a_submission_that_crashes_the_validator_is_given_up(tmp_path: Path) -> None:
    path, lease_id = tmp_path / "checking.json", "a" * 32
    for _ in range(2):
        assert CrashGuard(path).begin(lease_id), "a crash may have had another cause"
    assert not CrashGuard(path).begin(lease_id)
    survivor = CrashGuard(path)
    survivor.end(lease_id)
    assert CrashGuard(path).begin(lease_id)
    path.write_text('{"a')
    assert CrashGuard(path).begin(lease_id), "a broken file must not stop the validator"
