"""The display of a running run."""

import io

import pytest
from rich.console import Console
from small_stats import HONEST, LIAR, evaluation, node, stats, step

from shoal.cli.ui.view import (
    ChangeLog,
    LineView,
    LiveView,
    Pace,
    count_submissions,
    duration,
    headline,
    is_waiting,
    make_view,
    name_of,
    node_table,
)
from shoal.wire.messages import RunWarning

NAMES = {LIAR: "worker-2, lies: truncated", HONEST: "worker-1"}


def refused(times: int, trust: str = "quarantined"):  # type: ignore[no-untyped-def]
    return node(
        LIAR, trust=trust, rejected=times, last_code="reject.early_stop", last_detail=f"row (0, {times})"
    )


def test_headline() -> None:
    assert headline(stats()) == (
        "reward 0.250  train 9,876 tok/s  lag 1.5 (max 2)  generate 1,234 tok/s  accepted 5  refused 2  void 3"
    )
    assert headline(stats(newest_version=None, latest=None)).startswith("no step yet  generate")
    all_accepted = step(accepted_reward_mean=0.5, accepted_rollouts=64)
    assert headline(stats(latest=all_accepted)).startswith("reward 0.250 (all 64 accepted: 0.500)  train")


def test_progress_has_a_bar_and_the_time_that_is_left() -> None:
    pace = Pace()
    pace.note(stats(newest_version=None, latest=None), 0.0)
    assert pace.progress(stats(newest_version=None)) == "[....................] version -/10"
    for version in (2, 3, 4):
        pace.note(stats(newest_version=version), 100.0 * version)
    assert pace.progress(stats(newest_version=4)) == "[########............] version 4/10, about 10 min left"
    assert pace.progress(stats(newest_version=10)) == "[####################] version 10/10"


def test_a_run_that_stalls_says_what_it_waits_for() -> None:
    pace = Pace()
    for version in (2, 3, 4):
        pace.note(stats(newest_version=version), 5.0 * version)
    pace.note(stats(newest_version=4), 39.0)
    assert not pace.stalled and pace.progress(stats(newest_version=4)).endswith("about 30 s left")
    pace.note(stats(newest_version=4), 41.0)
    assert pace.stalled and pace.progress(stats(newest_version=4)).endswith("version 4/10")
    pace.note(stats(newest_version=5), 42.0)
    assert not pace.stalled


def test_a_finished_run_waits_for_nothing() -> None:
    seen = stats(finished=True, waiting_for="nothing: the run is finished")
    pace = Pace()
    pace.note(seen, 10.0)
    assert pace.waiting(seen, 20.0) == "the run is finished"


def test_stalled_lines_have_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, out = [0.0], io.StringIO()
    monkeypatch.setattr("shoal.cli.ui.view.time.monotonic", lambda: now_s[0])
    view = make_view(NAMES, Console(file=out, width=40))
    for version, second in ((2, 0), (3, 5), (3, 60)):
        now_s[0] = float(second)
        view.show(stats(newest_version=version, waiting_for="rollouts: 2 of 4 groups ready"))
    lines = out.getvalue().splitlines()
    assert "waiting for" not in lines[-2]
    assert lines[-1].endswith(
        "(waiting for rollouts: 2 of 4 groups ready, 55 s so far; a version takes about 5 s)"
    )


def test_waiting_counts_the_seconds_of_one_reason() -> None:
    pace, first = Pace(), "rollouts: 1 of 4 groups ready"
    pace.note(stats(waiting_for=first), 10.0)
    pace.note(stats(waiting_for="rollouts: 2 of 4 groups ready"), 20.0)
    assert pace.waiting(stats(waiting_for=first), 40.0) == f"waiting for {first}, 30 s so far"
    pace.note(stats(newest_version=4, waiting_for=first), 50.0)
    assert pace.waiting(stats(waiting_for=first), 51.0) == (
        f"waiting for {first}, 1 s so far; a version takes about 40 s"
    )


def test_durations() -> None:
    assert [duration(value) for value in (8, 89, 200, 7500)] == ["8 s", "89 s", "3 min", "2 h 5 min"]


def test_warnings_and_void_reasons_are_reported_once() -> None:
    news = ChangeLog({})
    warned = RunWarning(source="trainer", text="starving: waits", version=3, time_s=1.0)
    said = RunWarning(source="shoal run", text="said when it happened", time_s=2.0)
    assert news.since_last(stats(warnings=(warned, said))) == ["warning, version 3: starving: waits"]
    assert news.since_last(stats(warnings=(warned, said))) == []
    for void, lease in ((1, "00aa00aa"), (2, "11bb11bb")):
        told = news.since_last(
            stats(
                nodes=(node(HONEST, void=void, last_code="void.infra", last_detail=f"lease {lease}: gone"),)
            )
        )
        assert len(told) == (void == 1)


