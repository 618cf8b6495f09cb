"""Shoal: reinforcement learning of reasoning models across computers that nobody has to trust.

`shoal.run(model=..., task=my_reward, data=...)` trains from Python. Importing this package loads nothing else: `run` is imported
when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.cli.run.python_run import RunResult as RunResult
    from shoal.cli.run.python_run import run as run

__version__ = "0.2.0.dev0"
__all__ = ["RunResult", "__version__", "run"]


def __getattr__(name: str) -> Any:
    if name not in ("run", "RunResult"):
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    from shoal.cli.run import python_run

    return getattr(python_run, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
