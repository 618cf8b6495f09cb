"""Tasks and graders in a Python file without a package: `FILE.py:NAME`, a class or a function that the file defines.

Only files that the user of this machine named are executed, never one that another machine sent or named:

    allow_code(spec)   the run file or the command line names the file; this process and the ones that it starts may execute it
    pin_code(spec)     the public terms get the file's base name and its SHA-256 digest, and no path
    load_code(...)     executes an allowed file if it has that digest; any other file is an error

A validator or trainer on another machine needs its own copy of the file, named in SHOAL_TASK_FILES. Workers need no file.
"""

import functools
import hashlib
import os
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from shoal.wire.run_spec import TaskSpec

ALLOWED = "SHOAL_TASK_FILES"
"""Environment variable with the files that may be executed, separated like the folders of PATH."""
CODE_DIGEST, GRADER, GRADER_DIGEST = "code_sha256", "grader", "grader_sha256"
"""Options of a task: the digest of its own file, a grader, and the digest of the grader's file."""

_ADDRESS = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def is_code(value: object) -> bool:
    """Returns whether a task's name or grader is FILE.py:NAME."""
    return isinstance(value, str) and _ADDRESS.fullmatch(value) is not None


def allow_code(spec: TaskSpec) -> None:
    """Allows the files that this spec names. Call it only with a spec that this machine's user wrote."""
    for address in (spec.name, spec.options.get(GRADER)):
        if not is_code(address):
            continue
        path = str(Path(_split(str(address))[0]).resolve())
        if path not in _allowed():
            os.environ[ALLOWED] = os.pathsep.join([*_allowed(), path])


def pin_code(spec: TaskSpec) -> TaskSpec:
    """Returns the spec with base names and digests instead of paths. Raises ValueError for a file with another digest."""
    options = dict(spec.options)
    name = spec.name
    if is_code(name):
        name, options[CODE_DIGEST] = _pinned(name, str(options.get(CODE_DIGEST, "")))
    if is_code(options.get(GRADER)):
        options[GRADER], options[GRADER_DIGEST] = _pinned(
            str(options[GRADER]), str(options.get(GRADER_DIGEST, ""))
        )
    return spec.model_copy(update={"name": name, "options": options})


def load_code(address: str, digest: str = "") -> Any:
    """Returns the class or function of FILE.py:NAME. Raises ValueError if the file is not allowed or has another digest."""
    path, source, found = _read(address, digest)
    module, name = _execute(str(path), source, found), _split(address)[1]
    code = getattr(module, name, None)
    # An imported function must not be called with options that another machine sends: `from os import system` is one.
    if not callable(code) or getattr(code, "__module__", None) != module.__name__:
        raise ValueError(f"{path} defines no class or function {name!r}; check the name after the colon")
    return code


def _pinned(address: str, digest: str) -> tuple[str, str]:
    path, _, found = _read(address, digest)
    return f"{path.name}:{_split(address)[1]}", found


def _read(address: str, digest: str) -> tuple[Path, bytes, str]:
    """Returns path, bytes and digest of the allowed file of an address."""
    name = _split(address)[0]
    seen = ""
    for path in map(Path, _allowed()):
        if path != Path(name).resolve() and (path.name != name):
            continue
        try:
            source = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; correct the path of the task's file") from None
        found = hashlib.sha256(source).hexdigest()
        if digest in ("", found):
            return path, source, found
        seen = f"{path} has SHA-256 {found}, the run's terms say {digest}; get the run's file"
    raise ValueError(
        seen
        or f"the file {name} is not one that this machine may execute; get the run's file, read it, and set "
        f"{ALLOWED}=/path/to/{Path(name).name}"
    )


@functools.lru_cache(maxsize=16)
def _execute(path: str, source: bytes, digest: str) -> types.ModuleType:
    """Executes a file as a module. The bytes are the ones whose digest was checked: the file is not read again."""
    module = types.ModuleType(f"shoal_task_{digest[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look up their module by name
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        if isinstance(error, SyntaxError):
            raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(f"{line.filename}, line {line.lineno}: {type(error).__name__}: {error}") from error
    return module


def _split(address: str) -> tuple[str, str]:
    match = _ADDRESS.fullmatch(address)
    assert match is not None, address
    return match[1], match[2]


def _allowed() -> list[str]:
    return [path for path in os.environ.get(ALLOWED, "").split(os.pathsep) if path]
