"""The run file: what is refused and in which words, and what a good one implies."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

from shoal.cli.run.preflight import try_run
from shoal.cli.run.runfile import _NAMES_ELSEWHERE, RunFile, derived_numbers, load_run_file
from shoal.model.builtin import _TINY_CONFIG, ALPHABET, create_model
from shoal.model.tokenizer import CharTokenizer
from shoal.rollout.engine import vllm_engine
from shoal.wire.run_spec import default_tolerances

ROOT = Path(__file__).parent.parent.parent
SHIPPED = sorted((ROOT / "runs").glob("*.toml"))

GOOD = """
[run]
name = "test"
model = "tiny"
last_version = 25
[task]
name = "sort"
options = { length = 4 }
[sampling]
max_new_tokens = 8
samples_per_prompt = 4
[trainer]
row_tokens = 64
rows_per_micro_batch = 2
[coordinator]
groups_per_step = 6
prompts_per_lease = 4
eval_every = 10
eval_prompts = 32
eval_samples = 2
"""


def load(tmp_path: Path, text: str) -> RunFile:
    path = tmp_path / "test.toml"
    path.write_text(text)
    return load_run_file(path)


def complaint(tmp_path: Path, text: str) -> str:
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    said = str(caught.value)
    assert str(tmp_path / "test.toml") in said, "which file"
    assert "pydantic" not in said and len(said) < 400, said
    return said.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_example_files_are_good(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = load_run_file(path)
    try_run(file, path, starts=False)
    assert file.run.name == path.stem, "`out/NAME` should be where one looks for it"
    assert derived_numbers(file)


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ("last_version = 25", 'last_version = "25"', "run.last_version = '25': it must be a valid integer"),
        ("last_version = 25", "last_version = -1", "run.last_version = -1: "),
        ("last_version = 25", "", "run.last_version is missing"),
        ("last_version = 25", "last_verison = 25", "run.last_verison is not a key of a run file; did you mean run.last_version? `shoal docs run-file`"),
        ('name = "test"', 'name = "../test"', "run.name = '../test': "),
        ('model = "tiny"', "model = 1", "run.model = 1: "),
        ('name = "sort"', 'name = "sorting"', "task: unknown task 'sorting'; did you mean sort? known: add, count, "),
        ("length = 4", "length = 40", "task: sort: length=40 must be a whole number from 2 to 12"),
        ("length = 4", "lenght = 4", "task: task 'sort' has no option 'lenght'; did you mean length?"),
        ("max_new_tokens = 8", "max_new_tokens = 64", "trainer.row_tokens = 64 cannot hold a prompt and"),
        ("row_tokens = 64", "keep_versions = 9", "trainer.keep_versions is not a key of a run file; did you mean run.keep_versions? "),
        ("row_tokens = 64", "lr = 1e-5", "trainer.lr is not a key of a run file; did you mean trainer.learning_rate? "),
        ("eval_every = 10", "keep_versions = 9", "coordinator.keep_versions is not a key"),
        ("last_version = 25", "last_version = 25\nmax_lag = 5", "keep_versions = 5 must exceed max_lag = 5"),
        ("row_tokens = 64", "row_tokens = 64\ndelta = 1.1", "trainer: delta=1.1 must be above 1 + eps = 1.2"),
        ("row_tokens = 64", "row_tokens = 64\noptimizer_steps = 7", "trainer.optimizer_steps = 7 is more than coordinator.groups_per_step = 6"),
        ("row_tokens = 64", "row_tokens = 64\nlearning_rate = inf", "trainer.learning_rate = "),
        ("row_tokens = 64", "row_tokens = 1979-05-27", "trainer.row_tokens = '1979-05-27': "),
        ("[sampling]", "[tolerances]\ndraw = -1\n[sampling]", "tolerances.draw = -1: "),
        ("[sampling]", "[weather]\n[sampling]", "weather is not a key of a run file; `shoal docs run-file`"),
    ],
)  # fmt: skip
def test_errors_name_file_key_and_value(tmp_path: Path, line: str, instead: str, words: str) -> None:
    assert line in GOOD
    assert f"test.toml: {words}" in complaint(tmp_path, GOOD.replace(line, instead))


def test_keys_by_the_names_of_other_systems_exist() -> None:
    file = RunFile.model_fields
    for key in _NAMES_ELSEWHERE.values():
        section, _, name = key.partition(".")
        assert section in file and f"`{name}`" in (ROOT / "docs" / "run-file.md").read_text()


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    said = complaint(tmp_path, GOOD.replace("row_tokens", "row_token").replace("25", "-1"))
    assert len(said.splitlines()) == 2


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run file at .*nothing\.toml; `shoal init .*` writes one"):
        load_run_file(tmp_path / "nothing.toml")
    with pytest.raises(ValueError, match="is a folder, not a run file"):
        load_run_file(tmp_path)
    assert "is not TOML" in complaint(tmp_path, "[run\n")
    (tmp_path / "test.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not TOML"):
        load_run_file(tmp_path / "test.toml")


def test_unknown_models_and_lies(tmp_path: Path) -> None:
    path = tmp_path / "test.toml"
    with pytest.raises(
        ValueError,
        match=r"test\.toml: run.model = 'tinny' is neither a model folder nor a GGUF file nor one of tiny",
    ):
        try_run(load(tmp_path, GOOD.replace('"tiny"', '"tinny"')), path, starts=False)
    with pytest.raises(
        ValueError, match=r"test\.toml: local.lies: unknown lie 'white'; known: wrong-weights"
    ):
        try_run(load(tmp_path, GOOD + '[local]\nlies = ["white"]\n'), path, starts=False)


def test_an_engine_that_is_not_installed_is_refused_before_roles_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in vllm_engine.SETTINGS:  # set by the check, removed after the test
        monkeypatch.setenv(name, "0")
    path, file = tmp_path / "test.toml", load(tmp_path, GOOD + '[local]\nengine = "vllm"\n')
    with pytest.raises(
        ValueError, match=r"test\.toml: local.engine = 'vllm': .*pip install 'shoal-rl\[vllm\]'"
    ):
        try_run(file, path, starts=True)
    assert "cannot start here: --engine vllm" in " ".join(try_run(file, path, starts=False))


@pytest.mark.integration  # imports transformers
@pytest.mark.filterwarnings("ignore")
def test_a_family_that_no_role_can_run_is_refused_before_roles_start(tmp_path: Path) -> None:
    """BERT's head has a layer of its own between states and logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 4}
    config = AutoConfig.for_model("bert", vocab_size=88, is_decoder=True, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bert")
    CharTokenizer(ALPHABET).save(tmp_path / "bert")
    file = load(tmp_path, GOOD.replace('"tiny"', f'"{tmp_path / "bert"}"'))
    with pytest.raises(ValueError, match=r"test\.toml: no role can run .*/bert: 'bert' computes logits"):
        try_run(file, tmp_path / "test.toml", starts=True)


def test_a_model_of_the_hub_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise OSError("no route to the hub")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setattr("shoal.model.hub.import_hub", lambda asked_for: hub)
    path = tmp_path / "test.toml"
    with pytest.raises(
        ValueError,
        match=r"'Qwen/Qwen3-0\.6B' is no folder here, .*no route to the hub.*hf download Qwen/Qwen3-0\.6B",
    ):
        try_run(load(tmp_path, GOOD.replace('"tiny"', '"Qwen/Qwen3-0.6B"')), path, starts=False)


def test_the_dry_run_tries_the_file(tmp_path: Path) -> None:
    path = tmp_path / "test.toml"
    assert try_run(load(tmp_path, GOOD), path, starts=True) == []
    with pytest.raises(
        ValueError, match=r"longest of 64 prompts has \d+ tokens .*; with .*raise row_tokens to at least"
    ):
        try_run(load(tmp_path, GOOD.replace("length = 4", 'length = 4, style = "chat"')), path, starts=True)
    create_model("tiny", tmp_path / "model", seed=0)
    long = GOOD.replace("row_tokens = 64", "row_tokens = 4096").replace(
        "max_new_tokens = 8", "max_new_tokens = 2048"
    )
    with pytest.raises(ValueError, match=r"more than the 2048 positions of .*model; lower max_new_tokens"):
        try_run(load(tmp_path, long.replace('"tiny"', f'"{tmp_path / "model"}"')), path, starts=True)
    with pytest.raises(ValueError, match="needs a package that is not installed"):
        try_run(
            load(tmp_path, GOOD.replace("row_tokens = 64", 'row_tokens = 64\nmetrics = ["wandb"]')),
            path,
            starts=True,
        )


def test_the_longest_prompt_of_a_data_set_is_found_wherever_it_is(tmp_path: Path) -> None:
    """One row of 400 is too long: every worker that gets it would end."""
    create_model("tiny", tmp_path / "model", seed=0)
    rows = [
        {"question": f"{number} + 1 =", "answer": f"It is {number}.\n#### {number}"} for number in range(400)
    ]
    rows[333]["question"] = "1 + " * 600 + "1 ="
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f'name = "gsm8k"\noptions = {{ path = "{data}", style = "bare" }}'
    text = GOOD.replace('name = "sort"\noptions = { length = 4 }', task).replace(
        '"tiny"', f'"{tmp_path / "model"}"'
    )
    path = tmp_path / "test.toml"
    with pytest.raises(
        ValueError,
        match=r"longest of 400 prompts has .*row 334 of .* positions of .*leave long prompts out \(the option max_chars",
    ):
        try_run(load(tmp_path, text), path, starts=True)
    shorter = text.replace('style = "bare"', 'style = "bare", max_chars = 100')
    assert try_run(load(tmp_path, shorter), path, starts=True) == []


def test_the_longest_prompt_of_a_large_data_set_is_found(tmp_path: Path) -> None:
    """Of 45,000 rows every third one was looked at; row 41,000 was not."""
    create_model("tiny", tmp_path / "model", seed=0)
    rows = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(45_000)]
    rows[40_999]["question"] = "1 + " * 600 + "1 ="
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f'name = "qa"\noptions = {{ path = "{data}", style = "bare" }}'
    text = GOOD.replace('name = "sort"\noptions = { length = 4 }', task).replace(
        '"tiny"', f'"{tmp_path / "model"}"'
    )
    with pytest.raises(ValueError, match=r"longest of 45000 prompts has .*row 41000 of .* positions"):
        try_run(load(tmp_path, text), tmp_path / "test.toml", starts=True)


