"""Tasks whose problems and scores come from an environment package of others, in a child process (environment_child.py).

One problem in five is held out, by the hash of its question. The versions of the packages are in the run's terms, since another
version may pose another problem for the same seed; a machine with other versions refuses to take part.
"""

import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from shoal.child_process import ChildDied, ChildError, ChildLimits, ChildProcess
from shoal.tasks.environments.environment_child import SETTINGS
from shoal.tasks.task import (
    RIGHT,
    UNPARSEABLE,
    CannotGrade,
    Outcome,
    Problem,
    Reward,
    Split,
    check_style,
    is_held_out,
    problem_rng,
    reply_of,
)

LIMITS = ChildLimits(memory_bytes=2_000_000_000, cpu_s=20)
WALL_S = 120.0
"""Seconds of wall-clock time for one request. Much longer than the processor time, since the machine may be busy."""
TRIES = 100
"""Seeds tried for a problem of the wanted split before the environment counts as unusable."""
STYLES = {
    "chat": "{question}\nGive the final answer between <answer> and </answer>.",
    "direct": "{question}\nReply with the answer only.",
    "bare": "{question}\n",
}


class HostedTask:
    """A task of an environment package. Subclasses name the package and the class that runs in the child."""

    extra: ClassVar[str]
    """The extra of shoal-rl that installs the package."""
    distributions: ClassVar[tuple[str, ...]]
    """Packages on PyPI whose versions decide what a problem is, the environment package first."""
    selects: ClassVar[str]
    """The option that names the environment."""
    package: ClassVar[str]
    """Module and class of the EnvironmentPackage, imported in the child only."""

    def __init__(self, *, options: dict[str, Any], style: str, template: str, packages: str) -> None:
        check_style(self.extra, style, tuple(STYLES))
        if template and "{question}" not in template:
            raise ValueError(f"{self.extra}: template={template!r} must contain {{question}}")
        installed = self.installed(options)
        if packages not in ("", installed):
            wanted = " ".join(
                "'{}=={}'".format(*one.split())
                for one in packages.split(", ")
                if not one.startswith("python ")
            )
            raise ValueError(
                f"{self.extra}: this machine has {installed}, the run has {packages}, and other versions may pose other problems; "
                f"pip install {wanted}"
            )
        self._style, self._template = style, template or STYLES[style]
        self._name = " ".join([self.extra, *map(str, options.values())][:2])
        self._child = _child(self.package, options)

    @classmethod
    def installed(cls, options: Mapping[str, Any]) -> str:
        """Returns the versions that the problems of these options depend on. Raises ValueError without the package."""
        try:
            found = [f"{name} {version(name)}" for name in cls.distributions]
        except PackageNotFoundError as error:
            raise ValueError(
                f"{cls.extra} needs the package {error.name}: pip install 'shoal-rl[{cls.extra}]'"
            ) from None
        # Random numbers and the order of sets are those of a Python release.
        return ", ".join([*found, f"python {platform.python_version().rpartition('.')[0]}"])

    @classmethod
    def pins(cls, options: Mapping[str, Any]) -> dict[str, str]:
        """Returns the options that the public terms of a run add."""
        return {"packages": cls.installed(options)}

    @classmethod
    def environments(cls) -> list[str]:
        """Returns the names of the environments of the package."""
        cls.installed({})
        child = _child(cls.package, {})
        try:
            names: list[str] = _exchange(child, {"list": True}).get("names", [])
        except ChildError as error:
            raise ValueError(f"{cls.extra}: {error}") from None
        finally:
            child.close()
        return names

    @property
    def chat(self) -> bool:
        return self._style != "bare"

    def problem(self, split: Split, seed: int) -> Problem:
        """Returns the first problem of this seed that belongs to the split; problems that the environment fails to make are skipped."""
        last = "all problems belong to the other split"
        for attempt in range(TRIES):
            drawn = problem_rng(seed, attempt).getrandbits(31)  # by which the package makes a problem
            try:
                asked = _exchange(self._child, {"ask": drawn})
            except ChildError as error:
                # The seed is not skipped: a faster machine would not skip it, and would pose another problem.
                raise ValueError(
                    f"{self._name}: no problem for seed {drawn}: {error}; use smaller problems or another environment"
                ) from None
            if "refused" in asked:
                raise ValueError(f"{self._name}: {asked['refused']}")
            if "error" in asked:
                last = asked["error"]
            elif is_held_out(asked["question"]) == (split == "eval"):
                return Problem(
                    self._template.replace("{question}", asked["question"]),
                    self._right(asked["answer"]),
                    check=str(drawn),
                )
        raise ValueError(
            f"{self._name}: no {split} problem in {TRIES} tries: {last}; use other options or another environment"
        )

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        answer = self._answer(reply_of(text))
        if not answer:
            return UNPARSEABLE
        try:
            scored = _exchange(self._child, {"score": int(problem.check), "answer": answer})
        except ChildDied:
            return UNPARSEABLE  # the answer took too much time or memory, twice
        except ChildError as error:
            raise CannotGrade(str(error)) from None
        score = scored.get("score", -1.0)
        # min(1.0, nan) is 1: a scorer that calculates with an answer such as `nan` must not give it the full reward.
        if score < 0 or not math.isfinite(score):
            return UNPARSEABLE
        value = min(1.0, score)
        return RIGHT if value > 1 - 1e-6 else Reward(value, Outcome.WRONG)

    def _right(self, answer: str | None) -> str:
        if answer is None:
            return ""
        return f"<answer>{answer}</answer>" if self._style == "chat" else answer

    def _answer(self, reply: str) -> str:
        if self._style != "chat":
            return reply.strip()
        start, end = reply.rfind("<answer>"), reply.rfind("</answer>")
        return reply[start + len("<answer>") : end].strip() if 0 <= start < end else ""


def _child(package: str, options: dict[str, Any]) -> ChildProcess:
    return ChildProcess(
        "shoal.tasks.environments.environment_child:serve_environment",
        limits=LIMITS,
        env={SETTINGS: json.dumps({"package": package, "options": options})},
    )


def _exchange(child: ChildProcess, request: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(child.exchange(json.dumps(request).encode(), timeout_s=WALL_S))
    return reply
