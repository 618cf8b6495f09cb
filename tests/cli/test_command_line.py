"""`shoal`: arguments, exit codes and error messages."""

import argparse
import threading
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest

from shoal.cli.main import make_parser, parse, run_command
from shoal.cli.run.supervise import RunFailed
from shoal.cli.ui.errors import error_message
from shoal.cli.ui.values import Imported
from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.wire.codes import CODES, CorruptData, Rejected
from shoal.wire.delegation import read_relay_delegation
from shoal.wire.keys import Key
from shoal.wire.messages import ProblemDetails

URL = "http://127.0.0.1:1"
ROLES = {
    "coordinator": ["FILE", "--dir", "DIR"],
    "trainer": ["FILE", "--dir", "DIR", "--coordinator", URL, "--keys", "DIR"],
    "relay": ["--dir", "DIR", "--coordinator", URL, "--key", "KEY"],
    "worker": ["--dir", "DIR", "--coordinator", URL],
    "validator": ["--dir", "DIR", "--coordinator", URL, "--key", "KEY"],
}


def do(*arguments: str) -> int:
    return run_command(parse(arguments), threading.Event())


def end_with(error: Exception, *, role: bool = True) -> int:
    def action(options: argparse.Namespace, stop: threading.Event) -> int:
        raise error

    options = argparse.Namespace(action=action, **({"deadline_s": 1.0} if role else {}))
    return run_command(options, threading.Event())


