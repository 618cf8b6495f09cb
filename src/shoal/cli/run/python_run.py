"""`shoal.run(...)`: a run from Python, in a script or a notebook, with the same processes underneath as `shoal run`.

A reward function or a task class is written, with what it uses, to a file of its own: every role is a process, and validators on
other machines check the file's digest. What a run is started with is in `out/NAME.inputs`.
"""

import ast
import builtins
import inspect
import json
import sys
import tempfile
import textwrap
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.cli.run.local import LocalRun, run_local
from shoal.cli.run.overrides import apply_overrides, dump_tables, to_toml
from shoal.cli.run.preflight import try_run
from shoal.cli.run.runfile import load_run_file
from shoal.cli.run.supervise import EXIT_OK
from shoal.cli.run_folder import RunFolder
from shoal.cli.ui.values import best_version, check_device, held_out_means
from shoal.cli.ui.view import print_plainly
from shoal.files import write_bytes_atomically

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that has ended or was stopped."""

    folder: Path
    """The run's folder, as `shoal run` writes it: `shoal report`, `shoal audit` and `shoal export` take it."""
    model: Path
    """The newest version as a plain folder, for transformers."""
    finished: bool
    """Whether it ended as its settings expect. A run that was stopped continues with `resume=True`."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean reward of each step's batch, by version."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Held-out reward of each evaluated version; the mean of several evaluations."""

    @property
    def best_version(self) -> int | None:
        """Returns the version with the highest held-out reward, the newest of several equal ones; None without evaluations."""
        return best_version(self.held_out) if self.held_out else None

    def export(self, out: str | Path, version: int | None = None) -> Path:
        """Writes a version, the best if none is named, to a new folder for transformers, and returns the folder."""
        from shoal.model.plain_folder import write_plain_folder

        chosen = self.best_version if version is None else version
        with (
            RunFolder(self.folder) as run,
            tempfile.TemporaryDirectory(dir=self.folder, prefix=".export-") as scratch,
        ):
            run.restore(run.find_version("newest") if chosen is None else chosen, Path(scratch))
            write_plain_folder(Path(scratch), Path(out))
        return Path(out)


def run(  # noqa: PLR0913 (every argument is a setting of the run)
    *,
    model: str | Path,
    task: str | Callable[..., Any],
    data: str | Path | Rows | None = None,
    options: Mapping[str, bool | int | float | str] | None = None,
    steps: int = 20,
    name: str = "python",
    folder: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str = "cpu",
    resume: bool = False,
    quiet: bool = False,
) -> RunResult:
    """Trains a model on a task with a whole swarm on this machine, and returns the result.

    `task` is a reward function `def reward(reply, answer)` or `(reply, answer, question)` for the questions and answers in `data`;
    or a class with `problem` and `reward`; or the name of a task that `shoal tasks` lists. `data` is a file or a list of rows, in
    the columns `question` and `answer` unless `options` name others. `settings` replace keys of the run file, such as
    {"trainer.learning_rate": 1e-5}. An earlier run of the same name is replaced, or continued with `resume`.
    Raises ValueError for settings that cannot work, and RunFailed if a role fails.
    """
    target = Path(folder) if folder is not None else Path("out") / name
    inputs = target.with_name(f"{target.name}.inputs")
    inputs.mkdir(mode=0o700, parents=True, exist_ok=True)  # as the run's folder: it has the data set
    source = inputs / "run.toml"
    table: dict[str, Any] = {
        "run": {"name": name, "model": str(model), "last_version": steps},
        "task": _task_table(task, data, dict(options or {}), inputs),
        "local": {"relays": 1},
    }
    apply_overrides(table, [f"{key}={to_toml(value)}" for key, value in (settings or {}).items()])
    write_bytes_atomically(source, dump_tables(table).encode(), durable=False)
    file = load_run_file(source)
    if device != "cpu":
        check_device(device)  # before an earlier run is deleted
    console = Console(highlight=False, quiet=quiet)
    if not resume:
        for warning in try_run(file, source, starts=True, device=device):
            print_plainly(console, f"warning: {warning}")
    local = LocalRun(file=file, source=source, folder=target, resume=resume, fresh=not resume, device=device)
    try:
        code = run_local(local, threading.Event(), console)
    except KeyboardInterrupt:
        print_plainly(console, "stopped; continue with the same call and resume=True")
        raise
    with RunFolder(target) as found:
        history = found.history()
    return RunResult(
        folder=target,
        model=target / "model",
        finished=code == EXIT_OK,
        rewards={step.version: step.reward_mean for step in history.steps},
        held_out=held_out_means(history.evaluations),
    )


