"""`shoal data filter` over a swarm: the run file that it writes, the answers that it takes from a ledger, and bad input."""

import json
from pathlib import Path

import pytest

from shoal.cli.commands.data import answered_chunks
from shoal.cli.main import main
from shoal.cli.run.runfile import load_run_file
from shoal.tasks import make_task
from shoal.wire.codes import ACCEPTED
from shoal.wire.ledger import LedgerEvent


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(45)))
    return path


def test_the_run_file_poses_every_problem_and_trains_nothing(data: Path, tmp_path: Path) -> None:
    words = ["--task", "qa", "--option", f"path={data}", "--model", "tiny", "--problems", "20", "--k", "3"]
    words += ["--option", "template=Short.\n{question}"]
    out = tmp_path / "filter.toml"
    assert main(["data", "filter", *words, "--run-file", str(out), "--temperature", "0.5"]) == 0
    spec = load_run_file(out).spec()
    assert spec.last_version == 0 and spec.sampling.temperature == 0.5
    (one,) = spec.evals
    assert (one.prompts, one.samples, one.task.title) == (20, 3, "filter")
    prompts = {make_task(one.task).problem("eval", number).prompt for number in range(20)}
    assert len(prompts) == 20
    comment = f"# shoal data filter --task qa --option path={data} --option 'template=Short."
    assert comment in out.read_text().splitlines(), "the command has the run's options"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--task", "sort", "--model", "tiny", "--run-file", "f.toml"], "generates problems without end"),
        (
            ["--task", "qa", "--option", "path={data}", "--option", "min_solve_rate=0.5", "--model", "tiny"]
            + ["--run-file", "f.toml"],
            "must be a column with solve rates",
        ),
        (
            ["--task", "qa", "--option", "path={data}", "--option", "max_chars=1", "--model", "tiny"]
            + ["--run-file", "f.toml"],
            "has no rows to train on: 45 longer than max_chars = 1",
        ),
        (["--task", "qa", "--option", "path={data}", "--run-file", "f.toml"], "name the model that answers"),
        (["--task", "qa", "--option", "path={data}", "--model", "tiny"], "--out FILE.jsonl"),
        (
            ["--task", "qa", "--option", "path={data}", "--out", "o.jsonl"],
            "--model MODEL, or --coordinator RUN",
        ),
        (
            ["--task", "qa", "--option", "path={data}", "--out", "o.jsonl", "--coordinator", "nowhere"],
            "nowhere",
        ),
        (
            [
                "--task",
                "qa",
                "--option",
                "path={data}",
                "--out",
                "o.jsonl",
                "--coordinator",
                "http://127.0.0.1:9",
            ],
            "127.0.0.1:9",
        ),
    ],
)
def test_bad_input_is_named(
    data: Path, words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "filter", *(word.format(data=data) for word in words)]) != 0
    assert error in capsys.readouterr().err


def test_the_first_accepted_answer_to_a_chunk_counts() -> None:
    def event(type: str, **body: object) -> LedgerEvent:
        return LedgerEvent.model_construct(type=type, body=body)

    def issued(lease: str, chunk: int, purpose: str = "eval", task: str = "filter") -> LedgerEvent:
        return event("lease.issued", lease_id=lease, chunk=chunk, purpose=purpose, task=task)

    def given(lease: str, rewards: list[float], code: str = ACCEPTED) -> LedgerEvent:
        return event("verdict.given", lease_id=lease, code=code, rewards=rewards)

    found = answered_chunks(
        [
            issued("a", 0),
            issued("b", 0),
            issued("c", 1),
            issued("d", 1, purpose="train", task="qa"),
            given("c", [], "reject.wrong_computation"),
            given("b", [1.0, 0.0]),
            given("a", [0.0, 0.0]),
            given("d", [1.0]),
        ]
    )
    assert {chunk: body["rewards"] for chunk, body in found.items()} == {0: [1.0, 0.0]}
