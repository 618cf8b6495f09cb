"""Searches a reply for a regular expression in a child process, since a pattern can need exponential time for some texts.

request  {"pattern": ..., "text": ...}   reply  {"found": the last match's first group, or the whole match; null without one}
"""

import json
import re
import threading

from shoal.child_process import ChildDied, ChildError, ChildLimits, ChildProcess, serve
from shoal.tasks.task import CannotGrade

MAX_CHARS = 20_000
"""Only this many characters at the end of a reply are searched."""
LIMITS = ChildLimits(memory_bytes=200_000_000, cpu_s=1)
WALL_S = 60.0
"""Seconds of wall-clock time for one reply. Much longer than the processor time, since the machine may be busy."""

_THREAD = threading.local()


def find_last(pattern: str, reply: str) -> str | None:
    """Returns the first group of the last match, or the match if the pattern has no group. None without a match.

    A reply that needs more processor time than LIMITS allows has no match. Raises CannotGrade if the child does not work.
    """
    if not hasattr(_THREAD, "child"):
        # One for each thread: the threads of the grading pool must not wait for each other.
        _THREAD.child = ChildProcess("shoal.tasks.grading.pattern_grader:serve_pattern", limits=LIMITS)
    request = json.dumps({"pattern": pattern, "text": reply[-MAX_CHARS:]}).encode()
    try:
        found: str | None = json.loads(_THREAD.child.exchange(request, timeout_s=WALL_S))["found"]
    except ChildDied:
        return None
    except ChildError as error:
        raise CannotGrade(str(error)) from None
    return found


def serve_pattern(limits: ChildLimits) -> None:
    """Runs in the child: answers requests."""

    def answer(frame: bytes) -> bytes:
        request = json.loads(frame)
        found = None
        for match in re.finditer(request["pattern"], request["text"]):
            found = match[1] if match.re.groups else match[0]
        return json.dumps({"found": found}).encode()

    serve(answer, limits)
