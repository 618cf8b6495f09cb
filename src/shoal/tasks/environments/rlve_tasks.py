"""Adapter to rlve-gym: 400 verifiable environments of algorithmic problems. `pip install 'shoal-rl[rlve-gym]'`.

    name = "rlve-gym"
    options = { environment = "Sorting", N = 5 }

Other options are the parameters of the environment, by which its difficulty is set; without any, the first parameters of the
environment's own difficulty controller are used, and `level = 3` advances the controller three times.
"""

import sys
import types
from typing import Any

from shoal.tasks.environments.hosted import HostedTask
from shoal.tasks.task import check_whole

_SUFFIX = "_Environment"


class RlveGym(HostedTask):
    """An environment of rlve-gym."""

    extra = "rlve-gym"
    distributions = ("rlve-gym", "networkx", "numpy", "sympy")
    selects = "environment"
    package = "shoal.tasks.environments.rlve_tasks:RlveGymPackage"

    def __init__(
        self,
        *,
        environment: str,
        style: str = "chat",
        template: str = "",
        level: int = 0,
        packages: str = "",
        **parameters: bool | int | float | str,
    ) -> None:
        check_whole("rlve-gym: level", level, least=0, most=1000)
        options = {"environment": environment, "level": level, **parameters}
        super().__init__(options=options, style=style, template=template, packages=packages)


# -- in the child process ---------------------------------------------------------------------------------


class RlveGymPackage:
    """Makes problems with an environment of rlve-gym."""

    def __init__(self, environment: str, level: int, **parameters: Any) -> None:
        gym = _import_gym("Gym.environments")
        kind = getattr(gym, f"{environment.removesuffix(_SUFFIX)}{_SUFFIX}", None)
        if kind is None:
            raise ValueError(f"no environment {environment!r}; `shoal tasks show rlve-gym` lists them")
        self._environment = kind()
        if parameters and level:
            raise ValueError("level and parameters exclude each other; remove one of them")
        self._parameters = [parameters] if parameters else _parameters_of(kind.__name__, level)

    @staticmethod
    def names() -> list[str]:
        gym = _import_gym("Gym.environments")
        return sorted(name.removesuffix(_SUFFIX) for name in dir(gym) if name.endswith(_SUFFIX))

    def make(self, seed: int) -> dict[str, Any]:
        env = self._environment
        # Not env.generator(): it stops after ten seconds, so a slow machine would pose another problem.
        env.seed, env.parameter = seed, dict(self._parameters[seed % len(self._parameters)])
        env._generate()
        answer = env.parameter.get("reference_answer")
        return {
            "question": env.prompt_generator(),
            "answer": None if answer is None else str(answer),
            "config": env.get_config(),
        }

    def score(self, problem: dict[str, Any], answer: str) -> float:
        self._environment.set_config(problem["config"])
        return float(self._environment.verifier(f"<answer>{answer}</answer>")["reward"])


def _parameters_of(name: str, level: int) -> list[dict[str, Any]]:
    controllers = _import_gym("Gym.parameter_controllers")
    kind = getattr(controllers, name.replace(_SUFFIX, "_ParameterController"), None)
    if kind is None:
        raise ValueError(f"{name} has no controller; give its parameters as options")
    controller = kind()
    for _ in range(level):
        controller.update()
    parameters: list[dict[str, Any]] = controller.get_parameter_list()
    return parameters


def _import_gym(name: str) -> types.ModuleType:
    """Imports a module of the package. It uses torch only to seed it; where torch is missing, as at a coordinator, it gets an empty module."""
    if "Gym" not in sys.modules:
        sys.modules.setdefault("torch", types.ModuleType("torch"))
    return __import__(name, fromlist=["*"])
