"""Runs the program in its sandbox, in one of three modes. Loaded by sandbox_child.py; imports no other module of shoal.

    script   runs the program as a script, with standard input and output
    serve    loads the program once, then calls its functions on request over a pipe
    test     runs the tests, which call the functions of a `serve` in another sandbox over that pipe

Program and tests never share a process. Results of the program are rebuilt from plain values, so that a program cannot see the
tests, cannot return objects that claim to equal what they expect, and cannot end early and look as if it had passed.
"""

import builtins
import collections
import decimal
import fractions
import importlib
import io
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

PASSED = b"passed"
MAX_FRAME = 4 << 20
MAX_ITEMS = 100_000
"""Maximum items taken from an iterator that a program returns; it may be infinite."""

Pipe = Sequence[int]
"""File descriptors to read from and to write to."""
Kept = list[Any] | None
"""Values the program returned that are not plain. None in the process of the tests."""


def run_script(source: str, pipe: Pipe) -> None:
    """Runs the program as a script."""
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    sys.stdout.flush()
    os._exit(0)


def serve(source: str, pipe: Pipe) -> None:
    """Loads the program, sends the names it defines, then answers calls until the pipe ends."""
    scope: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    kept: list[Any] = []
    if not _attempt(pipe, lambda: _load(source, scope, kept)):
        os._exit(1)
    while (call := _receive(pipe)) is not None:
        _attempt(pipe, lambda call=call: {"value": _pack(_do(call, scope, kept), kept)})  # type: ignore[misc]
    os._exit(0)


def _load(source: str, scope: dict[str, Any], kept: list[Any]) -> dict[str, Any]:
    exec(compile(source, "program.py", "exec"), scope)
    own = {name: value for name, value in scope.items() if not name.startswith("__")}
    functions = [name for name, value in own.items() if callable(value)]
    modules = {name: value.__name__ for name, value in own.items() if isinstance(value, types.ModuleType)}
    constants = {
        name: _pack(value, kept)
        for name, value in own.items()
        if name not in functions and name not in modules
    }
    return {"functions": functions, "modules": modules, "constants": constants}


def _do(call: dict[str, Any], scope: dict[str, Any], kept: list[Any]) -> Any:
    arguments = [_unpack(value, kept) for value in call["args"]]
    named = {name: _unpack(value, kept) for name, value in call["kwargs"].items()}
    return scope[call["name"]](*arguments, **named)


def _attempt(pipe: Pipe, act: Callable[[], dict[str, Any]]) -> bool:
    """Sends what `act` returns or raises; returns whether it returned. sys.exit() in a program is an answer too."""
    try:
        _send(pipe, act())
    except BaseException as error:  # noqa: BLE001  # raised by the program
        _send(pipe, {"error": [type(error).__name__, str(error)[:200]]})
        return False
    return True


def test(source: str, pipe: Pipe) -> None:
    """Runs the tests, a JSON list of sources; writes PASSED to standard output if none of them raised."""
    sys.stdout = io.StringIO()
    names = _answer(_receive(pipe))
    scope: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    scope.update((name, _unpack(value, None)) for name, value in names["constants"].items())
    scope.update((name, RemoteFunction(name, pipe)) for name in names["functions"])
    # Tests may use modules that the program imported; they import their own copies.
    scope.update(
        (name, importlib.import_module(module))
        for name, module in names["modules"].items()
        if module in sys.stdlib_module_names
    )
    for part in json.loads(source):
        exec(compile(part, "tests.py", "exec"), scope)
    os.write(1, PASSED)
    os._exit(0)


MODES = {"script": run_script, "serve": serve, "test": test}


class RemoteFunction:
    """Calls a function of the program in the other sandbox."""

    def __init__(self, name: str, pipe: Pipe) -> None:
        self.__name__, self._pipe = name, pipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        packed = {name: _pack(value, None) for name, value in kwargs.items()}
        arguments = [_pack(value, None) for value in args]
        _send(self._pipe, {"name": self.__name__, "args": arguments, "kwargs": packed})
        return _unpack(_answer(_receive(self._pipe))["value"], None)


class Opaque:
    """Refers to a value of the program that is not plain: tests can pass it back, and it equals only itself."""

    def __init__(self, index: int) -> None:
        self.index = index


def _answer(reply: dict[str, Any] | None) -> dict[str, Any]:
    if reply is None:
        raise RuntimeError("the program ended")
    if "error" in reply:
        kind = getattr(builtins, str(reply["error"][0]), None)
        plain = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
        raise (kind if plain else RuntimeError)(str(reply["error"][1]))  # type: ignore[misc]
    return reply


# -- values as JSON ---------------------------------------------------------------------------------------

_LISTS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
_ITERATORS: tuple[Any, ...] = (
    *(types.GeneratorType, map, filter, zip, range, reversed, enumerate),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
}


def _pack(value: Any, kept: Kept) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return _pack_scalar(value)
    for name, kind in _LISTS.items():
        if isinstance(value, kind):
            return {name: [_pack(item, kept) for item in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[_pack(key, kept), _pack(item, kept)] for key, item in dict.items(value)]}
    if isinstance(value, _ITERATORS):
        return {"iter": [_pack(item, kept) for _, item in zip(range(MAX_ITEMS), value, strict=False)]}
    return _pack_rare(value, kept)


def _pack_rare(value: Any, kept: Kept) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, decimal.Decimal | fractions.Fraction):
        return {type(value).__name__: str(value)}
    return _pack_opaque(value, kept)


def _pack_scalar(value: Any) -> Any:
    """Converts to exactly None, bool, int, float or str: a subclass could override comparison."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() <= 64 else {"int": hex(number)}
    if isinstance(value, float):
        return {"float": repr(float(value))}
    return str.__str__(value)


def _pack_opaque(value: Any, kept: Kept) -> Any:
    if isinstance(value, Opaque):
        return {"opaque": value.index}
    if kept is None:
        raise TypeError(f"a test passes a {type(value).__name__}, which is not a plain value")
    kept.append(value)
    return {"opaque": len(kept) - 1}


def _unpack(value: Any, kept: Kept) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind in _LISTS:
        return _LISTS[kind](_unpack(item, kept) for item in inner)
    if kind == "dict":
        return {_unpack(key, kept): _unpack(item, kept) for key, item in inner}
    if kind == "iter":
        return iter([_unpack(item, kept) for item in inner])
    if kind == "opaque":
        return Opaque(inner) if kept is None else kept[inner]
    return _SCALARS[kind](inner)


# -- frames -----------------------------------------------------------------------------------------------


def _send(pipe: Pipe, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME:
        data = json.dumps({"error": ["OverflowError", "the value is too large"]}).encode()
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(pipe[1], data) :]


def _receive(pipe: Pipe) -> dict[str, Any] | None:
    """Returns the next message, or None if the other side has ended."""
    length = _read(pipe[0], 4)
    if length is None:
        return None
    count = int.from_bytes(length, "big")
    if count > MAX_FRAME:
        raise RuntimeError("the program's answer is too long")
    data = _read(pipe[0], count)
    if data is None:
        return None
    message: dict[str, Any] = json.loads(data)
    return message


def _read(fd: int, count: int) -> bytes | None:
    pieces: list[bytes] = []
    while count:
        piece = os.read(fd, count)
        if not piece:
            return None
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
