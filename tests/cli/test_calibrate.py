"""`shoal toploc prove` and `calibrate`, and a run file that names what they wrote."""

import shutil
import tomllib
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.cli.run.runfile import load_run_file
from shoal.model.builtin import create_model
from shoal.toploc.decision import MIN_SEGMENTS
from shoal.wire.proof_noise import Noise

RUNS = Path(__file__).parent.parent.parent / "runs"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    rows = folder / "here.parquet"
    prove = [
        "toploc",
        "prove",
        "--model",
        "tiny",
        "--task",
        "sort",
        "--rows",
        "240",
        "--max-new-tokens",
        "12",
    ]
    assert main([*prove, "--out", str(rows)]) == 0
    out = folder / "noise.json"
    assert main(["toploc", "calibrate", str(rows), "--model", "tiny", "--out", str(out)]) == 0
    return out


def test_the_written_file_is_a_calibration(calibration: Path) -> None:
    noise = Noise.parse(calibration.read_bytes())
    assert noise.model == "tiny" and noise.compute_dtype == "float32"
    made_by = noise.pairs[0].made_by
    assert made_by.split("/")[1:2] == ["torch"] and made_by.endswith("/float32")
    assert [pair.checked_by.split("/")[1] for pair in noise.pairs] == ["prefill", "plain"]
    assert noise.measured[0] == f"{made_by} to {noise.pairs[0].checked_by}: 240 rows"
    assert sum(moments.segments for moments in noise.mismatches.by_size) > 200


def test_a_run_file_names_it_and_everybody_gets_it(calibration: Path) -> None:
    beside = calibration.parent / "run.toml"
    text = (RUNS / "demo.toml").read_text()
    beside.write_text(text.replace("[run]\n", '[run]\ncalibration = "noise.json"\n', 1))
    assert load_run_file(beside).spec().noise == Noise.parse(calibration.read_bytes())


def test_a_calibration_of_another_dtype_or_none_at_all_is_refused(calibration: Path) -> None:
    beside = calibration.parent / "other.toml"
    text = (RUNS / "demo.toml").read_text()
    beside.write_text(text.replace("[run]\n", '[run]\ncalibration = "nowhere.json"\n', 1))
    with pytest.raises(ValueError, match=r"nowhere\.json: no such file or directory; make it with"):
        load_run_file(beside)
    beside.write_text(
        text.replace('compute_dtype = "float32"', 'calibration = "noise.json"\ncompute_dtype = "bfloat16"', 1)
    )
    with pytest.raises(
        ValueError, match="the calibration was measured in float32, compute_dtype is bfloat16"
    ):
        load_run_file(beside)


