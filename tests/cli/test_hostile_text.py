"""Text of strangers at the terminal: answers, names and reasons are shown, and never control it."""

import argparse

import pytest

from shoal.cli.commands.compare import print_figures
from shoal.cli.commands.doctor import HealthCheck, print_findings
from shoal.cli.commands.evaluate import compute_figures, format_answers, format_figures
from shoal.cli.commands.rollouts import print_group
from shoal.cli.commands.sample_answers import GradedAnswer, PosedProblem
from shoal.cli.ui.errors import describe_error
from shoal.net.http_client import Refused
from shoal.tasks.task import Outcome, Problem
from shoal.wire.messages import ProblemDetails
from shoal.wire.page_data import RolloutGroup
from shoal.wire.transcript import SampleText

HOSTILE = "\x1b]0;a new title\x07\x1b[2J\x9b31m\x08\r\u202e[bold]"
"""Sets the window's title, clears the screen, changes colours, overwrites, turns the direction of writing, and is Rich's markup."""


def is_plain(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


def test_rollouts_of_strangers(capsys: pytest.CaptureFixture[str]) -> None:
    sample = SampleText(
        pieces=(HOSTILE, "4"),
        logprobs=(-0.1, -0.2),
        reward=1.0,
        outcome="right",
        num_tokens=2,
        ended=True,
        cut_at=0,
        judgement=HOSTILE,
    )
    group = RolloutGroup(
        group_id="g",
        held_out=False,
        task=HOSTILE,
        policy_version=1,
        node=HOSTILE,
        given_at_s=0.0,
        prompt=HOSTILE,
        expected=HOSTILE,
        samples=(sample,),
        state=HOSTILE,
        trained_version=None,
        code=HOSTILE,
        detail=HOSTILE,
        checks="full",
        evidence={},
    )
    print_group(group)
    shown = capsys.readouterr().out
    assert is_plain(shown)
    assert shown.count("\\x1b]0;") >= 5, "it is shown, escaped"
    print_group(group.model_copy(update={"samples": ()}))
    assert "mean reward 0.000" in " ".join(capsys.readouterr().out.split())


def test_answers_of_an_evaluation() -> None:
    posed = PosedProblem(0, 0, Problem(prompt=HOSTILE, answer=HOSTILE))
    answer = GradedAnswer(Outcome.RIGHT, 1.0, 1, cut=False, off_budget=None, text=HOSTILE)
    assert is_plain(format_answers([(posed, (answer,))]))
    settings = {"model": "tiny", "version": 1, "task": {"name": HOSTILE}, "temperature": 1.0, "seed": 0}
    figures = compute_figures([(answer,)], k=1)
    assert is_plain(format_figures(figures, settings | {"max_new_tokens": 8}))


def test_figures_of_runs_that_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures([HOSTILE, "[/x]"], [["task", HOSTILE, "[/x]"], ["versions", "1\n2", "2"]])
    shown = capsys.readouterr().out
    assert is_plain(shown) and shown.count("[/x]") == 2, "brackets are text, not Rich's markup"


def test_an_error_that_quotes_a_stranger() -> None:
    problem = ProblemDetails(code=HOSTILE, detail=HOSTILE, fix=HOSTILE, server_time_s=0.0)
    assert is_plain(describe_error(Refused("POST /v1/leases", problem), argparse.Namespace()))


def test_findings_about_a_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([HealthCheck("coordinator", "bad", HOSTILE)])
    assert is_plain(capsys.readouterr().out)
