"""The child process in which the code of an environment package runs: it makes problems of seeds and scores answers.

The packages of others draw from global random numbers, depend on the order of sets, take very long for some answers, and some
evaluate an answer as Python. So they run apart: with seeded random numbers, a fixed hash seed, limits on time and memory, no
network, no other programs, and no files to write.

    request  {"list": true}                reply  {"names": [...]}
    request  {"ask": seed}                 reply  {"question": ..., "answer": text or null}
    request  {"score": seed, "answer": ...}  reply  {"score": number}

Any request may be answered by {"error": ...}: the environment raised, and the text names the exception.
"""

import copy
import importlib
import json
import os
import platform
import random
import sys
from collections import OrderedDict
from typing import Any, Protocol

from shoal.child_process import ChildLimits, serve
from shoal.landlock import confine
from shoal.tasks.grading.sandbox_child import filter_calls
from shoal.tasks.grading.system_calls import filter_program

SETTINGS = "SHOAL_ENVIRONMENT"
"""Environment variable with JSON: `package`, the module and class of an EnvironmentPackage; `options`, those of the task."""
KEPT = 64
"""Problems that are kept, since all samples of a prompt are scored one after another."""


class EnvironmentPackage(Protocol):
    """One environment of a package. It is created with the task's options, in the child only."""

    @staticmethod
    def names() -> list[str]:
        """Returns the names of all environments that the package has."""

    def make(self, seed: int) -> dict[str, Any]:
        """Returns the problem of a seed: `question`, `answer` (None if the package knows no right one), and its own data."""

    def score(self, problem: dict[str, Any], answer: str) -> float:
        """Returns the package's score of an answer: at most 1 for a right one, below 0 without anything to score."""


def serve_environment(limits: ChildLimits) -> None:
    """Loads the package, confines this process, and answers requests."""
    settings = json.loads(os.environ[SETTINGS])
    module, _, name = settings["package"].partition(":")
    package = getattr(importlib.import_module(module), name)
    served = ServedEnvironment(package, settings["options"])
    confine([], [])
    if (calls := filter_program(platform.machine())) is not None:
        filter_calls(calls)
    serve(served.answer, limits)


class ServedEnvironment:
    """Answers requests by one environment."""

    def __init__(self, package: Any, options: dict[str, Any]) -> None:
        self._package = package
        self._problems: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._failed = ""
        try:
            # Without options only the names are asked for.
            self._environment: EnvironmentPackage | None = package(**options) if options else None
        except Exception as error:  # noqa: BLE001 - code of others may raise anything; the parent shows it
            self._failed = describe(error)

    def answer(self, frame: bytes) -> bytes:
        try:
            reply = self._reply(json.loads(frame))
        except Exception as error:  # noqa: BLE001
            reply = {"error": describe(error)}
        return json.dumps(reply).encode()

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        if "list" in request:
            return {"names": self._package.names()}
        if self._failed:
            return {"refused": self._failed}
        assert self._environment is not None
        if "ask" in request:
            problem = self._problem(request["ask"])
            return {"question": problem["question"], "answer": problem["answer"]}
        problem = copy.deepcopy(self._problem(request["score"]))  # a scorer may change what it is given
        seed_all(request["score"])
        return {"score": float(self._environment.score(problem, request["answer"]))}

    def _problem(self, seed: int) -> dict[str, Any]:
        assert self._environment is not None
        if seed not in self._problems:
            seed_all(seed)
            self._problems[seed] = self._environment.make(seed)
            if len(self._problems) > KEPT:
                self._problems.popitem(last=False)
        return self._problems[seed]


def seed_all(seed: int) -> None:
    """Seeds the global random numbers, which some environments draw from."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def describe(error: BaseException) -> str:
    """Returns an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