@pytest.mark.parametrize(
    ("files", "changed", "words"),
    [
        ((), {}, "has no \\*.safetensors file"),
        (("pytorch_model.bin",), {}, "has \\*.bin files only"),
        (("adapter_config.json",), {}, "is an adapter"),
        (("model.safetensors",), {"hidden_size": 64}, "hidden_size=64, but a proof needs proof.topk=128"),
        (("model.safetensors",), {"model_type": "nonesuch"}, "no role can run this model"),
        (("model.safetensors",), {}, "tokenizer"),
    ],
)
def test_model_folders_that_cannot_run_are_refused(
    tmp_path: Path, files: tuple[str, ...], changed: dict[str, object], words: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_TINY_CONFIG | changed))
    for name in files:
        (model / name).write_bytes(b"{}")
    with pytest.raises(ValueError, match=words):
        try_run(load(tmp_path, GOOD.replace('"tiny"', f'"{model}"')), tmp_path / "test.toml", starts=True)


def test_weights_may_be_missing_in_a_plan(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_TINY_CONFIG))
    file = load(tmp_path, GOOD.replace('"tiny"', f'"{model}"'))
    (warning,) = try_run(file, tmp_path / "test.toml", starts=False)
    assert warning.startswith("the run cannot start here: ")


def test_sections_with_defaults_may_be_missing(tmp_path: Path) -> None:
    file = load(tmp_path, '[run]\nname = "a"\nmodel = "tiny"\nlast_version = 2\n[task]\nname = "sort"\n')
    assert file.sampling.samples_per_prompt == 16 and file.trainer.row_tokens == 512


