"""The verdict on a finished run, its summary and its plot."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_stats import HONEST, LIAR, evaluation, node, stats, step

from shoal.cli.run.runfile import LocalSection, RunFile, load_run_file
from shoal.cli.run.summary import LocalWorker, RunVerdict, judge_run, print_summary
from shoal.cli.ui.plot import plot_rewards
from shoal.wire.ledger import TokenCounts
from shoal.wire.messages import History, RelayView

WORKERS = {LIAR: LocalWorker("worker-2", "truncated"), HONEST: LocalWorker("worker-1", None)}
NAMES = {node: worker.display_name for node, worker in WORKERS.items()}
RISEN = (evaluation(0, 0.2), evaluation(5, 0.1), evaluation(10, 0.5))
CAUGHT = (node(HONEST), node(LIAR, trust="banned", rejected=2))


@pytest.fixture
def file() -> RunFile:
    """Returns a run file with one lying worker and an expected gain of 0.2."""
    file = load_run_file(Path(__file__).parent.parent.parent / "runs" / "demo.toml")
    return file.model_copy(update={"local": LocalSection(lies=("truncated",), expect_gain=0.2)})


def expecting(file: RunFile, gain: float | None) -> RunFile:
    return file.model_copy(update={"local": file.local.model_copy(update={"expect_gain": gain})})


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ({"evaluations": RISEN, "nodes": CAUGHT}, RunVerdict.GOOD),
        ({"evaluations": RISEN[:2], "nodes": CAUGHT}, RunVerdict.NO_GAIN),
        ({"evaluations": RISEN[:1], "nodes": CAUGHT}, RunVerdict.NO_GAIN),
        (
            {"evaluations": (RISEN[0], evaluation(10, 0.9, complete=False)), "nodes": CAUGHT},
            RunVerdict.NO_GAIN,
        ),
        (
            {"evaluations": RISEN, "nodes": (node(HONEST), node(LIAR, rejected=1))},
            RunVerdict.LIAR_NOT_EJECTED,
        ),
        (
            {"evaluations": RISEN, "nodes": (node(HONEST, trust="banned"), CAUGHT[1])},
            RunVerdict.HONEST_EJECTED,
        ),
    ],
)
def test_verdict_of_a_run(file: RunFile, values: dict[str, Any], outcome: RunVerdict) -> None:
    assert judge_run(file, stats(**values), WORKERS) is outcome


def test_the_verdict_does_not_depend_on_the_wording_of_display_names(
    file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalWorker, "display_name", property(lambda self: "somebody"))
    seen = stats(evaluations=RISEN, nodes=CAUGHT)
    assert judge_run(file, seen, WORKERS) is RunVerdict.GOOD
    named_like_a_liar = {LIAR: WORKERS[LIAR], HONEST: LocalWorker("worker-1, lies: never", None)}
    assert judge_run(file, seen, named_like_a_liar) is RunVerdict.GOOD


def test_a_liar_that_never_enrolled_was_not_ejected(file: RunFile) -> None:
    seen = stats(evaluations=RISEN, nodes=(node(HONEST),))
    assert judge_run(file, seen, {HONEST: WORKERS[HONEST]}) is RunVerdict.LIAR_NOT_EJECTED


def test_without_an_expectation_no_gain_is_required(file: RunFile) -> None:
    fallen = (evaluation(0, 0.5), evaluation(10, 0.4))
    for evaluations in ((), fallen):
        seen = stats(evaluations=evaluations, nodes=CAUGHT)
        assert judge_run(expecting(file, None), seen, WORKERS) is RunVerdict.GOOD
    assert (
        judge_run(expecting(file, 0.0), stats(evaluations=fallen, nodes=CAUGHT), WORKERS)
        is RunVerdict.NO_GAIN
    )


def summary(file: RunFile, folder: Path, *, plotted: bool = True, **values: Any) -> list[str]:
    out = io.StringIO()
    seen = stats(nodes=CAUGHT, **values)
    print_summary(
        file, seen, RunVerdict.GOOD, folder, plotted=plotted, names=NAMES, console=Console(file=out, width=20)
    )
    return out.getvalue().splitlines()


def test_the_summary(file: RunFile) -> None:
    relay = RelayView(url="http://127.0.0.1:1", liveness="live", versions=(3,), bytes_sent=1_500_000)
    folder = Path("/data/[bold]runs")
    groups = {"batched": 12, "dropped": 5, "stale": 2, "ready": 1}
    lines = summary(
        file,
        folder,
        newest_version=10,
        evaluations=RISEN,
        relays=(relay, relay),
        groups=groups,
        unparseable=0.1,
    )
    assert lines == [
        "run demo: as expected",
        "  held-out reward   0.200 (version 0) -> 0.500 (version 10), expected a gain of 0.20",
        f"  best version      10, held-out reward 0.500: shoal export {folder} --version best --out FOLDER",
        "  versions          11 published, 12 groups trained on in 3 batches",
        "  filtering         25% of rollouts in groups without signal (5 of 20 groups), 2 groups stale; 10% of answers unparseable",
        "  broadcast         2.5 MB published, 3.0 MB sent by relays",
        "  submissions       5 accepted, 2 refused, 3 void",
        "  worker-1 (22222222)                      trusted      credit     12,345   accepted 5, refused 0, void 0",
        "  worker-2, lies: truncated (11111111)     ejected      credit     12,345   accepted 5, refused 2, void 0",
        f"  files             {folder}: metrics in trainer/metrics.jsonl, ledger in coordinator/, logs in logs/",
        f"  model             {folder}/model: the newest version, for transformers or `shoal chat {folder}`",
        f"  plot              {folder}/reward.png",
    ]


def test_the_arithmetic_of_a_run(file: RunFile) -> None:
    tokens = TokenCounts(generated=900, held_out=100, checked=600, trained=100, dropped=650, unused=50)
    lines = summary(file, Path("x"), tokens=tokens)
    assert any(
        "900 generated (100 held out), 600 checked, 100 trained on, 650 dropped" in line for line in lines
    )
    # 3 forward passes for each trained token: 300 against 1,500.
    assert any("training : inference = 1 : 5.00" in line for line in lines)


def test_summary_without_evaluations_or_plot(file: RunFile) -> None:
    lines = summary(expecting(file, None), Path("x"), plotted=False, newest_version=None)
    assert "  held-out reward   fewer than two evaluations were completed" in lines
    assert lines[-1] == "  plot              none: pip install 'shoal-rl[plot]'"


def test_the_plot_is_a_png_with_its_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda axes, text: titles.append(text))
    steps = tuple(step(version=version, reward_mean=version / 10) for version in range(1, 11))
    for history in (History(steps=steps, evaluations=RISEN), History(steps=(), evaluations=())):
        path = tmp_path / "reward.png"
        assert plot_rewards(history, path, "a title with $ and [brackets]")
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert titles == ["a title with $ and [brackets]"] * 2


def test_no_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)  # as if it were not installed
    assert not plot_rewards(History(steps=(), evaluations=()), tmp_path / "reward.png", "title")
    assert not (tmp_path / "reward.png").exists()
