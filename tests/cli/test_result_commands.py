"""`shoal export` and `shoal chat` on a run's folder, and what the model card says."""

import io
import json
import os
import pty
import shutil
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))
from small_run import CONFIG, small_run
from test_contributor import shoal

from shoal.cli.commands.export import Conversation
from shoal.cli.public_api import PublicApi
from shoal.cli.run_folder import RunFolder
from shoal.cli.run_reader import ask_rollouts
from shoal.model.builtin import ALPHABET
from shoal.model.tokenizer import CharTokenizer
from shoal.swarm.coordinator.leases.transcripts import RolloutQuery


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run with two versions, as `shoal run` leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    with small_run(folder, CONFIG) as run:
        run.publish(0)
        run.publish(1)
    (folder / "trainer").mkdir()
    shutil.move(folder / "origin", folder / "trainer" / "versions")
    (folder / "run.toml").write_text('[run]\nname = "small"\nmodel = "tiny"\n[task]\nname = "sort"\n')
    return folder


def test_a_version_is_exported_with_a_card(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert shoal("export", folder, "--version", "1", "--out", out) == 0
    assert "version 1 of run small" in capsys.readouterr().out
    assert (out / "model.safetensors").read_bytes() == (
        folder / "trainer" / "versions" / "v1" / "model.safetensors"
    ).read_bytes()
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert not (out / "manifest.json").exists()
    card = (out / "README.md").read_text()
    with RunFolder(folder) as run:
        head = list(run.events())[-1]
        assert run.run_key in card
    for words in (
        "# small, version 1",
        "Task: `sort` (length = 3)",
        "from `tiny`",
        head.hash,
        "not evaluated",
    ):
        assert words in card
    assert list(folder.glob(".export-*")) == []
    # A second export does not write over the first.
    assert shoal("export", folder, "--version", "0", "--out", out) == 2
    assert "is not empty" in capsys.readouterr().err


def test_versions_that_are_not_there_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version, words in (
        ("7", "version 7 is not in"),
        ("best", "no complete held-out evaluation"),
        ("latest", "use a number, best or newest"),
    ):
        assert shoal("export", folder, "--version", version, "--out", tmp_path / "model") == 2
        assert words in capsys.readouterr().err
    assert shoal("export", tmp_path, "--out", tmp_path / "model") == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_runs_model_answers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--max-new-tokens", "6", "--threads", "1", "--seed", "3")
    assert shoal("chat", folder, "--prompt", "sort: 3 1 2", *words) == 0
    first = capsys.readouterr()
    assert "version 1 of run small" in first.err
    assert first.out.strip()
    monkeypatch.setattr(sys, "stdin", io.StringIO("sort: 3 1 2\n\nsort: 2 1\n"))
    assert shoal("chat", folder / "trainer" / "versions" / "v1", *words) == 0
    assert capsys.readouterr().out.splitlines()[0] == first.out.splitlines()[0]
    monkeypatch.setattr(Conversation, "_generate", lambda *_: ())
    assert shoal("chat", folder, "--prompt", "sort: 3 1 2", *words) == 0
    assert "the answer is empty; ask as the run's task does" in capsys.readouterr().err


def test_ctrl_c_ends_a_conversation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question waits at a terminal, where nothing is typed."""
    ours, theirs = pty.openpty()
    stop = threading.Event()
    timer = threading.Timer(3.0, stop.set)
    give_up = threading.Timer(60.0, lambda: os.write(ours, b"\x04"))
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        timer.start()
        give_up.start()
        try:
            assert shoal("chat", "tiny", "--threads", "1", stop=stop) == 130
        finally:
            give_up.cancel()
    os.close(ours)


def test_filters_of_zero_reach_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0 and reward 0 are filters, although 0 is false."""
    asked: list[str] = []
    monkeypatch.setattr(PublicApi, "read", lambda api, path, kind: asked.append(path))
    with PublicApi("http://127.0.0.1:1") as api:
        ask_rollouts(api, RolloutQuery(version=0, reward=0.0, limit=3))
        ask_rollouts(api, RolloutQuery(held_out=True, search="a b"))
    assert asked == [
        "/v1/rollouts?version=0&reward=0.0&limit=3",
        "/v1/rollouts?held_out=1&search=a+b&limit=8",
    ]


def test_a_runs_version_is_evaluated_on_the_runs_own_task(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompts", "4", "--threads", "1", "--show", "0")
    assert shoal("eval", folder, *words) == 0
    said = capsys.readouterr().out
    assert f"{folder}, version 1 on sort: 4 held-out prompts" in said
    assert "at 8 tokens" in said
    assert shoal("eval", folder, "--version", "0", "--task", "count", "--json", *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 0 and found["task"]["name"] == "count"
    assert shoal("eval", folder, "--version", "best", *words) == 2
    assert "no complete held-out evaluation" in capsys.readouterr().err
    assert shoal("eval", "tiny", "--task", "count", "--version", "1", *words) == 2
    assert "--version needs a run's folder" in capsys.readouterr().err


@pytest.mark.integration
def test_a_folder_with_experts_is_converted_before_it_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers stores each expert by itself and computes with all experts of a layer in one tensor."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 3 + len(ALPHABET),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "max_position_embeddings": 64,
    }
    config = AutoConfig.for_model("mixtral", **sizes, **heads, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "experts")
    CharTokenizer(ALPHABET).save(tmp_path / "experts")
    words = (
        "--task",
        "count",
        "--option",
        "style=bare",
        "--prompts",
        "2",
        "--max-new-tokens",
        "2",
        "--threads",
        "1",
    )
    assert shoal("eval", tmp_path / "experts", *words) == 0
    assert "2 held-out prompts" in capsys.readouterr().out
