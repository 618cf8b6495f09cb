"""Adapter to single-turn environments of verifiers (its tasksets). `pip install 'shoal-rl[verifiers]'` and the environment's package.

    name = "verifiers"
    options = { taskset = "my-env", num_tasks = 500 }

Other options are those of the taskset's configuration. A problem is a task of the taskset, its reward the weighted sum of the task's
rewards, which see the one reply only. Tasks with tools, containers, judges, or rewards that need a runtime are refused: they take more
than one turn, or something that a validator cannot repeat.
"""

import asyncio
import importlib.util
import inspect
from collections.abc import Mapping
from importlib.metadata import distributions, packages_distributions, version
from itertools import islice
from typing import Any

from shoal.tasks.environments.hosted import HostedTask
from shoal.tasks.task import check_whole


class Verifiers(HostedTask):
    """A taskset of verifiers."""

    extra = "verifiers"
    selects = "taskset"
    distributions = ("verifiers",)
    package = "shoal.tasks.environments.verifiers_tasks:VerifiersPackage"

    def __init__(
        self,
        *,
        taskset: str,
        max_tasks: int = 100_000,
        template: str = "{question}",
        packages: str = "",
        **config: bool | int | float | str,
    ) -> None:
        check_whole("verifiers: max_tasks", max_tasks, least=1, most=10_000_000)
        options = {"taskset": taskset, "max_tasks": max_tasks, **config}
        super().__init__(options=options, style="direct", template=template, packages=packages)

    @classmethod
    def installed(cls, options: Mapping[str, Any]) -> str:
        """Returns the versions of verifiers, of the taskset's package and of Python."""
        found = super().installed(options)
        if "taskset" not in options:
            return found
        # As verifiers finds it: `owner/my-env@1.0` is my_env.
        module = str(options["taskset"]).rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"verifiers: no taskset {options['taskset']!r} is installed; install the package that has it"
            )
        owners = packages_distributions().get(module)
        if not owners:
            raise ValueError(
                f"verifiers: the taskset {options['taskset']!r} is not of an installed package, whose version the run could pin; "
                "install it with pip"
            )
        return ", ".join([*(f"{name} {version(name)}" for name in sorted(set(owners))), found])


# -- in the child process ---------------------------------------------------------------------------------


class VerifiersPackage:
    """Makes problems of the tasks of a taskset."""

    def __init__(self, taskset: str, max_tasks: int, **config: Any) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

        settings = taskset_config_type(taskset).model_validate({"id": taskset, **config})
        self._tasks = list(islice(taskset_class(taskset)(settings), max_tasks))
        if not self._tasks:
            raise ValueError("the taskset has no tasks")
        for task in self._tasks:
            if reason := _many_turns(task):
                raise ValueError(
                    f"{type(task).__name__} {reason}; only tasks of one turn can be used, choose another taskset"
                )
        self._vf = vf

    @staticmethod
    def names() -> list[str]:
        """Returns the installed packages that require verifiers."""
        found = set()
        for one in distributions():
            needs = [need.lower() for need in one.requires or ()]
            if any(need.startswith("verifiers") for need in needs) and one.name != "shoal-rl":
                found.add(one.name)
        return sorted(found)

    def make(self, seed: int) -> dict[str, Any]:
        index = seed % len(self._tasks)
        data = self._tasks[index].data
        question = data.prompt_text
        if data.system_prompt:
            question = f"{data.system_prompt}\n\n{question}"
        answer = getattr(data, "answer", None)
        return {"question": question, "answer": None if answer is None else str(answer), "index": index}

    def score(self, problem: dict[str, Any], answer: str) -> float:
        vf, task = self._vf, self._tasks[problem["index"]]
        nodes = [
            vf.MessageNode(message=vf.UserMessage(content=problem["question"])),
            vf.MessageNode(parent=0, message=vf.AssistantMessage(content=answer), sampled=True),
        ]
        told = vf.TraceTask(type=type(task).__name__, data=task.data)
        trace = vf.Trace(task=told, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes)
        asyncio.run(task.score(trace))
        rewards = [reward for reward in trace.rewards.values() if reward is not None]
        return float(sum(reward.score * reward.weight for reward in rewards))


def _many_turns(task: Any) -> str:
    """Returns why a task cannot be answered in one turn and scored again anywhere, or an empty text."""
    rewards = task.hooks("reward")
    reasons = {
        "has tools": bool(task.toolsets(task.config)),
        "needs a container": bool(task.NEEDS_CONTAINER or task.data.image),
        "has no prompt": task.data.prompt is None,
        "has judges": bool(task.config.judges),
        "has no reward": not rewards,
    }
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        needs = runtime is not None and runtime.default is inspect.Parameter.empty
        reasons[f"has a reward {reward.__name__} that needs a runtime"] = needs
    return next((reason for reason, applies in reasons.items() if applies), "")
