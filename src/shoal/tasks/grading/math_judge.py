"""Asks math-verify, in a child process: parsers and sympy can be made to take for ever, or to fall over.

What takes more processor time or memory than an answer may, or ends the child twice, is unparseable. What fails on our own
side (no child starts, or it does not answer in time although it has time to spare) raises CannotGrade and is no reward.
"""

import atexit
import contextlib
import functools
import importlib.util
import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, CannotGrade, Reward

CPU_S = 5
WALL_S = 60.0
"""Of one answer. Long, since a busy machine is not the answer's doing."""
START_S = 120.0
MEMORY_BYTES = 1_000_000_000
BATCH = 200
"""Gold answers to one question of the child, whose processor time is that of an answer."""
TRIES = 2

_CHILD = Path(__file__).with_name("math_child.py")
_REWARDS = {"right": RIGHT, "wrong": WRONG, "unparseable": UNPARSEABLE}


class _Died(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"the grading child ended with {status}")
        self.status = status


class MathJudge:
    """One child serves many answers. Safe to use from several threads, one at a time."""

    def __init__(
        self, *, cpu_s: int = CPU_S, wall_s: float = WALL_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._cpu_s, self._wall_s, self._memory_bytes = cpu_s, wall_s, memory_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check_installed(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "grading mathematics needs the package math-verify: pip install 'shoal-rl[math]'"
            )

    def can_parse(self, golds: Sequence[str]) -> list[bool]:
        """Which of the gold answers mean something to math-verify."""
        found: list[bool] = []
        for start in range(0, len(golds), BATCH):
            part = list(golds[start : start + BATCH])
            reply = self._ask({"golds": part})
            # One of them is too much for the child: ask one by one, and blame that one.
            if reply is None and len(part) > 1:
                found += [good for gold in part for good in self.can_parse([gold])]
            else:
                found += [False] * len(part) if reply is None else reply["parsed"]
        return found

    def compare(self, gold: str, answer: str) -> Reward:
        reply = self._ask({"gold": gold, "answer": answer})
        return UNPARSEABLE if reply is None else _REWARDS[reply["outcome"]]

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The child's answer; None if the question is more than a child can take."""
        with self._lock:
            for attempt in range(TRIES):
                try:
                    return self._exchange(question)
                except _Died as died:
                    self.close()
                    if died.status == -signal.SIGXCPU:
                        return None
                    if attempt == TRIES - 1:
                        return None
        raise AssertionError("unreachable")

    def _exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        child = self._running_child()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise _Died(child.wait()) from None
        reply: dict[str, Any] = json.loads(self._line(child, self._wall_s))
        return reply

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self.check_installed()
            # No environment but what sympy's order of terms may hang on: two validators must come to the same.
            self._child = subprocess.Popen(
                [sys.executable, "-s", "-P", str(_CHILD), str(self._memory_bytes), str(self._cpu_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
            try:
                ready = self._line(self._child, START_S)
            except _Died as died:
                self.close()
                raise CannotGrade(
                    f"{died} before it had graded anything; try: python {_CHILD} 1000000000 5"
                ) from None
            if ready != b"ready\n":
                self.close()
                raise CannotGrade(f"the grading child began with {ready[:80]!r}")
        return self._child

    def _line(self, child: subprocess.Popen[bytes], wall_s: float) -> bytes:
        assert child.stdout is not None
        give_up_s = time.monotonic() + wall_s
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([child.stdout], [], [], left_s)[0]:
                self.close()
                raise CannotGrade(
                    f"the grading child did not answer within {wall_s:.0f} s; is the machine busy?"
                )
            piece = child.stdout.read1(1 << 16)  # type: ignore[attr-defined]  # a BufferedReader
            if not piece:
                raise _Died(child.wait())
            pieces.append(piece)
        return b"".join(pieces)


@functools.cache
def math_judge() -> MathJudge:
    """This process's. However this process ends, its child's input ends with it, and so does the child."""
    judge = MathJudge()
    atexit.register(judge.close)
    return judge
