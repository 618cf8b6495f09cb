"""A visitor's first commands: the demo without the repository, completion in a shell, and mistyped words."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from shoal.cli.commands import demo
from shoal.cli.main import parse, run_command

ROOT = Path(__file__).parents[2]


def shoal(*words: str) -> int:
    return run_command(parse(words), threading.Event())


def test_the_demo_is_the_run_file_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Path, Path, bool]] = []

    def run(options: object, stop: threading.Event) -> int:
        started.append((options.file, options.dir, options.fresh))  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr("shoal.cli.run.local.run", run)
    assert shoal("demo", "--dir", str(tmp_path / "demo")) == 0
    assert shoal("demo", "--resume") == 0
    (file, dir, fresh), (_, default, resumed_fresh) = started
    assert file.read_text() == (ROOT / "runs" / "demo.toml").read_text()
    assert (dir, fresh) == (tmp_path / "demo", True)
    assert (default, resumed_fresh) == (Path("out/demo"), False)


def test_without_torch_the_demo_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert shoal("demo") == 2  # no terminal here
    said = capsys.readouterr()
    assert "torch is not installed; pip install 'shoal-rl[torch]', or start the demo with --yes" in said.err
    assert "torch>=2.11" in said.out


def test_with_yes_the_demo_installs_what_the_extra_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def install(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", install)
    assert shoal("demo", "--yes") == 1
    assert asked == [[sys.executable, "-m", "pip", "install", *demo.requirements_of("torch")]]
    assert "install it by hand" in capsys.readouterr().err


def test_requirements_of_an_extra_are_those_of_the_package() -> None:
    found = importlib.metadata.requires("shoal-rl") or []
    torch = demo.requirements_of("torch")
    assert {text.split(">")[0] for text in torch} == {
        "torch",
        "safetensors",
        "transformers",
        "jinja2",
        "tokenizers",
    }
    assert all(any(one.startswith(text) for one in found) for text in torch)


@pytest.mark.integration
def test_the_wheel_has_the_demo_the_page_and_the_docs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("shoal_rl-*.whl"))).namelist()
    for name in ("cli/run/demo.toml", "py.typed", "swarm/coordinator/http/page/page.html"):
        assert f"shoal/{name}" in names, name
    for page in ("run-file", "guides/operator", "wire/draw"):
        assert any(name.endswith(f"/share/doc/shoal-rl/{page}.md") for name in names), page


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("shoal ru", {"run"}),
        ("shoal join --de", {"--device", "--deadline-s"}),
        ("shoal ledger v", {"verify"}),
    ],
)
def test_bash_completes(
    typed: str, completed: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal("completion", "bash") == 0
    script = tmp_path / "shoal.bash"
    script.write_text(capsys.readouterr().out)
    words = typed.split(" ")
    program = (
        f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_shoal; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, env=os.environ)
    assert set(done.stdout.split()) == completed, done.stderr


def test_bash_completes_file_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("completion", "bash") == 0
    script = tmp_path / "shoal.bash"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "own.toml").touch()
    (tmp_path / "runs").mkdir()
    for words, found in (("run ow", "own.toml"), ("export ru", "runs"), ("run x --dir ru", "runs")):
        typed = f"shoal {words}".split(" ")
        program = f"source {script}; COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _shtab_shoal; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash", "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert done.stdout.strip() == found, done.stderr


@pytest.mark.parametrize(
    ("name", "start"), [("zsh", "#compdef shoal"), ("fish", "# AUTOMATICALLY GENERATED")]
)
def test_other_shells_get_a_script(name: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("completion", name) == 0
    said = capsys.readouterr().out
    assert said.startswith(start) and "threads" in said


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish: apt-get install fish")
def test_fish_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("completion", "fish") == 0
    script = tmp_path / "shoal.fish"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "own.toml").touch()
    for typed, found in (
        ("shoal ledger v", "verify"),
        ("shoal run --dr", "--dry-run"),
        ("shoal run ow", "own.toml"),
    ):
        program = f"source {script}; complete -C '{typed}'"
        done = subprocess.run(
            ["fish", "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert done.stdout.split("\t")[0].strip() == found, done.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("rum", "x.toml"), "did you mean `shoal run`?"),
        (("ledger", "verfy"), "did you mean `shoal ledger verify`?"),
        (
            ("join", "http://a", "--deivce", "cpu"),
            "--deivce is not an option of this command; did you mean --device? shoal join --help",
        ),
        (("ledger", "verify", "out/demo", "--jsn"), "did you mean --json? shoal ledger verify --help"),
        (("run", "x.toml", "trainer.learning_rate=1e-4"), "write --set trainer.learning_rate=1e-4"),
        (("run", "x.toml", "--lerning", "3"), "--lerning is not an option of this command; shoal run --help"),
    ],
)
def test_mistyped_words_are_guessed(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_doctor_without_a_url_checks_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shoal("doctor") == 0
    said = capsys.readouterr().out
    assert "ok   python" in said and "device" in said and "To check a run too: shoal doctor URL" in said
    assert list(tmp_path.iterdir()) == []


def test_the_pages_are_printed_and_a_mistyped_name_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("docs") == 0
    listed = capsys.readouterr().out
    assert "run-file  " in listed and "guides/operator  " in listed and "wire/draw  " in listed
    for name in ("run-file", "docs/run-file.md"):
        assert shoal("docs", name) == 0
        assert capsys.readouterr().out.startswith("# ")
    assert shoal("docs", "run-fil") == 2
    assert "no page 'run-fil'; did you mean run-file?" in capsys.readouterr().err
