"""Models of the hub, with the real huggingface_hub against a stand-in server on loopback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import COMMIT, HubServer, hub_server

from shoal.model.builtin import create_model
from shoal.model.hub import is_hub_name

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def environment(hub: HubServer, home: Path) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    return (
        os.environ | own | {"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    )


def shoal(hub: HubServer, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=folder,
        env=environment(hub, folder / "hf"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_model_is_pushed_and_taken_by_its_name(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "tiny", 0)
    (tmp_path / "tiny" / "README.md").write_text("# tiny\n")
    with hub_server() as hub:
        done = shoal(hub, tmp_path, "push", "tiny", "lab/small", "--private")
        assert done.returncode == 0, done.stderr + str(hub.asked)
        assert done.stdout == f"pushed: {hub.url}/lab/small/commit/{COMMIT}\n"
        pushed = hub.files["lab/small"]
        assert pushed["model.safetensors"] == (tmp_path / "tiny" / "model.safetensors").read_bytes()
        assert pushed["README.md"] == b"# tiny\n" and hub.private == {"lab/small"}
        pushed["pytorch_model.bin"], pushed["onnx/model.onnx"] = b"pickle", b"onnx"
        ask = (
            "--task",
            "count",
            "--option",
            "style=bare",
            "--prompts",
            "4",
            "--max-new-tokens",
            "4",
            "--threads",
            "1",
        )
        done = shoal(hub, tmp_path, "eval", f"lab/small@{COMMIT}", *ask)
        assert done.returncode == 0, done.stderr + str(hub.asked)
        assert "pass@1" in done.stdout
        fetched = {path.name for path in (tmp_path / "hf").rglob("*") if path.is_file() or path.is_symlink()}
        assert "model.safetensors" in fetched and not fetched & {"pytorch_model.bin", "model.onnx"}
        done = shoal(hub, tmp_path, "eval", "lab/none", *ask)
        assert done.returncode == 2
        assert "'lab/none' is no folder here, and the hub's copy cannot be had" in done.stderr
    # The folder is in the cache now: a run file that names the commit needs no hub.
    (tmp_path / "own.toml").write_text(
        f'[run]\nname = "own"\nmodel = "lab/small@{COMMIT}"\nlast_version = 2\n[task]\nname = "count"\n'
        'options = { style = "bare" }\n[trainer]\nrow_tokens = 128\n'
    )
    done = shoal(hub, tmp_path, "run", "own.toml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "own.toml: good" in done.stdout and "disk of all processes" in done.stdout


def test_a_push_without_a_connection_names_the_repository_and_what_to_check(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "tiny", seed=0)
    nobody = HubServer()
    nobody.url = "http://127.0.0.1:9"
    done = shoal(nobody, tmp_path, "push", "tiny", "lab/small")
    assert done.returncode == 2 and "nothing was pushed to lab/small" in done.stderr, done.stderr
    assert "check the connection, and log in" in done.stderr and str(tmp_path) not in done.stderr


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("Qwen/Qwen3-0.6B@main")
    for other in ("tiny", "./models/qwen", "/models/qwen", "a/b/c", "models/x.gguf", "../x"):
        assert not is_hub_name(other)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    assert not is_hub_name("models/qwen")
