"""Files by path on one machine, by digest between machines; problems listed in a file."""

import hashlib
import json
from pathlib import Path

import pytest

from shoal.tasks import make_task
from shoal.tasks.code_files import ALLOWED
from shoal.tasks.datasets.data_set import listed_row
from shoal.tasks.datasets.file_options import file_digests, keep_files, with_files_from, without_digests
from shoal.tasks.registry import pin_task
from shoal.wire.run_spec import TaskSpec

ROW = {"question": "1 + 1?", "answer": "#### 2"}


def test_public_terms_contain_digests_and_no_paths(tmp_path: Path) -> None:
    path, kept, fetched = tmp_path / "rows.jsonl", tmp_path / "kept", tmp_path / "fetched"
    path.write_text(json.dumps(ROW))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    spec = TaskSpec(name="gsm8k", options={"path": str(path), "eval_path": str(path), "style": "bare"})
    public = keep_files(spec, kept)
    assert public.options == {"path": f"sha256:{digest}", "eval_path": f"sha256:{digest}", "style": "bare"}
    assert (
        list(file_digests(public).values()) == [digest, digest]
        and str(tmp_path) not in public.model_dump_json()
    )
    assert keep_files(public, kept) == public, "kept already"
    assert sorted(file.name for file in kept.iterdir()) == [digest, f"{digest}.name"]
    fetched.mkdir()
    (fetched / digest).write_bytes(path.read_bytes())
    assert make_task(with_files_from(public, fetched)).problem("eval", 0) == make_task(spec).problem(
        "eval", 0
    )
    with pytest.raises(ValueError, match="no data file"):
        make_task(with_files_from(public, tmp_path / "elsewhere")).problem("eval", 0)


def test_a_file_can_be_pinned_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    options: dict[str, int | float | str] = {"path": str(path), "eval_path": str(path), "path_sha256": digest}
    assert make_task(TaskSpec(name="gsm8k", options=options)).problem("eval", 0).answer == "2"
    assert "path_sha256" not in keep_files(TaskSpec(name="gsm8k", options=options), tmp_path / "kept").options
    other = TaskSpec(name="gsm8k", options=options | {"path_sha256": "0" * 64})
    with pytest.raises(ValueError, match=f"has SHA-256 {digest}, but path_sha256 is 000"):
        make_task(other)
    make_task(without_digests(other))
    with pytest.raises(ValueError, match="path_sha256 is set, but path is not"):
        make_task(TaskSpec(name="gsm8k", options={"path_sha256": digest}))


OWN_TASK = """
from shoal.tasks.task import RIGHT, WRONG, Problem

class Doubled:
    chat = True

    def problem(self, split, seed):
        return Problem(f"Double {seed}.", "unknown", check=str(2 * seed), messages=(("system", "Be brief."),))

    def reward(self, problem, text, num_tokens):
        return RIGHT if int(text) == int(problem.check) else WRONG
"""


def test_listed_problems_keep_what_their_task_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK)
    monkeypatch.setenv(ALLOWED, str(tmp_path / "own.py"))
    spec = pin_task(TaskSpec(name=f"{tmp_path / 'own.py'}:Doubled"))
    task = make_task(spec)
    path = tmp_path / "listed.jsonl"
    path.write_text("".join(json.dumps(listed_row(task.problem("train", n), spec)) + "\n" for n in (3, 4)))
    listed = make_task(TaskSpec(name="listed", options={"path": str(path)}))
    assert [listed.problem("train", n) for n in (0, 1)] == [task.problem("train", n) for n in (3, 4)]
    assert listed.reward(listed.problem("train", 1), "8", 1).value == 1.0


def test_listed_problems_are_graded_by_their_task(tmp_path: Path) -> None:
    spec = TaskSpec(name="sort", options={"length": 3})
    task = make_task(spec)
    path = tmp_path / "listed.jsonl"
    path.write_text("".join(json.dumps(listed_row(task.problem("train", n), spec)) + "\n" for n in range(5)))
    listed = make_task(TaskSpec(name="listed", options={"path": str(path)}))
    assert [listed.problem("train", n) for n in range(5)] == [task.problem("train", n) for n in range(5)]
    assert listed.problem("eval", 3) == task.problem("eval", 3), "held out by the task, so never trained on"
    problem = listed.problem("train", 9)
    assert listed.chat == task.chat and listed.reward(problem, problem.answer, 1).value == 1.0
    for line, message in (
        (json.dumps({"prompt": "1", "answer": "1", "task": {"name": "listed"}}), "by another list"),
        (json.dumps({"prompt": "1", "answer": "1"}), "row 1: expected prompt, answer and the same task"),
        (json.dumps({"prompt": "1", "answer": "1", "task": {"nam": "add"}}), "row 1: the task is invalid"),
        (
            json.dumps({"prompt": "1", "answer": "1", "task": {"name": "add"}, "x": 1}),
            "row 1: expected prompt",
        ),
        ("", "has no rows"),
    ):
        path = tmp_path / f"{len(message)}.jsonl"
        path.write_text(line)
        with pytest.raises(ValueError, match=message):
            make_task(TaskSpec(name="listed", options={"path": str(path)})).problem("eval", 0)
