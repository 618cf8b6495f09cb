"""Tasksets of verifiers as tasks, with the real package: `make verifiers`."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.child_process import ChildProcess
from shoal.tasks import Outcome
from shoal.tasks.environments import hosted
from shoal.tasks.environments.environment_child import SETTINGS
from shoal.tasks.environments.verifiers_tasks import Verifiers

pytestmark = pytest.mark.environments

ECHO = """
import verifiers.v1 as vf
class EchoData(vf.TaskData):
    answer: str
class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)
    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)
class RuntimeTask(EchoTask):
    @vf.reward
    async def checked(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0
class EchoConfig(vf.TasksetConfig):
    num_tasks: int = 40
    in_container: bool = False
class EchoTaskset(vf.Taskset[EchoTask, EchoConfig]):
    def load(self):
        kind = RuntimeTask if self.config.in_container else EchoTask
        for n in range(self.config.num_tasks):
            yield kind(EchoData(prompt=f"Say {n}.", answer=str(n)), self.config.task)
__all__ = ["EchoTaskset"]
"""


@pytest.fixture(autouse=True)
def echo_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package with a taskset in a folder that this process and the child see."""
    pytest.importorskip("verifiers")
    (tmp_path / "toy_echo.py").write_text(ECHO)
    info = tmp_path / "toy_echo-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy-echo\nVersion: 0.3\nRequires-Dist: verifiers\n"
    )
    (info / "top_level.txt").write_text("toy_echo\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def child(package: str, options: dict[str, Any]) -> ChildProcess:
        return ChildProcess(
            "shoal.tasks.environments.environment_child:serve_environment",
            limits=hosted.LIMITS,
            env={
                SETTINGS: json.dumps({"package": package, "options": options}),
                "PYTHONPATH": str(tmp_path),
            },
        )

    monkeypatch.setattr(hosted, "_child", child)


def test_a_taskset_poses_problems_and_grades() -> None:
    task = Verifiers(taskset="toy-echo", num_tasks=30)
    problem = task.problem("train", 1)
    assert task.problem("train", 1) == problem and task.chat
    assert problem.prompt == f"Say {problem.answer}."
    rewards = [task.reward(problem, text, 1) for text in (problem.answer, "no", "quite wrong", "")]
    assert [reward.value for reward in rewards] == [1.0, 0.25, 0.0, 0.0]
    assert rewards[-1].outcome is Outcome.UNPARSEABLE
    assert {task.problem("eval", n).prompt for n in range(9)}.isdisjoint(
        task.problem("train", n).prompt for n in range(30)
    )
    pins = Verifiers.pins({"taskset": "toy-echo"})
    assert pins["packages"].startswith("toy-echo 0.3, verifiers 0.4")
    with pytest.raises(ValueError, match=r"pip install 'toy-echo==0.2'"):
        Verifiers(taskset="toy-echo", packages="toy-echo 0.2")
    assert "toy-echo" in Verifiers.environments()


def test_what_takes_more_than_one_turn_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"RuntimeTask has a reward checked that needs a runtime; only tasks of one"
    ):
        Verifiers(taskset="toy-echo", in_container=True).problem("train", 0)
    with pytest.raises(ValueError, match=r"verifiers toy-echo: ValidationError: .* num_tsks"):
        Verifiers(taskset="toy-echo", num_tsks=3).problem("train", 0)
    with pytest.raises(ValueError, match="no taskset 'nothing' is installed"):
        Verifiers(taskset="nothing")