def test_a_calibration_is_of_one_temperature_and_one_size_of_proofs(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Colder honest work has larger log-prob errors: by a warmer calibration it would be refused."""
    beside = calibration.parent / "colder.toml"
    text = (RUNS / "demo.toml").read_text().replace("[run]\n", '[run]\ncalibration = "noise.json"\n', 1)
    beside.write_text(text.replace("temperature = 1.0", "temperature = 0.6"))
    with pytest.raises(ValueError, match=r"at temperature 1, task 'sort' has 0\.6; calibrate this run file"):
        load_run_file(beside).spec()
    beside.write_text(text + "\n[proof]\ntopk = 64\n")
    with pytest.raises(ValueError, match="the calibration was measured with topk = 128, segment_tokens = 32"):
        load_run_file(beside).spec()

    rows, out = tmp_path / "cold.parquet", tmp_path / "cold.json"
    small = ["--task", "sort", "--rows", "240", "--max-new-tokens", "12"]
    cold = ["--model", "tiny", "--temperature", "0.6"]
    assert main(["toploc", "prove", *small, *cold, "--out", str(rows)]) == 0
    assert main(["toploc", "calibrate", str(rows), *cold, "--out", str(out)]) == 0
    assert Noise.parse(out.read_bytes()).temperature == 0.6
    assert main(["toploc", "calibrate", str(rows), *cold[:2], "--out", str(out)]) == 2
    assert "share of draws that are off" in capsys.readouterr().err


def test_too_few_rows_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "few.parquet"
    prove = ["toploc", "prove", "--model", "tiny", "--task", "sort", "--rows", "8", "--max-new-tokens", "6"]
    assert main([*prove, "--out", str(rows)]) == 0
    out = ["--out", str(tmp_path / "noise.json")]
    assert main(["toploc", "calibrate", str(rows), "--model", "tiny", *out]) == 2
    assert "need 200 or more; generate more" in capsys.readouterr().err


def test_rows_of_another_model_do_not_become_honest(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_model("tiny", tmp_path / "other", seed=7)
    words = ["toploc", "calibrate", str(calibration.with_name("here.parquet"))]
    out = tmp_path / "noise.json"
    assert main([*words, "--model", str(tmp_path / "other"), "--out", str(out)]) == 2
    assert "was not made by these weights in float32: exponents that differ" in capsys.readouterr().err
    assert not out.exists()


def test_a_bfloat16_run_measures_its_own_noise(tmp_path: Path) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "noise.json"
    file.write_text((RUNS / "demo.toml").read_text().replace('"float32"', '"bfloat16"', 1))
    assert load_run_file(file).lacks_calibration
    assert main(["toploc", "calibrate-run", str(file), "--out", str(out)]) == 0
    calibrated = load_run_file(file, calibration=out)
    assert not calibrated.lacks_calibration
    noise = calibrated.spec().noise
    assert noise is not None and noise.compute_dtype == "bfloat16"
    assert "2048 rows" in noise.measured[0].replace(",", "")
    assert noise.draws is not None and noise.token_sizes == (1, 2, 4, 8)
    units = [moments.segments for moments in (*noise.draws.by_size, *noise.mismatches.by_size)]
    assert min(units) >= MIN_SEGMENTS, "answers of every length are judged by the calibration"


def test_the_calibration_keeps_the_model_for_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To convert a GGUF file takes as long as to calibrate; `shoal run` did it twice."""
    monkeypatch.setattr("shoal.cli.commands.toploc.SHORT_RUN_ROWS", 256)
    file, out, folder = tmp_path / "run.toml", tmp_path / "noise.json", tmp_path / "trainer" / "model"
    text = (RUNS / "demo.toml").read_text().replace('"float32"', '"bfloat16"', 1)
    file.write_text(text.replace("[trainer]", "[trainer]\nseed = 5", 1))
    words = ["toploc", "calibrate-run", str(file), "--out", str(out), "--write-model", str(folder)]
    assert main(words) == 0
    create_model("tiny", tmp_path / "as-the-trainer", seed=5)
    written = (folder / "model.safetensors").read_bytes()
    assert written == (tmp_path / "as-the-trainer" / "model.safetensors").read_bytes()
    # A model that is there is measured as it is: that of a run which was stopped during its calibration.
    shutil.rmtree(folder)
    create_model("tiny", folder, seed=6)
    kept, noise = (folder / "model.safetensors").read_bytes(), out.read_bytes()
    assert main(words) == 0
    assert (folder / "model.safetensors").read_bytes() == kept and out.read_bytes() != noise


def test_a_run_of_several_tasks_measures_each_of_them_at_its_temperatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another task has other prompts and lengths, and a cold evaluation has larger log-prob errors."""
    monkeypatch.setattr("shoal.cli.commands.toploc.SHORT_RUN_ROWS", 256)
    file, out = tmp_path / "run.toml", tmp_path / "noise.json"
    terms = tomllib.loads((RUNS / "demo.toml").read_text())
    file.write_text(
        f"""
        [run]
        name = "two-tasks"
        model = "tiny"
        compute_dtype = "bfloat16"
        last_version = 4
        [[task]]
        name = "sort"
        [[task]]
        name = "sort"
        label = "longer"
        options = {{ length = 5 }}
        difficulty = true
        [[eval]]
        task = "longer"
        every = 2
        prompts = 4
        samples = 1
        [[eval]]
        task = "sort"
        every = 2
        prompts = 4
        samples = 1
        [[eval]]
        task = "sort"
        label = "cold"
        every = 2
        prompts = 4
        samples = 1
        temperature = 0.5
        [sampling]
        max_new_tokens = {terms["sampling"]["max_new_tokens"]}
        """
    )
    assert main(["toploc", "calibrate-run", str(file), "--out", str(out)]) == 0
    noise = load_run_file(file, calibration=out).spec().noise
    assert noise is not None and noise.temperatures == (1.0, 0.5)
    of_tasks = [line.rpartition(", ")[2] for line in noise.measured]
    assert sorted(set(of_tasks)) == ["task longer: 256 rows", "task sort: 256 rows"]
    (cold,) = noise.other_temperatures
    assert {line.rpartition(", ")[2] for line in cold.measured} == {"evaluation cold: 256 rows"}
    assert [pair.checked_by.split("/")[1] for pair in noise.pairs] == ["prefill", "plain"]
    assert noise.at(0.5) is cold and noise.at(1.0) is noise

    file.write_text(file.read_text().replace("temperature = 0.5", "temperature = 0.7"))
    with pytest.raises(ValueError, match=r"at temperature 1 and 0\.5, evaluation 'cold' has 0\.7; calibrate"):
        load_run_file(file, calibration=out).spec()


ONLY_EVALUATED = """
from shoal.tasks import Outcome, Problem, Reward


class Held:
    chat = False

    def size(self, split):
        return 8 if split == "eval" else 0

    def problem(self, split, seed):
        if split == "train":
            raise ValueError("Held is for evaluation only; train on another task")
        return Problem(f"{seed % 8} + 1 =", str(seed % 8 + 1))

    def reward(self, problem, text, num_tokens):
        return Reward(float(text == problem.answer), Outcome.RIGHT if text == problem.answer else Outcome.WRONG)
"""


def test_a_task_that_is_only_evaluated_is_calibrated_on_its_held_out_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.commands.toploc.SHORT_RUN_ROWS", 256)
    (tmp_path / "held.py").write_text(ONLY_EVALUATED)
    file, out = tmp_path / "run.toml", tmp_path / "noise.json"
    text = (RUNS / "demo.toml").read_text().replace('"float32"', '"bfloat16"', 1)
    file.write_text(f'{text}\n[[eval]]\ntask = {{ name = "{tmp_path}/held.py:Held", label = "held" }}\n')
    assert main(["toploc", "calibrate-run", str(file), "--out", str(out)]) == 0
    assert any("evaluation held" in line for line in Noise.parse(out.read_bytes()).measured)


def test_files_of_the_same_kind_of_machine_are_measured_apart(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have the same compute class: the second one must not replace the first."""
    rows, out = calibration.with_name("here.parquet"), tmp_path / "noise.json"
    other = tmp_path / "there.parquet"
    other.write_bytes(rows.read_bytes())
    words = ["toploc", "calibrate", "--model", "tiny", "--out", str(out), str(rows)]
    assert main([*words, str(other)]) == 0
    noise = Noise.parse(out.read_bytes())
    assert sorted(line.rpartition(", ")[2] for line in noise.measured) == [
        "here: 240 rows",
        "here: 240 rows",
        "there: 240 rows",
        "there: 240 rows",
    ]
    assert len(noise.pairs) == 2 and sum(one.segments for one in noise.mismatches.by_size) > 900
    again = tmp_path / "again" / "here.parquet"
    again.parent.mkdir()
    again.write_bytes(rows.read_bytes())
    assert main([*words, str(again)]) == 2
    assert "another file with this name has rows of the same kind of machine" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named(
    calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["toploc", "calibrate", str(calibration.with_name("here.parquet")), "--model", "tiny"]
    assert main([*words, "--out", str(tmp_path / "noise.json"), "--device", "tpu"]) == 2
    assert "--device tpu" in capsys.readouterr().err


def test_answers_of_one_token_cannot_be_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "noise.json"
    text = (RUNS / "demo.toml").read_text().replace('"float32"', '"bfloat16"', 1)
    file.write_text(text.replace("max_new_tokens = 8", "max_new_tokens = 1"))
    assert main(["toploc", "calibrate-run", str(file), "--out", str(out)]) == 2
    assert "an answer of max_new_tokens = 1 has no proof" in capsys.readouterr().err


def test_a_run_that_admits_rounded_weights_measures_their_noise_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.commands.toploc.SHORT_RUN_ROWS", 256)
    file, out = tmp_path / "run.toml", tmp_path / "noise.json"
    text = (RUNS / "demo.toml").read_text().replace('"float32"', '"bfloat16"', 1)
    file.write_text(text + "\n[admitted_weights]\nint8 = 0.5\nfp8 = 0.5\n")
    assert main(["toploc", "calibrate-run", str(file), "--out", str(out)]) == 0
    noise = load_run_file(file, calibration=out).spec().noise
    assert noise is not None
    made_by = [pair.made_by.rpartition("/")[2] for pair in noise.pairs]
    assert made_by == [
        "bfloat16",
        "bfloat16",
        "bfloat16-int8",
        "bfloat16-int8",
        "bfloat16-fp8",
        "bfloat16-fp8",
    ]
    assert [pair.checked_by.rpartition("/")[2] for pair in noise.pairs] == made_by
    # Checked with weights rounded alike, rounded weights have about the noise of the published ones.
    means = [pair.noise.mismatches.by_size[-1].mean for pair in noise.pairs]
    assert max(means) < 2 * min(means) + 1


def test_a_bfloat16_coordinator_without_a_calibration_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    text = (RUNS / "demo.toml").read_text().replace('"float32"', '"bfloat16"', 1)
    file.write_text(text)
    assert main(["coordinator", str(file), "--dir", str(tmp_path / "c"), "--port", "0"]) == 2
    assert "calibrate-run" in capsys.readouterr().err
    file.write_text(text.replace("[run]\n", "[run]\nuncalibrated = true\n", 1))
    assert not load_run_file(file).lacks_calibration
