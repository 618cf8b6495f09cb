"""A role of a benchmark in a process of its own: it says when it is ready, then does what it is told, line by line.

child = Child(__file__, "relay", "--dir", folder)         runs this file with `--role relay --dir folder`
child.ready                                               what it said when it was
child.ask("usage")                                        one line in, one answer out
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

END_S = 10.0


class Ended(RuntimeError):
    """A child is no more, and was not told to."""


class Child:
    def __init__(
        self, script: str, role: str, *arguments: object, python: str = sys.executable, quiet: bool = False
    ) -> None:
        safe = (
            ["-P"] if sys.flags.safe_path else []
        )  # a benchmark may have the name of a package that it measures
        command = [python, *safe, script, "--role", role, *map(str, arguments)]
        self.name = role
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )

    @cached_property
    def ready(self) -> dict[str, Any]:
        """Returns the child's first message. Children that are started together start up in parallel."""
        return self.hear()

    @property
    def port(self) -> int:
        return int(self.ready["port"])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tell(self, line: str) -> None:
        assert isinstance(self.ready, dict)  # otherwise its first message would be read as the answer
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise Ended(f"{self.name} ended: exit {self._process.wait()}")

    def ask(self, line: str) -> dict[str, Any]:
        self.tell(line)
        return self.hear()

    def close(self, *, kill: bool = False) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if kill:
            self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # amid some work, and so not listening
            self._process.kill()
            self._process.wait()


@contextmanager
def children(script: str, **ways: Any) -> Iterator[Callable[..., Child]]:
    """Starts children of one benchmark, waits until each is ready unless it need not, and ends them all."""
    started: list[Child] = []

    def start(role: str, *arguments: object, wait: bool = True, **named: Any) -> Child:
        child = Child(script, role, *arguments, **ways, **named)
        started.append(child)
        if wait:
            assert isinstance(child.ready, dict)
        return child

    try:
        yield start
    finally:
        for child in reversed(started):
            child.close()


def obey(ready: dict[str, Any], act: Callable[[str], dict[str, Any]]) -> None:
    """Runs the child's side: acts on each line from the parent until the parent closes the pipe."""
    say(ready)
    for line in sys.stdin:
        say(act(line.strip()))
    os._exit(0)  # threads may be waiting for the network


def say(value: dict[str, Any]) -> None:
    sys.stderr.flush()
    print("@" + json.dumps(value), flush=True)
