"""Runs a function in a forked process, for tests that kill it."""

import os
import traceback
from collections.abc import Callable


def in_child(action: Callable[[], None]) -> int:
    """Forks a process that runs `action`; returns its exit status, or the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001 - this process ends here, whatever it is
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
