"""Reads strangers' files in a child process that can be killed, starved or crashed without harm.

One child serves many files. It says when it is ready, so a child that cannot start (a broken installation, a machine
short of memory) is our own failure. When a file makes a ready child die, the child is replaced and the file refused, but
only after a second child came to the same end: what ails this machine must not cost an honest node its name.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from shoal.swarm.validator.frames import LENGTH_BYTES, READY, BadReply, decode_reply, encode_request
from shoal.wire.codes import Rejected
from shoal.wire.rollouts import RolloutTable, TableLimits

MAX_MEMORY_BYTES = 1_000_000_000
"""On top of what the child holds before the first file."""
CPU_S = 20
WALL_S = 120.0
START_S = 60.0
TRIES = 2


class ReaderDown(RuntimeError):
    """Our own side could not read the file: not the sender's doing."""


class _ChildDied(Exception):
    def __init__(self, returncode: int) -> None:
        super().__init__(f"the reading child ended with {returncode}")
        self.returncode = returncode


class Reader:
    """`read(bytes, limits)` gives the table or raises Rejected. Use as a context manager, or call close."""

    def __init__(
        self,
        *,
        max_memory_bytes: int = MAX_MEMORY_BYTES,
        cpu_s: int = CPU_S,
        wall_s: float = WALL_S,
        python: str = sys.executable,
    ) -> None:
        self._max_memory_bytes, self._cpu_s, self._wall_s = max_memory_bytes, cpu_s, wall_s
        self._python = python
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._running_child()  # who cannot read should say so before claiming anything
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def read(self, data: bytes, limits: TableLimits) -> RolloutTable:
        """The table, or Rejected with the reason, or ReaderDown."""
        for _ in range(TRIES):
            try:
                return decode_reply(self._exchange(encode_request(data, limits)), limits)
            except _ChildDied as died:
                self.close()
                last: _ChildDied | BadReply = died
            except BadReply as bad:
                self.close()
                last = bad
        raise _verdict(last)

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _exchange(self, request: bytes) -> bytes:
        child = self._running_child()
        assert child.stdin is not None and child.stdout is not None
        give_up_s = time.monotonic() + self._wall_s
        framed = len(request).to_bytes(LENGTH_BYTES, "big") + request
        self._write(child.stdin.fileno(), framed, give_up_s)
        length = int.from_bytes(self._read(child.stdout.fileno(), LENGTH_BYTES, give_up_s), "big")
        if length > self._max_memory_bytes:
            raise BadReply(f"announces {length} bytes")
        return self._read(child.stdout.fileno(), length, give_up_s)

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            # -I: no user site, no environment that could load code. The system allocator gives memory back and, unlike
            # arena allocators, reserves no address space of which the limit would take away half.
            command = [self._python, "-I", "-m", "shoal.swarm.validator.table_reader_child"]
            self._child = subprocess.Popen(
                [*command, str(self._max_memory_bytes), str(self._cpu_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    "ARROW_DEFAULT_MEMORY_POOL": "system",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                bufsize=0,
                start_new_session=True,
            )
            assert self._child.stdin is not None and self._child.stdout is not None
            os.set_blocking(self._child.stdin.fileno(), False)
            os.set_blocking(self._child.stdout.fileno(), False)
            self._await_ready(self._child.stdout.fileno())
        return self._child

    def _await_ready(self, fd: int) -> None:
        try:
            said = self._read(fd, len(READY), time.monotonic() + START_S)
        except _ChildDied as died:
            self.close()
            raise ReaderDown(
                f"{died} before it had read anything; try: python -I -m shoal.swarm.validator.table_reader_child 1000000000 20"
            ) from None
        if said != READY:
            self.close()
            raise ReaderDown(f"the reading child began with {said!r}, expected {READY!r}")

    def _write(self, fd: int, data: bytes, give_up_s: float) -> None:
        view = memoryview(data)
        while view:
            self._await(fd, select.POLLOUT, give_up_s)
            try:
                view = view[os.write(fd, view[: 1 << 20]) :]
            except BrokenPipeError:
                raise self._death() from None

    def _read(self, fd: int, count: int, give_up_s: float) -> bytes:
        pieces: list[bytes] = []
        while count:
            self._await(fd, select.POLLIN, give_up_s)
            piece = os.read(fd, min(count, 1 << 20))
            if not piece:
                raise self._death()
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def _await(self, fd: int, event: int, give_up_s: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        while time.monotonic() > give_up_s or not poll.poll(200):
            if time.monotonic() > give_up_s:
                self.close()
                raise ReaderDown(
                    f"the reading child did not answer in time (wall clock, {self._wall_s:.0f} s a file)"
                )

    def _death(self) -> _ChildDied:
        assert self._child is not None
        return _ChildDied(self._child.wait())


def _verdict(last: _ChildDied | BadReply) -> Rejected:
    if isinstance(last, BadReply):
        return Rejected("reject.malformed_file", f"reading it gives nonsense: {last}")
    if (
        -last.returncode == signal.SIGKILL
    ):  # the kernel's out-of-memory killer; the child's own limit is caught there
        return Rejected("reject.oversized_table", "reading it needs more memory than a submission may take")
    if -last.returncode == signal.SIGXCPU:
        return Rejected(
            "reject.malformed_file", "reading it needs more processor time than a submission may take"
        )
    return Rejected(
        "reject.malformed_file", f"reading it ends the reading process (status {last.returncode})"
    )
