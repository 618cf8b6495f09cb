"""The workflow runs `.ci/run`, and CONTRIBUTING.md lists the targets that it runs."""

import re
import subprocess
from typing import Any

import pytest

from docs_commands import ROOT

yaml = pytest.importorskip("yaml")

RUN = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOW: dict[str, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
)
LISTED = re.findall(
    r"^make ([\w-]+) +# (.*)$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE
)


def targets_in(commands: str) -> set[str]:
    """Returns the targets that a shell script makes, without those that only install an environment."""
    called = re.findall(r"^(?:step |tests |timeout \d+ )*make (.+)$", commands, re.MULTILINE)
    words = {word for line in called for word in re.split(r"[>&|;]", line)[0].split()}
    return {word for word in words if re.fullmatch(r"[a-z][\w-]*", word)} - {"env"}


def commands_of_workflow() -> list[str]:
    return [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_workflow_runs_the_same_script() -> None:
    commands = commands_of_workflow()
    assert [command for command in commands if ".ci/run" in command] == [
        'sudo -E env "PATH=$PATH" bash .ci/run'
    ]
    others = set().union(*(targets_in(command) for command in commands))
    assert others == {"test", "test-lowest"}, "with other versions of Python and of the dependencies"


def test_every_target_exists() -> None:
    known = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
    called = targets_in(RUN).union(*(targets_in(command) for command in commands_of_workflow()))
    assert called | {name for name, _ in LISTED} <= known


def test_contributors_are_told_what_is_run() -> None:
    in_ci = {name for name, what in LISTED if not what.startswith("not tested by CI")}
    assert len(in_ci) >= 8 and in_ci == targets_in(RUN)


def test_the_script_can_be_read_by_bash() -> None:
    done = subprocess.run(
        ["bash", "-n", str(ROOT / ".ci" / "run")], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