@pytest.mark.parametrize(
    ("latest", "waiting_for", "said"),
    [
        (True, "rollouts: 1 of 4 groups ready", False),
        (True, "the trainer: it is training version 4", False),
        (True, "workers: none live (0 of 2 enrolled)", True),
        (True, "relays: none live (0 of 1 known)", True),
        (True, "a validator: 3 submissions queued", True),
        (False, "a policy: the trainer has not published version 0", True),
    ],
)
def test_waiting_is_shown_before_the_first_step_and_when_a_role_is_missing(
    latest: bool, waiting_for: str, said: bool
) -> None:
    seen = stats(waiting_for=waiting_for) if latest else stats(waiting_for=waiting_for, latest=None)
    assert is_waiting(seen) is said


def test_count_submissions() -> None:
    assert count_submissions(stats()) == {"accepted": 5, "refused": 2, "void": 3}
    assert count_submissions(stats(submissions={})) == {"accepted": 0, "refused": 0, "void": 0}


def test_changes_are_reported_once() -> None:
    news = ChangeLog(NAMES)
    assert news.since_last(stats(nodes=(node(HONEST), node(LIAR)))) == []
    assert news.since_last(stats(nodes=(node(HONEST), refused(1)))) == [
        "worker-2, lies: truncated (11111111) refused: an answer ends where the model would not have ended it "
        "[reject.early_stop: row (0, 1)]"
    ]
    assert news.since_last(stats(nodes=(node(HONEST), refused(1)))) == []
    told = news.since_last(stats(nodes=(node(HONEST), refused(2, "banned"))))
    assert len(told) == 2
    assert told[1] == (
        "worker-2, lies: truncated (11111111) ejected after 2 refusals; the refused work is not trained on"
    )
    assert news.since_last(stats(nodes=(node(HONEST), refused(2, "banned")))) == []


def test_held_out_results_are_reported() -> None:
    news = ChangeLog({})
    assert news.since_last(stats(evaluations=(evaluation(0, 0.125, complete=False),))) == []
    assert news.since_last(stats(evaluations=(evaluation(0, 0.125),))) == [
        "held-out reward of version 0: 0.125 over 128 rollouts"
    ]
    assert news.since_last(stats(evaluations=(evaluation(0, 0.125), evaluation(10, 0.5)))) == [
        "held-out reward of version 10: 0.500 over 128 rollouts"
    ]


def test_a_node_without_a_name_is_shown_by_its_key() -> None:
    (told, _) = ChangeLog({}).since_last(stats(nodes=(refused(2, "banned"),)))
    assert told.startswith("11111111 refused: ")


def test_lines_for_logs_and_pipes() -> None:
    out = io.StringIO()
    view = make_view(NAMES, Console(file=out, width=40))
    assert isinstance(view, LineView)
    view.show(stats(nodes=(refused(1),)))
    view.show(stats(nodes=(refused(1),)))
    view.say("[bold]said[/bold] \x1b[31mred\nnext line")
    view.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3, "the refusal, one headline for both looks, and what was said, however long"
    assert "refused: an answer ends" in lines[0]
    assert "version 3/10" in lines[1]
    assert lines[2].endswith(r"[bold]said[/bold] \x1b[31mred\nnext line"), (
        "as it is, and nothing a terminal obeys"
    )


def test_a_table_for_terminals() -> None:
    out = io.StringIO()
    view = make_view(NAMES, Console(file=out, force_terminal=True, width=200, height=40))
    assert isinstance(view, LiveView)
    evil = node("33" * 32, phase="\x1b[2J[red]mine", policy_version=None, last_code=None)
    view.show(stats(nodes=(node(HONEST), refused(2, "banned"), evil)))
    view.close()
    shown = out.getvalue()
    for words in (
        "last verdict",
        "worker-1 (22222222)",
        "ejected",
        "12,345",
        "ejected after 2 refusals",
        "waiting for",
    ):
        assert words in shown
    assert "\x1b[2J" not in shown
    assert "[red]mine" in shown


@pytest.mark.parametrize(
    ("width", "there", "not_there"),
    [
        (60, ("worker", "trust", "version", "accepted", "refused"), ("state", "credit", "last verdict")),
        (80, ("credit", "void", "tok/s"), ("state", "last verdict")),
        (120, ("state", "credit", "last verdict"), ()),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns(
    width: int, there: tuple[str, ...], not_there: tuple[str, ...]
) -> None:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as seen:
        console.print(node_table(stats(nodes=(node(HONEST), node(LIAR))), {HONEST: "worker-1"}, width))
    title, *rows = seen.get().splitlines()
    assert all(word in title for word in there) and not any(word in title for word in not_there)
    assert any("worker-1 (" in row for row in rows)
    assert "…" not in title
    assert max(map(len, rows)) <= width


def test_a_worker_has_the_name_that_its_run_gave_it() -> None:
    assert name_of(node(HONEST, name="worker-1"), {}) == f"worker-1 ({HONEST[:8]})"
    assert name_of(node(HONEST), {}) == HONEST[:8]
