"""Runs the program in its sandbox, in one of three modes. Loaded by sandbox_child.py; imports no other module of shoal.

    script   runs the program as a script, with standard input and output
    serve    loads the program once, then calls its functions on request over a pipe
    test     runs the tests, which call the functions of a `serve` in another sandbox over that pipe

Program and tests never share a process. The tests get only the entry points that they name, results are rebuilt from plain values,
and exceptions that would steer the tests are converted to RuntimeError. So a program cannot see the tests, cannot replace what they
compare with, cannot return objects that claim to equal everything, and cannot end early and look as if it had passed.
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
    status = 1
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__", "__builtins__": builtins})
        status = 0
    except SystemExit as ended:
        status = ended.code & 0xFF if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)


def serve(source: str, pipe: Pipe) -> None:
    """Loads the program, then answers the requests of the tests until the pipe ends.

    request  {"get": NAME}                              reply  {"function": true}, {"value": ...} or {"missing": true}
    request  {"call": NAME, "args": ..., "kwargs": ...} reply  {"value": ...}
    request  {"ping": true}                             reply  {"value": null}

    The reply is {"error": [TYPE, MESSAGE]} if the program raises. It is written by the program's process, so it may be forged.
    """
    scope: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    kept: list[Any] = []
    if not _attempt(pipe, lambda: _load(source, scope)):
        os._exit(1)
    while (request := _receive(pipe)) is not None:
        _attempt(pipe, lambda request=request: _respond(request, scope, kept))  # type: ignore[misc]
    os._exit(0)


def _load(source: str, scope: dict[str, Any]) -> dict[str, Any]:
    exec(compile(source, "program.py", "exec"), scope)
    return {"value": None}


def _respond(request: dict[str, Any], scope: dict[str, Any], kept: list[Any]) -> dict[str, Any]:
    if "ping" in request:
        return {"value": None}
    if "call" in request:
        arguments = [_unpack(value, kept) for value in request["args"]]
        named = {name: _unpack(value, kept) for name, value in request["kwargs"].items()}
        return {"value": _pack(scope[request["call"]](*arguments, **named), kept)}
    name = request["get"]
    if name not in scope or isinstance(scope[name], types.ModuleType):
        return {"missing": True}
    value = scope[name]
    return {"function": True} if callable(value) else {"value": _pack(value, kept)}


def _attempt(pipe: Pipe, act: Callable[[], dict[str, Any]]) -> bool:
    """Sends what `act` returns or raises; returns whether it returned. sys.exit() in a program is an answer too."""
    try:
        _send(pipe, act())
    except BaseException as error:  # noqa: BLE001  # raised by the program
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        _send(pipe, {"error": [kinds[0], str(error)[:200]]})
        return False
    return True


def test(source: str, pipe: Pipe) -> None:
    """Runs the tests; writes PASSED to standard output if none of them raised.

    `source` is JSON: `tests` are Python sources, `entry_points` maps names in the tests to names of the program, and `modules`
    are imported for the tests. The tests get nothing else, so a program cannot redefine what they use to compare.
    """
    sys.stdout = io.StringIO()
    job = json.loads(source)
    scope: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    scope.update((name, importlib.import_module(name)) for name in job["modules"])
    _answer(_receive(pipe))  # the program was loaded
    for name, name_in_program in job["entry_points"].items():
        found = _request(pipe, {"get": name_in_program})
        if "function" in found:
            scope[name] = RemoteFunction(name_in_program, pipe)
        elif "value" in found:
            scope[name] = _copy(found["value"])
    for part in job["tests"]:
        exec(compile(part, "tests.py", "exec"), scope)
    # A program that has ended raises in every later call, which tests that expect an exception would take for right.
    _request(pipe, {"ping": True})
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
        return _copy(
            _request(self._pipe, {"call": self.__name__, "args": arguments, "kwargs": packed})["value"]
        )


class Opaque:
    """Refers to a value of the program that is not plain: tests can pass it back, and it equals only itself."""

    def __init__(self, index: int) -> None:
        self.index = index


def _request(pipe: Pipe, request: dict[str, Any]) -> dict[str, Any]:
    _send(pipe, request)
    return _answer(_receive(pipe))


def _answer(reply: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the program's reply, or raises the exception that it names if that cannot steer the tests."""
    if reply is None:
        raise RuntimeError("the program ended")
    if "error" in reply:
        kind, message = reply["error"]
        raise _EXCEPTIONS.get(str(kind), RuntimeError)(str(message))
    if not reply.keys() & {"value", "function", "missing"}:
        raise RuntimeError("the program sent an invalid reply")
    return reply


def _copy(value: Any) -> Any:
    """Returns the plain value of a reply. Whatever a forged one causes is a RuntimeError to the tests."""
    try:
        return _unpack(value, None)
    except Exception as error:  # noqa: BLE001  # a hostile value may cause any
        raise RuntimeError(f"the program sent an invalid value: {type(error).__name__}") from None


def _is_harmless(kind: object) -> bool:
    """Returns whether the tests may see an exception of this type.

    StopIteration ends a loop of the tests quietly (`all(map(f, xs))`), and the exceptions beside Exception end processes and
    generators. Types that do not take one message cannot be rebuilt.
    """
    steering = (StopIteration, StopAsyncIteration, BaseExceptionGroup, UnicodeError)
    return isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, steering)


_EXCEPTIONS: dict[str, type[Exception]] = {
    name: kind for name, kind in vars(builtins).items() if _is_harmless(kind)
}


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
    # Not Fraction(text): a forged "1e99999999" would keep the tests busy.
    "Fraction": lambda text: fractions.Fraction(*map(int, text.split("/"))),
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
    if isinstance(value, Opaque):
        return {"opaque": value.index}
    if kept is None:
        raise TypeError(f"a test passes a {type(value).__name__}, which is not a plain value")
    kept.append(value)
    return {"opaque": len(kept) - 1}


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
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise RuntimeError("the program's answer is not JSON") from None
    if not isinstance(message, dict):
        raise RuntimeError("the program's answer is not an object")
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