def refused(code: str) -> Refused:
    return Refused(
        "POST /x", ProblemDetails(code=code, detail="no", fix="ask", retry_after_s=None, server_time_s=0.0)
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("learn to count"), 2),
        (FileNotFoundError("no key at K; copy it"), 2),
        (Rejected("request.malformed", "not that"), 2),
        (CorruptData("ledger event 3 was changed"), 1),
        (ModuleNotFoundError("no", name="torch"), 2),
        (DeadlinePassed("waited 3 s for rain"), 3),
        (Unreachable("nobody there"), 3),
        (refused("request.not_allowed"), 2),
        (refused("request.banned"), 2),
        (refused("request.outdated"), 2),
        (refused("request.wrong_digest"), 1),  # an upload that was cut off; trying again may help
        (refused("request.replayed"), 1),
        (refused("request.conflict"), 1),
        (RunFailed("trainer died"), 1),
        (Stopped("enough"), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_exit_codes(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert end_with(error) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shoal: ") is (code != 130)
    assert said.err.count("\n") == (code != 130), "one sentence, no traceback"


def test_a_bug_shows_its_traceback() -> None:
    for error in (RuntimeError("shapes differ"), AssertionError("cannot be"), KeyError("x")):
        with pytest.raises(type(error)):
            end_with(error)


def test_error_messages() -> None:
    passed = DeadlinePassed("waited 3 s for rain")
    assert error_message(passed, has_deadline=True).startswith(
        "waited 3 s for rain. Correct that and start this role again"
    )
    assert error_message(passed, has_deadline=False) == "waited 3 s for rain"
    assert error_message(ModuleNotFoundError("x", name="torch"), has_deadline=True).endswith(
        "pip install 'shoal-rl[torch]'"
    )
    system = PermissionError(13, "Permission denied", "/somewhere/x")
    assert error_message(system, has_deadline=False).startswith(
        "/somewhere/x: permission denied; check the path"
    )
    full = OSError(28, "No space left on device", "/somewhere/x")
    assert error_message(full, has_deadline=False).startswith(
        "/somewhere/x: no space left on device; free some disk space"
    )
    unnamed = OSError(28, "No space left on device")
    assert error_message(unnamed, has_deadline=True, folder=Path("node")).startswith(
        "node: no space left on device; free some disk space"
    )
    assert error_message(unnamed, has_deadline=False).startswith("no space left on device;")
    nobody = Unreachable("POST http://x/v1/admin/ban: ReadTimeout: timed out")
    assert error_message(nobody, has_deadline=False).endswith(
        "; check the URL, and that the coordinator runs there"
    )
    assert (
        error_message(OSError("cannot listen on X; choose another"), has_deadline=False)
        == "cannot listen on X; choose another"
    )


@pytest.mark.parametrize(
    ("role", "arguments", "words"),
    [
        ("worker", ["--coordinator", "127.0.0.1:8700"], "'127.0.0.1:8700' must look like http://HOST:PORT"),
        ("worker", ["--deadline-s", "0"], "'0' must be a number of seconds above 0"),
        ("worker", ["--deadline-s", "soon"], "'soon' must be a number of seconds above 0"),
        ("worker", ["--deadline-s", "inf"], "'inf' must be a number of seconds above 0"),
        ("worker", ["--max-rows", "0"], "'0' must be a whole number from 1"),
        ("worker", ["--threads", "-1"], "--threads"),
        ("relay", ["--port", "65536"], "'65536' must be a whole number from 0 to 65535"),
        ("relay", ["--upstream", "origin"], "'origin' must look like http://HOST:PORT"),
        ("trainer", ["--url", "ftp://x"], "'ftp://x' must look like http://HOST:PORT"),
        ("worker", ["--coordinator", "http://a:87x0"], "'http://a:87x0' must look like http://HOST:PORT"),
        ("relay", ["--upstream", "http://[::1"], "'http://[::1' must look like http://HOST:PORT"),
        ("coordinator", ["--port", "x"], "'x' must be a whole number"),
    ],
)
def test_wrong_values_are_refused(
    role: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse([role, *ROLES[role], *arguments])
    assert left.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["ledger verify", "audit", "report", "rollouts", "compare", "eval", "export"]
)
@pytest.mark.parametrize("text", ["127.0.0.1:8700", "htp://127.0.0.1:8700"])
def test_a_url_without_http_is_named(
    command: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    out = ["--out", "x"] if command in ("report", "export") else []
    with pytest.raises(SystemExit):
        parse([*command.split(), text, *out])
    assert (
        f"{text!r} is no folder here; if it is a URL, write it as http://127.0.0.1:8700"
        in capsys.readouterr().err
    )
    (tmp_path / text).mkdir(parents=True)
    parse([*command.split(), text, *out])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("ledger", "verify", "out/none"),
            "no folder out/none; give a run's folder, such as out/NAME, or a URL",
        ),
        (("eval", "out/none"), "--task is missing: out/none is neither a run's folder nor a URL"),
        (("chat", URL), f"fetch a version first: shoal export {URL} --version newest --out FOLDER"),
        (("data", "check", "--task", "qa"), "task 'qa' needs path"),
    ],
)
def test_what_is_not_there_is_named(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert do(*words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("role", ROLES)
def test_required_options_of_each_role(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse([role, *ROLES[role]])
    for missing in [name for name in ROLES[role] if name.startswith("--")]:
        index = ROLES[role].index(missing)
        with pytest.raises(SystemExit):
            parse([role, *ROLES[role][:index], *ROLES[role][index + 2 :]])
        assert missing in capsys.readouterr().err


def test_roles_refuse_before_they_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--dir", str(tmp_path / "role"), "--coordinator", URL]
    key, file = tmp_path / "relay.key", Path(__file__).parent.parent.parent / "runs" / "demo.toml"
    assert do("relay", *there, "--key", str(key)) == 2
    assert (
        f"no key at {key}; copy this role's key from the coordinator's keys folder" in capsys.readouterr().err
    )
    key.write_text("not a key")
    assert do("relay", *there, "--key", str(key)) == 2
    assert f"{key}: not an Ed25519 private key" in capsys.readouterr().err
    key.unlink()
    Key.load_or_create(tmp_path / "good.key")
    everywhere = ["--key", str(tmp_path / "good.key"), "--host", "0.0.0.0"]
    assert do("relay", *there, *everywhere) == 2
    assert f"no {tmp_path}/delegation.json: a relay needs a delegation" in capsys.readouterr().err
    url = "http://relay.example:8702"
    assert do("identity", "relay", url, "--owner", str(tmp_path / "good.key"), "--out", str(tmp_path)) == 0
    made = read_relay_delegation(tmp_path / "relay.key").body
    assert (made.url, made.relay) == (url, Key.load(tmp_path / "relay.key").public)
    other = ["--key", str(tmp_path / "relay.key"), "--url", "http://other.example:8702"]
    assert do("relay", *there, *other) == 2
    assert "but the delegation is for http://relay.example:8702" in capsys.readouterr().err
    assert do("trainer", str(file), *there, "--keys", str(tmp_path / "nowhere")) == 2
    assert f"no key at {tmp_path}/nowhere/trainer.key" in capsys.readouterr().err
    assert do("trainer", str(tmp_path / "no.toml"), *there, "--keys", str(tmp_path)) == 2
    assert "no run file at" in capsys.readouterr().err
    assert do("worker", *there, "--device", "abacus") == 2
    assert "--device abacus: torch knows no such device" in capsys.readouterr().err
    assert do("worker", *there, "--lie", "white") == 2
    assert "unknown lie 'white'; known: wrong-weights" in capsys.readouterr().err


def test_explain_one_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert do("explain", "reject.early_stop") == 0
    meaning = CODES["reject.early_stop"]
    assert capsys.readouterr().out == f"reject.early_stop: {meaning.meaning}\nwhat to do: {meaning.remedy}\n"


def test_explain_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert do("explain") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CODES)
    assert all(CODES[line.split()[0]].meaning in line for line in lines)


def test_explain_an_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert do("explain", "reject.everything") == 2
    assert "no refusal code 'reject.everything'; `shoal explain` lists them all" in capsys.readouterr().err
    assert do("explain", "reject.wrong_lgprobs") == 2
    assert "did you mean reject.wrong_logprobs?" in capsys.readouterr().err


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parent.parent.parent / "runs" / "demo.toml"
    assert do("run", str(file), "--dry-run", "--dir", str(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{file}: good\n")
    assert "processes" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rum"], "'rum' is not a command; did you mean `shoal run`? shoal --help lists"),
        (["ledger", "verfy"], "'verfy' is not a known action; did you mean `shoal ledger verify`?"),
        (["xyzzy"], "'xyzzy' is not a command; shoal --help lists what it takes"),
    ],
)
def test_an_unknown_command_gets_a_suggestion(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(words)
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_help_names_the_first_things_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    said = capsys.readouterr().out.split("five commands to start with:\n")[1].splitlines()
    assert [line.startswith("  shoal ") for line in said[:6]] == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        (
            "/no/such/folder",
            (),
            "run.model = '/no/such/folder' is neither a model folder nor a GGUF file nor one of",
        ),
        ("tiny", ("--device", "nosuch"), "--device nosuch: torch knows no such device"),
    ],
)
def test_fresh_checks_the_new_run_before_it_deletes_the_earlier_one(
    model: str, more: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text("an earlier run")
    file = tmp_path / "own.toml"
    demo = (Path(__file__).parents[2] / "runs" / "demo.toml").read_text()
    file.write_text(demo.replace('model = "tiny"', f'model = "{model}"'))
    assert do("run", str(file), "--dir", str(folder), "--fresh", *more) == 2
    assert words in capsys.readouterr().err
    assert (folder / "run.toml").read_text() == "an earlier run"


def parsers_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers_below(below)


def test_every_command_names_a_function_that_exists() -> None:
    """`Imported` takes names, which mypy does not check."""
    actions = {parser.get_default("action") for parser in parsers_below(make_parser())}
    named = [action for action in actions if isinstance(action, Imported)]
    assert len(named) > 25
    for action in named:
        assert list(signature(action.load()).parameters) == ["options", "stop"], action