def test_derived_numbers(tmp_path: Path) -> None:
    assert derived_numbers(load(tmp_path, GOOD)) == {
        "prompts x samples = rollouts a step": "6 x 4 = 24",
        "output tokens a step, at most": "192",
        "updates a step": "1 of about 24 rollouts",
        "tokens a micro-batch": "2 rows x 64 = 128",
        "rollouts a lease": "4 x 4 = 16",
        "leases a step, at least": "2",
        "groups ahead of the trainer, at most": "18",
        "proof bytes a rollout, at most": "258",
        "held-out evaluations": "4 of 32 x 2 = 64 rollouts",  # versions 0, 10, 20 and the last, 25
        "rollouts in all, at least": f"{24 * 25 + 4 * 64}",
        "processes": "1 coordinator, 1 trainer, 2 relays, 2 workers (0 lying), 1 validator",
    }


def test_tolerances_are_those_of_the_dtype_and_a_file_replaces_single_ones(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD).spec().tolerances == default_tolerances("float32")
    coarse = GOOD.replace('model = "tiny"', 'model = "tiny"\ncompute_dtype = "bfloat16"')
    assert load(tmp_path, coarse).spec().tolerances == default_tolerances("bfloat16")
    expected = default_tolerances("bfloat16").model_copy(update={"draw": 0.2})
    assert load(tmp_path, coarse + "[tolerances]\ndraw = 0.2\n").spec().tolerances == expected


def test_admitted_weights_are_terms_that_need_a_ratio_to_the_worker(tmp_path: Path) -> None:
    admitted = GOOD + "[admitted_weights]\nint8 = 0.7\n"
    spec = load(tmp_path, admitted).spec()
    assert spec.admitted_weights.formats == ("int8",) and spec.admitted_weights.int8 == 0.7
    assert not load(tmp_path, GOOD).spec().admitted_weights.formats
    assert "admitted_weights.int8 = 1.5" in complaint(tmp_path, admitted.replace("0.7", "1.5"))
    assert "admitted_weights.int4 is not a key" in complaint(tmp_path, admitted.replace("int8", "int4"))
    recomputed = admitted.replace("row_tokens = 64", 'row_tokens = 64\nbehaviour = "recompute"')
    assert 'set trainer.correction = "truncate"' in complaint(tmp_path, recomputed)
    corrected = recomputed.replace('"recompute"', '"recompute"\ncorrection = "truncate"')
    assert load(tmp_path, corrected).trainer.correction == "truncate"