# -- the task -----------------------------------------------------------------------------------------------


def _task_table(
    task: str | Callable[..., Any], data: str | Path | Rows | None, options: dict[str, Any], inputs: Path
) -> dict[str, Any]:
    if data is not None:
        options["path"] = str(_data_file(data, inputs))
    if isinstance(task, str):
        return {"name": task, "options": options}
    code = inputs / "task.py"
    write_bytes_atomically(code, source_with_uses(task).encode(), durable=False)
    address = f"{code.resolve()}:{task.__name__}"
    if isinstance(task, type):
        return {"name": address, "options": options}
    if data is None:
        raise ValueError(
            f"{task.__name__} is a reward function, so `data` must have the questions: a file, or a list of rows"
        )
    return {"name": "qa", "options": {"grader": address} | options}


def _data_file(data: str | Path | Rows, inputs: Path) -> Path:
    if isinstance(data, str | Path):
        return Path(data).resolve()
    path = inputs / "data.jsonl"
    lines = []
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"row {number} of data is {row!r:.80}, expected an object with a question and an answer; of a pandas table, give "
                'table.to_dict("records")'
            )
        lines.append(json.dumps(dict(row), ensure_ascii=False, default=_plain_value) + "\n")
    write_bytes_atomically(path, "".join(lines).encode(), durable=False)
    return path.resolve()


def _plain_value(value: Any) -> Any:
    """Returns a value of numpy or another library as JSON can have it: numbers as such, everything else as text."""
    return value.item() if getattr(value, "shape", None) == () else str(value)


def source_with_uses(code: Callable[..., Any]) -> str:
    """Returns a module that defines a function or class: its source, with imports, constants and functions that it uses.

    Raises ValueError for what cannot be written to a file, such as a variable with a model in it.
    """
    parts: dict[str, str] = {}
    _collect(code, parts)
    return "\n\n".join(parts.values()) + "\n"


def _collect(code: Callable[..., Any], parts: dict[str, str]) -> None:
    """Adds the source of `code`, after what it uses, to `parts`, by name."""
    try:
        text = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        raise ValueError(
            f"the source of {code.__name__} cannot be read; define it in a file or in a cell of a notebook"
        ) from None
    if inspect.isfunction(code) and code.__code__.co_freevars:
        names = ", ".join(code.__code__.co_freevars)
        raise ValueError(
            f"{code.__name__} uses {names} of the function around it; define it at the top of the file"
        )
    if not text.startswith(("def ", "class ", "@", "async ")):
        raise ValueError(f"{code.__name__} is not a plain function or class; write it with `def` or `class`")
    known = vars(sys.modules[code.__module__]) if not inspect.isfunction(code) else code.__globals__
    parts[code.__name__] = ""  # so that functions that call each other end
    for used in _names(text):
        if used != code.__name__ and used in known and used not in parts:
            _write_use(used, known[used], code, parts)
    del parts[code.__name__]
    parts[code.__name__] = text


def _names(text: str) -> list[str]:
    found = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return sorted(found - set(vars(builtins)))


def _write_use(name: str, value: Any, user: Callable[..., Any], parts: dict[str, str]) -> None:
    module, own = getattr(value, "__module__", None), str(getattr(value, "__name__", ""))
    if isinstance(value, types.ModuleType):
        parts[name] = f"import {own} as {name}"
    elif callable(value) and module == user.__module__:
        _collect(value, parts)
    elif callable(value) and module is not None and getattr(sys.modules.get(module), own, None) is value:
        parts[name] = f"from {module} import {own} as {name}"
    elif _is_literal(value):
        parts[name] = f"{name} = {value!r}"
    else:
        raise ValueError(
            f"{user.__name__} uses {name}, a {type(value).__name__}, which cannot be written to a file; compute it inside the function"
        )


def _is_literal(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_literal(one) for pair in value.items() for one in pair)
    if isinstance(value, str | bytes | int | float | bool | None):
        return True
    return isinstance(value, Sequence | set | frozenset) and all(_is_literal(one) for one in value)
