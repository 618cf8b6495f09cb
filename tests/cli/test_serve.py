"""`shoal serve` and `shoal verify`: OpenAI's own client against a real server, and answers that were changed afterwards."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shoal.cli.commands.serve import AnswerServer, EngineThread, ServeError
from shoal.cli.commands.verify_answer import verify_response
from shoal.cli.main import main, parse, run_command
from shoal.model.builtin import create_model
from shoal.net.http_server import Server, listen
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.swarm.validator.prefill import CannotCheck
from shoal.wire.codes import Rejected
from shoal.wire.run_spec import ProofSpec

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "v0"
    create_model("tiny", folder, seed=11)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    stop = threading.Event()
    engine = TorchEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=8)
    engine.load(folder, 0)
    answers = AnswerServer(engine, EngineThread(engine, stop), name="tiny", dtype="float32")
    server = Server(answers.app, listen("127.0.0.1", 0))
    server.start()
    yield f"http://127.0.0.1:{server.port}/v1"
    stop.set()
    server.close()


def ask(url: str, **other: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "3 + 4 =", "max_tokens": 40, "n": 2, "seed": 5} | other
    answer = httpx2.post(f"{url}/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(answer: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "response.json"
    path.write_text(json.dumps(answer))
    verify_response(path, folder, dtype=None, device="cpu")


def test_the_client_of_openai_gets_answers_that_verify(
    url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [{"role": "system", "content": "Add. "}, {"role": "user", "content": "3 + 4 ="}]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 40, "n": 2, "seed": 7}
    first = client.chat.completions.create(**asked, logprobs=True)
    again = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in first.choices] == [
        choice.message.content for choice in again.choices
    ]
    assert all(choice.finish_reason in ("stop", "length") for choice in first.choices)
    assert first.choices[0].logprobs.content[0].logprob <= 0
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    plain = client.completions.create(model="tiny", prompt="3 + 4 =", max_tokens=40)
    for answer in (first, plain):
        (tmp_path / "response.json").write_text(answer.model_dump_json())
        assert main(["verify", str(tmp_path / "response.json"), "--model", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["verified"] is True
    with pytest.raises(openai.BadRequestError, match="exceed the model's 2048 positions"):
        client.completions.create(model="tiny", prompt="3" * 2048, max_tokens=40)


def test_requests_at_the_same_time_share_the_engine(url: str, folder: Path, tmp_path: Path) -> None:
    alone = [ask(url, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: ask(url, seed=seed), range(4)))
    for one, other in zip(alone, together, strict=True):
        assert [choice["text"] for choice in one["choices"]] == [
            choice["text"] for choice in other["choices"]
        ]
        check(other, folder, tmp_path)


def _edit_text(answer: dict[str, Any]) -> None:
    answer["choices"][0]["text"] += "!"


def _edit_prompt(answer: dict[str, Any]) -> None:
    answer["shoal"]["prompt"]["text"] = "3 + 5 ="


def _other_prompt(answer: dict[str, Any]) -> None:
    answer["shoal"]["prompt"]["text"] = "3 + 5 ="
    answer["shoal"]["prompt_tokens"][5] += 1


def _other_temperature(answer: dict[str, Any]) -> None:
    answer["shoal"]["temperature"] = 0.7


def _other_seed(answer: dict[str, Any]) -> None:
    answer["shoal"]["seed"] = "ab" * 32


def _higher_logprobs(answer: dict[str, Any]) -> None:
    for row in answer["shoal"]["rows"]:
        row["logprobs"] = [logprob / 2 for logprob in row["logprobs"]]


def _missing_choice(answer: dict[str, Any]) -> None:
    del answer["choices"][1]


def _no_proof(answer: dict[str, Any]) -> None:
    answer["shoal"]["rows"][0]["proof"] = ""


def _cut(answer: dict[str, Any]) -> None:
    row = answer["shoal"]["rows"][0]
    row["output_tokens"], row["logprobs"] = row["output_tokens"][:5], row["logprobs"][:5]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_edit_text, "reject.bad_values"),
        (_edit_prompt, "reject.edited_prompt"),
        (_other_prompt, "reject.wrong_computation"),
        (_other_temperature, "reject.wrong_sampling"),
        (_other_seed, "reject.wrong_sampling"),
        (_higher_logprobs, "reject.wrong_logprobs"),
        (_missing_choice, "reject.incomplete_group"),
        (_no_proof, "reject.malformed_proof"),
        (_cut, "reject.early_stop"),
    ],
)
def test_a_changed_answer_is_refused(
    url: str, folder: Path, tmp_path: Path, change: Change, code: str
) -> None:
    answer = ask(url)
    check(answer, folder, tmp_path)
    change(answer)
    with pytest.raises(Rejected) as refusal:
        check(answer, folder, tmp_path)
    assert refusal.value.code == code


def test_an_answer_of_other_weights_is_refused(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_model("tiny", tmp_path / "other", seed=12)
    (tmp_path / "response.json").write_text(json.dumps(ask(url)))
    assert main(["verify", str(tmp_path / "response.json"), "--model", str(tmp_path / "other")]) == 1
    assert "NOT VERIFIED: reject.wrong_computation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_p": 0.9}, "top_p=0.9 is not supported"),
        ({"stream": True}, "stream=true is not supported"),
        ({"n": 0}, "n=0 must be from 1 to 128"),
        ({"temperature": 0}, "temperature=0.0 must be from 0.01 to 100"),
        ({"temperature": 1e-320}, "temperature=1e-320 must be from 0.01 to 100"),
        ({"temperature": 1e300}, "temperature=1e+300 must be from 0.01 to 100"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"messages": [{"role": "user", "content": "3"}]}, "prompt must be given"),
        ({"max_tokens": 4000}, "exceed the model's 2048 positions"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_completion_tokens": -3}, "max_completion_tokens=-3 must be at least 1"),
        ({"prompt": ""}, "prompt must be given and not be empty"),
        ({"prompt": "\u2603"}, "is not in the model's alphabet"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(
    url: str, fields: dict[str, Any], words: str
) -> None:
    body = {"model": "tiny", "prompt": "3 + 4 =", "max_tokens": 4} | fields
    answer = httpx2.post(f"{url}/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    ask(url)  # the engine goes on


def test_a_body_without_end_is_refused(url: str) -> None:
    pieces = 0

    def endless() -> Iterator[bytes]:
        nonlocal pieces
        while pieces < 1000:
            pieces += 1
            yield b" " * (1 << 20)

    try:
        answer = httpx2.post(f"{url}/completions", content=endless(), timeout=60)
        assert answer.status_code == 400 and "more than 4194304 bytes" in answer.text
    except httpx2.TransportError:
        pass  # the connection was closed while the body was sent
    assert pieces < 1000
    ask(url)


def test_an_answer_that_does_not_fit_into_memory_is_an_error_with_words(
    url: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CannotCheck("out of memory for a row of 9000 tokens")

    monkeypatch.setattr("shoal.cli.commands.verify_answer.recompute", fail)
    (tmp_path / "response.json").write_text(json.dumps(ask(url)))
    assert main(["verify", str(tmp_path / "response.json"), "--model", str(folder)]) == 2
    assert "cannot be checked on this machine: out of memory for a row of 9000" in capsys.readouterr().err


def test_a_server_that_was_stopped_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = threading.Event()
    stop.set()
    assert run_command(parse(["serve", str(folder), "--port", "0"]), stop) == 130
    assert "serving v0 at http://127.0.0.1:" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "response.json").write_text("{}")
    words = ["verify", str(tmp_path / "response.json"), "--model", "tiny", "--device", "tpu"]
    assert main(words) == 2
    assert "--device tpu: torch knows no such device" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"choices": [], "shoal": {}}'])
def test_a_file_that_is_no_answer_is_an_error_with_words(folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "response.json").write_text(text)
    with pytest.raises((ValueError, Rejected), match=r"response\.json|AnswerEvidence"):
        verify_response(tmp_path / "response.json", folder, dtype=None, device="cpu")


def test_an_engine_that_fails_ends_the_server(folder: Path) -> None:
    engine = TorchEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=2)
    engine.load(folder, 0)
    thread = EngineThread(engine, threading.Event())
    thread.check()

    def fail() -> list[FinishedRow]:
        raise RuntimeError("the device is gone")

    engine.step = fail  # type: ignore[method-assign]
    row = GenerationRequest(
        prompt_index=0, sample_index=0, prompt_tokens=(3, 4), sample_seed=1, max_new_tokens=4, temperature=1.0
    )
    with pytest.raises(ServeError, match="stopped before the answer was complete"):
        thread.generate([row]).result(30)
    with pytest.raises(RuntimeError, match="the device is gone"):
        while True:
            thread.check()
    with pytest.raises(ServeError, match="the engine has stopped"):
        thread.generate([row]).result(30)
