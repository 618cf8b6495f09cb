"""The validator's loop against a real coordinator, a real origin and real submissions, all on loopback."""

import threading
from pathlib import Path
from typing import Any

import pytest
from honest_work import make_table
from loopback import Swarm, in_thread, origin_of

from shoal.net.http_client import Refused
from shoal.swarm.validator import claim_loop, format_checks
from shoal.swarm.validator.claim_loop import CrashGuard, ValidatorExit, run_validator
from shoal.swarm.validator.judge import judge_many
from shoal.wire.codes import ACCEPTED
from shoal.wire.messages import Claim
from shoal.wire.rollouts import encode


def test_honest_work_is_accepted_and_lies_are_refused(swarm: Swarm) -> None:
    with origin_of(swarm) as url:
        policy = swarm.publish(0, url)
        swarm.report_relay(url, 0)
        swarm.join()
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
    with origin_of(swarm) as url:
        policy = swarm.publish(0, url)
        swarm.report_relay(url, 0)
        swarm.join()
        honest = swarm.lease()
        swarm.submit(honest, encode(make_table(honest, policy)))
        false = swarm.lease()
        swarm.submit(false, b"PAR1" * 100)
        with in_thread(lambda stop: run_validator(swarm.config(batch_tokens=1 << 20), stop=stop)):
            status = swarm.verdict_on(honest)
            assert status.code == ACCEPTED, status.detail
            assert swarm.verdict_on(false).code == "reject.malformed_file"
    assert together == [2]


def test_a_claim_is_checked_once(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check_claim = format_checks.check_claim

    def counted(claim: Claim) -> None:
        checked.append(claim.lease.lease_id)
        check_claim(claim)

    monkeypatch.setattr(format_checks, "check_claim", counted)
    with origin_of(swarm) as url:
        policy = swarm.publish(0, url)
        swarm.report_relay(url, 0)
        swarm.join()
        lease = swarm.lease()
        swarm.submit(lease, encode(make_table(lease, policy)))
        with in_thread(lambda stop: run_validator(swarm.config(), stop=stop)):
            assert swarm.verdict_on(lease).code == ACCEPTED
    assert checked == [lease.lease_id]


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
