"""A run whose task reads a file: contributors join without it, the validator fetches it, and nobody else can."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from honest_work import make_table
from loopback import Swarm, in_thread, origin_of, running_swarm

from shoal.cli.commands.join import check_file
from shoal.cli.main import main
from shoal.net.http_client import Refused
from shoal.swarm.validator.claim_loop import run_validator
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease
from shoal.wire.messages import Info, Stats
from shoal.wire.rollouts import encode
from shoal.wire.run_spec import RunSpec, TaskSpec

# All of one length, because the small decoder of the tests pads nothing.
ROWS = [
    {"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"}
    for a in range(20, 28)
    for b in range(30, 35)
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "somebodys" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture
def swarm(tmp_path: Path, data: Path) -> Iterator[Swarm]:
    task = TaskSpec(name="gsm8k", options={"path": str(data), "style": "bare"})
    with running_swarm(tmp_path / "swarm", task) as swarm:
        yield swarm


def test_the_file_reaches_validators_and_only_them(
    swarm: Swarm, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    with origin_of(swarm) as url:
        policy = swarm.publish(0, url)
        swarm.report_relay(url, 0)
        swarm.join()
        info = swarm.node.call("GET", "/v1/info", None, Info)
        options = dict(info.spec.task.options)
        assert str(options.pop("checks_path")).startswith("sha256:"), "the list of unusable rows"
        assert options == {"path": f"sha256:{digest}", "style": "bare"}
        lease = swarm.lease()
        assert all(prompt.startswith("Question: What is 2") for prompt in lease.prompts) and not lease.chat
        assert "somebodys" not in lease.model_dump_json() + info.model_dump_json()
        with pytest.raises(Refused, match=r"request\.not_allowed"):
            swarm.node.send("GET", f"/v1/objects/{digest}")
        with in_thread(lambda stop: run_validator(swarm.config(), stop=stop)):
            swarm.submit(lease, encode(make_table(lease, policy)))
            status = swarm.verdict_on(lease)
            assert status.code == ACCEPTED, status.detail
        assert (swarm.dir / "validator" / "data" / digest).read_bytes() == data.read_bytes()
        stats = swarm.node.call("GET", "/v1/stats", None, Stats)
        assert sum(stats.groups.values()) == 2
        assert stats.unparseable == pytest.approx(unparseable(swarm) / lease.num_rows)
        check_eval(swarm.url, data, capsys)
        key = str(swarm.dir / "keys" / "validator.key")
        assert main(["audit", swarm.url, "--key", key, "--dir", str(swarm.dir / "audit")]) == 0
        assert "verdicts that agree with the ledger: 1 of 1" in capsys.readouterr().out
        check_own(swarm, info.spec, lease, policy)


def check_own(swarm: Swarm, public: RunSpec, lease: Lease, policy: LoadedPolicy) -> None:
    """`shoal check-local` by a contributor, who has no such file: everything but the rewards."""
    last, version = swarm.dir / "last", swarm.store.path(0).parent
    last.mkdir()
    (last / "lease.json").write_text(
        json.dumps({"lease": json.loads(lease.model_dump_json()), "policy_version": 0})
    )
    (last / "rollouts.parquet").write_bytes(encode(make_table(lease, policy)))
    verdict = check_file(last / "rollouts.parquet", last / "lease.json", version, public)
    assert verdict.code == ACCEPTED and verdict.rewards == ()
    assert "not graded, because the task's files are missing here" in verdict.detail


def unparseable(swarm: Swarm) -> int:
    """Returns the number of unparseable answers in the verdict's evidence."""
    events = json.loads(swarm.node.send("GET", "/v1/ledger").content)
    (verdict,) = (event for event in events if event["type"] == "verdict.given")
    evidence = verdict["body"]["evidence"]
    assert 0 <= evidence["right"] + evidence["unparseable"] <= 8
    return int(evidence["unparseable"])


def check_eval(url: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`shoal eval` of a published version, on the run's own task with one's own copy of its file."""
    small = ["--prompts", "3", "--k", "2", "--json"]
    assert main(["eval", url, *small, "--option", f"path={data}"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["version"], figures["prompts"], figures["samples"]) == (0, 3, 2)
    assert (figures["temperature"], figures["max_new_tokens"]) == (1.0, 12), "as the run samples"
    assert main(["eval", url, *small]) == 2
    assert "give your own copies: --option path=FILE" in capsys.readouterr().err
    other = data.with_name("other.jsonl")
    other.write_text(data.read_text() + "\n")
    assert main(["eval", url, *small, "--option", f"path={other}"]) == 2
    assert "is not the file of the run" in capsys.readouterr().err
    assert main(["eval", url, *small, "--version", "7", "--task", "sort"]) == 2
    assert "has not published version 7" in capsys.readouterr().err
