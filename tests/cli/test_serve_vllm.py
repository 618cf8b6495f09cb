"""`shoal serve --engine vllm` as a process, asked by OpenAI's own client, and `shoal verify` on its answers.

pytest -m vllm tests/cli/test_serve_vllm.py
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.model.builtin import create_model

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

START_S = 300.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    pytest.importorskip("vllm")
    create_model("tiny", tmp_path / "v0", seed=11)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "shoal", "serve", str(tmp_path / "v0"), "--engine", "vllm"]
    process = subprocess.Popen([*command, "--port", str(port), "--threads", "1", "--max-rows", "8"])
    yield f"http://127.0.0.1:{port}/v1", process
    process.kill()
    process.wait()


def test_answers_verify_and_no_process_outlives_the_server(
    server: tuple[str, subprocess.Popen[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    openai, psutil = pytest.importorskip("openai"), pytest.importorskip("psutil")
    url, process = server
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    end_s = time.monotonic() + START_S
    while True:
        try:
            assert len(list(client.models.list())) == 1
            break
        except openai.APIConnectionError:
            assert process.poll() is None and time.monotonic() < end_s
            time.sleep(0.2)
    asked = {"model": "tiny", "prompt": "3 + 4 =", "max_tokens": 40, "n": 4, "seed": 7}
    answer = client.completions.create(**asked)
    assert [one.text for one in answer.choices] == [
        one.text for one in client.completions.create(**asked).choices
    ]
    response = tmp_path / "response.json"
    response.write_text(answer.model_dump_json())
    verify = ["verify", str(response), "--model", str(tmp_path / "v0"), "--json"]
    assert main(verify) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True
    changed = json.loads(answer.model_dump_json())
    changed["choices"][0]["text"] += "7"
    response.write_text(json.dumps(changed))
    assert main(verify) != 0

    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 1
    os.kill(process.pid, signal.SIGKILL)  # it cannot tell vLLM's processes to end
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
