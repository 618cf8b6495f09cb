"""`--set`: how keys and values are read, what a run file becomes, and the runs of a sweep."""

import argparse
import tomllib
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.cli.run.overrides import (
    apply_overrides,
    combinations,
    dump_tables,
    overridden_text,
    parse_override,
)
from shoal.cli.run.runfile import load_run_file
from shoal.cli.run.sweep import SweepRow, format_rows, plan_run

DEMO = Path(__file__).parents[2] / "runs" / "demo.toml"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("trainer.learning_rate=1e-5", [1e-5]),
        ("trainer.learning_rate=1e-5,3e-5", [1e-5, 3e-5]),
        ("run.model=models/qwen", ["models/qwen"]),
        ('run.model="a,b"', ["a,b"]),
        ("trainer.betas=[0.9, 0.95]", [[0.9, 0.95]]),
        ("trainer.betas=[0.9,0.95],[0.8,0.9]", [[0.9, 0.95], [0.8, 0.9]]),
        ("trainer.compile=true", [True]),
        ("task.options.length=4", [4]),
        ("trainer.loss=grpo,gspo", ["grpo", "gspo"]),
    ],
)
def test_values_are_read_as_in_toml(word: str, expected: list[object]) -> None:
    assert parse_override(word) == (word.partition("=")[0], expected)


@pytest.mark.parametrize("word", ["learning_rate=1", "trainer.learning_rate", "=1", "trainer.=1"])
def test_a_word_without_section_and_value_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"write SECTION\.KEY=VALUE"):
        parse_override(word)


def test_a_run_file_is_loaded_with_other_values() -> None:
    words = (
        "trainer.learning_rate=1e-5",
        "sampling.temperature=0.8",
        "task.options.length=3",
        "trainer.seed=7",
    )
    file = load_run_file(DEMO, overrides=words)
    assert (file.trainer.learning_rate, file.sampling.temperature, file.trainer.seed) == (1e-5, 0.8, 7)
    assert file.task[0].options["length"] == 3
    with pytest.raises(ValueError, match=r"trainer\.learning_rat is not a key"):
        load_run_file(DEMO, overrides=("trainer.learning_rat=1",))
    with pytest.raises(ValueError, match=r"only `shoal run` makes a sweep"):
        load_run_file(DEMO, overrides=("trainer.seed=1,2",))
    with pytest.raises(ValueError, match="is a value in the run file, not a section"):
        load_run_file(DEMO, overrides=("run.name.short=1",))


def test_the_written_file_has_the_same_values() -> None:
    assert overridden_text(DEMO, ()) == DEMO.read_text()
    words = ('run.name="other"', "local.lies=[]", "trainer.diloco.codec=fp16")
    table = tomllib.loads(DEMO.read_text())
    apply_overrides(table, words)
    assert tomllib.loads(overridden_text(DEMO, words)) == table
    odd = {"a": {"text": 'say "\\hi"\n', "list": [1, 2.5, "x"], "empty": {}, "odd key": True}}
    assert tomllib.loads(dump_tables(odd))["a"]["text"] == odd["a"]["text"]
    assert tomllib.loads(dump_tables(odd))["a"]["odd key"] is True


@pytest.mark.parametrize("text", ["a\x00b", "\x1b[31m", "\x7f", "\b\f\n\t\r", 'é "\\'])
def test_every_character_of_a_text_can_be_written(text: str) -> None:
    assert tomllib.loads(dump_tables({"a": {"text": text, text: 1}})) == {"a": {"text": text, text: 1}}


def test_a_sweep_has_a_run_for_each_combination() -> None:
    assert combinations([]) == [()]
    assert combinations(["trainer.seed=1"]) == [("trainer.seed=1",)]
    runs = combinations(["trainer.seed=1,2", "trainer.loss=grpo,gspo", "run.max_lag=0"])
    assert len(runs) == 4
    assert runs[1] == ("trainer.seed=1", 'trainer.loss="gspo"', "run.max_lag=0")


def test_a_mistake_in_a_later_value_is_found_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(DEMO), "--dry-run", "--dir", str(tmp_path / "runs")]
    assert main([*words, "--set", "trainer.learning_rate=1e-3,abc"]) == 2
    said = capsys.readouterr()
    assert "trainer.learning_rate" in said.err and "'abc'" in said.err
    assert "run 1 of 2" not in said.out


def test_each_run_of_a_sweep_has_its_own_name_and_folder(tmp_path: Path) -> None:
    options = argparse.Namespace(dir=None, resume=True, set=["trainer.seed=1,2"], file=DEMO)
    one = plan_run(options, "demo", 2, ("trainer.seed=2",))
    assert (one.dir, one.resume) == (Path("out/demo-2"), False)
    assert load_run_file(DEMO, overrides=one.set).run.name == "demo-2"
    (tmp_path / "1").mkdir()
    options.dir = tmp_path
    assert plan_run(options, "n" * 40, 1, ()).resume is True
    assert len(load_run_file(DEMO, overrides=plan_run(options, "n" * 40, 11, ()).set).run.name) == 40


def test_the_table_of_a_sweep_begins_with_the_best() -> None:
    rows = [
        SweepRow(
            settings="trainer.seed=1",
            folder="out/a-1",
            first=0.1,
            last=0.2,
            best=0.3,
            best_version=4,
            reward=0.5,
        ),
        SweepRow(
            settings="trainer.seed=2",
            folder="out/a-2",
            first=0.1,
            last=0.4,
            best=0.4,
            best_version=8,
            reward=0.5,
        ),
        SweepRow(settings="trainer.seed=3", folder="out/a-3", failure="the disk is full"),
    ]
    lines = format_rows(rows).splitlines()
    assert lines[1].startswith("trainer.seed=2") and "0.400 (8)" in lines[1]
    assert lines[3].startswith("trainer.seed=3") and lines[3].endswith("FAILED: the disk is full")
