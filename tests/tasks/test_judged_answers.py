"""The task `judge` without its model: problems, the judge's prompt, scores, and options that are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks import Finite, Outcome, make_task
from shoal.tasks.datasets.judged_answers import JudgedAnswers
from shoal.tasks.grading import pattern_grader
from shoal.tasks.registry import keep_task_files
from shoal.tasks.task_errors import try_task
from shoal.wire.run_spec import TaskSpec

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"Explain the number {n}.",
        "task_type": "llm_judgeable_groundtruth_similarity",
        "gold_standard_solution": f"It is {n}.",
        "verification_info": str({"judging_instructions": "Don't be strict." if n % 2 else ""}),
    }
    for n in range(30)
]
"""As SYNTHETIC-1 has them: the text of a Python literal in verification_info."""
SYNTHETIC = {
    "question": "prompt",
    "reference": "gold_standard_solution",
    "instructions": "verification_info.judging_instructions",
}


@pytest.fixture(scope="module", autouse=True)
def closed_child() -> Iterator[None]:
    """Ends the process that searches for scores; threads of the grading pool have their own."""
    yield
    if hasattr(pattern_grader._THREAD, "child"):
        pattern_grader._THREAD.child.close()
        del pattern_grader._THREAD.child


def judge_task(folder: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> JudgedAnswers:
    data = folder / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = {"path": str(data), "judge_path": str(folder / "judge"), **SYNTHETIC} | options
    task = make_task(TaskSpec(name="judge", options=own))
    assert isinstance(task, JudgedAnswers)
    return task


def test_rows_of_synthetic_1_are_posed_with_their_reference(tmp_path: Path) -> None:
    task = judge_task(tmp_path, task_types="llm_judgeable_groundtruth_similarity")
    assert isinstance(task, Finite) and task.size("train") + task.size("eval") == 30
    problem = task.problem("train", 0)
    number = problem.prompt.split()[-1]
    assert problem.answer == f"It is {number}"
    told = "Don't be strict." if int(number[:-1]) % 2 else "none"
    asked = task.ask_judge(problem, "thinking</think> Forty-two. ")
    assert f"Reference answer: It is {number}" in asked and "Answer: Forty-two.\n" in asked
    assert f"\n\nInstructions: {told}\n\n" in asked
    assert "thinking" not in asked
    assert try_task(task) == [], "posed, but not graded"


@pytest.mark.parametrize(
    ("text", "value", "outcome"),
    [
        ("It agrees. Score: 10", 1.0, Outcome.RIGHT),
        ("Score: 3 at first, but then\nscore: 7.5", 0.75, Outcome.WRONG),
        ("<think>Score: 9</think> Score: 1", 0.1, Outcome.WRONG),
        ("Score: 11", 0.0, Outcome.UNPARSEABLE),
        ("I cannot say.", 0.0, Outcome.UNPARSEABLE),
        ("", 0.0, Outcome.UNPARSEABLE),
    ],
)
def test_the_last_score_within_the_scale_is_the_reward(
    tmp_path: Path, text: str, value: float, outcome: Outcome
) -> None:
    reward = judge_task(tmp_path).read_score(text)
    assert reward.value == pytest.approx(value)
    assert reward.outcome is outcome


def test_a_score_that_is_not_a_number_is_no_score(tmp_path: Path) -> None:
    task = judge_task(tmp_path, score_pattern="Verdict: (.*)", score_min=-1, score_max=1, pass_score=0)
    assert task.read_score("Verdict: good").outcome is Outcome.UNPARSEABLE
    assert task.read_score("Verdict: nan").outcome is Outcome.UNPARSEABLE
    assert task.read_score("Verdict: 0") == task.read_score("Verdict: 0.0")
    assert (task.read_score("Verdict: 0").value, task.read_score("Verdict: 0").outcome) == (
        0.5,
        Outcome.RIGHT,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"judge_prompt": "Rate {answer}"}, r"judge_prompt='Rate \{answer\}' must contain \{question\}"),
        ({"judge_prompt": "{question} {answer}"}, r"must contain \{reference\}"),
        ({"judge_prompt": "{question} {answer} {reference}"}, r"must contain \{instructions\}"),
        ({"template": "Hello"}, r"template='Hello' must contain \{question\}"),
        ({"score_pattern": "("}, r"score_pattern='\('"),
        ({"score_pattern": "Score"}, "has 0 groups; put parentheses around the score"),
        ({"score_min": 10}, "score_min=10 must be below score_max=10"),
        ({"pass_score": 11}, "pass_score=11 must be from 0 to 10"),
        ({"judge_dtype": "int8"}, "judge_dtype='int8' must be float32 or bfloat16"),
        ({"judge_tokens": 0}, "judge_tokens=0 must be a whole number"),
        ({"score_tolerance": 1.0}, "score_tolerance=1.0 must be"),
        ({"eval_share": 0}, "eval_share=0 must be above 0"),
        ({"judge": "x"}, "task 'judge' has no option 'judge'; did you mean judge_"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        judge_task(tmp_path, **options)


def test_rows_without_a_question_or_reference_are_unusable(tmp_path: Path) -> None:
    broken: list[dict[str, Any]] = [
        ROWS[0] | {"gold_standard_solution": None},
        ROWS[0] | {"prompt": ""},
        ROWS[0] | {"verification_info": "{}"},
        ROWS[0] | {"verification_info": "{"},
    ]
    task = judge_task(tmp_path, [*ROWS, *broken], max_bad_share=0.5)
    assert task.size("train") + task.size("eval") == 30
    assert sorted(task.indices["path"].bad) == [31, 32, 33, 34]
    with pytest.raises(ValueError, match="4 of 34 rows are unusable"):
        judge_task(tmp_path, [*ROWS, *broken]).size("train")


def test_a_run_needs_the_judges_folder(tmp_path: Path) -> None:
    judge_task(tmp_path)
    options: dict[str, Any] = {
        "path": str(tmp_path / "rows.jsonl"),
        "judge_path": str(tmp_path / "judge"),
        **SYNTHETIC,
    }
    spec = TaskSpec(name="judge", options=options)
    with pytest.raises(ValueError, match=r"no folder at judge_path=.*; download a model to it"):
        keep_task_files(spec, tmp_path / "kept", reports=tmp_path)
    (tmp_path / "judge").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json; it must be a model folder"):
        keep_task_files(spec, tmp_path / "kept", reports=tmp_path)
    (tmp_path / "judge" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no model\.safetensors or model\.safetensors\.index\.json"):
        keep_task_files(spec, tmp_path / "kept", reports=tmp_path)
    (tmp_path / "judge" / "model.safetensors").write_bytes(b"weights")
    kept = keep_task_files(spec, tmp_path / "kept", reports=tmp_path)
    assert str(kept.options["judge_path"]).startswith("sha256:")
    pinned = spec.model_copy(update={"options": options | {"judge_path_sha256": "0" * 64}})
    with pytest.raises(ValueError, match="judge_path_sha256 is 000"):
        keep_task_files(pinned, tmp_path / "kept", reports=tmp_path)
    with pytest.raises(ValueError, match="task 'judge' takes no budgets"):
        make_task(spec.model_copy(update={"budgets": (100,)}))