SECOND_TASK = """
[[task]]
name = "add"
label = "sums"
weight = 0.5
[task.sampling]
temperature = 0.7
max_new_tokens = 4
"""


def two_tasks(more: str = SECOND_TASK) -> str:
    """Returns the good file with its task as a list, and further sections."""
    return GOOD.replace("[task]", "[[task]]") + more


def test_a_run_may_have_several_tasks_and_evaluations(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        two_tasks(
            SECOND_TASK
            + '[[eval]]\ntask = "sums"\nevery = 3\nsamples = 8\ntemperature = 0.5\n'
            + '[[eval]]\nlabel = "largest"\n[eval.task]\nname = "largest"\n'
        ),
    ).spec()
    assert [task.title for task in spec.tasks] == [spec.task.name, "sums"]
    own = spec.sampling.of(spec.tasks[1])
    assert (own.temperature, own.max_new_tokens) == (0.7, 4)
    assert [(one.task.title, one.every, one.samples) for one in spec.evals] == [
        ("sums", 3, 8),
        ("largest", 10, 4),
    ]
    assert spec.sampling.of(spec.evals[0].task).temperature == 0.5
    assert spec.sampling.of(spec.evals[1].task) == spec.sampling
    assert load(tmp_path, GOOD).spec().more_tasks == ()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            SECOND_TASK.replace('label = "sums"', 'label = "sort"'),
            "two entries of [[task]] are called 'sort'",
        ),
        (SECOND_TASK.replace('"add"', '"ad"'), "unknown task 'ad'"),
        (
            SECOND_TASK + '[[eval]]\ntask = "sum"\n',
            "task = 'sum' is not the label of a task of this file; it has sort, sums",
        ),
        (SECOND_TASK + '[[eval]]\ntask = "sums"\n' * 2, "two entries of [[eval]] are called 'sums'"),
        (SECOND_TASK.replace("max_new_tokens = 4", "samples_per_prompt = 1"), "samples_per_prompt = 1"),
        (SECOND_TASK.replace("weight = 0.5", "weight = 0"), "task.1.weight = 0"),
    ],
)
def test_mistakes_in_several_tasks_are_named(tmp_path: Path, sections: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        load(tmp_path, two_tasks(sections))


PAGE = ROOT / "docs" / "run-file.md"


def test_the_page_lists_every_key_and_no_other() -> None:
    keys: dict[str, set[str]] = {}
    for title, body in re.findall(r"(?ms)^## ([^\n]*)\n(.*?)(?=^#|\Z)", PAGE.read_text()):
        first_cells = "".join(re.findall(r"(?m)^\| ([^|]*) \|", body))
        for section in re.findall(r"\[(\w+)\]", title):
            keys[section] = set(re.findall(r"`(\w+)`", first_cells))
    for name in RunFile.model_fields:
        missing = section_fields(name) - keys[name]
        assert not missing, f"[{name}] {sorted(missing)} are not in docs/run-file.md"
    known = set().union(*(section_fields(name) for name in RunFile.model_fields))
    assert set().union(*keys.values()) <= known


def section_fields(name: str) -> set[str]:
    kind = RunFile.model_fields[name].annotation
    kinds = [kind, *getattr(kind, "__args__", ())]
    fields = {key: field for each in kinds for key, field in getattr(each, "model_fields", {}).items()}
    return {key for key, field in fields.items() if not is_section(field.annotation)}


def is_section(kind: object) -> bool:
    """A table within the table, with a heading of its own on the page."""
    kinds = (kind, *getattr(kind, "__args__", ()))
    return any(hasattr(each, "model_fields") for each in kinds) and str not in kinds


def test_data_files_are_found_beside_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 4)
    (tmp_path / "mine.toml").write_text(
        '[run]\nname = "mine"\nmodel = "tiny"\nlast_version = 1\n[task]\nname = "qa"\n[task.options]\npath = "mine.jsonl"\n'
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (task,) = load_run_file(tmp_path / "mine.toml").task
    assert task.options["path"] == str(tmp_path / "mine.jsonl")
    (tmp_path / "mine.jsonl").rename(tmp_path / "elsewhere" / "mine.jsonl")
    (task,) = load_run_file(tmp_path / "mine.toml").task
    assert task.options["path"] == "mine.jsonl", "else it is relative to the working directory"
