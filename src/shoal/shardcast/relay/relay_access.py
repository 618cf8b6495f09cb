"""The gate of a relay that serves members of the run only: it lets in whoever shows a ticket (wire/ticket.py).

Nobody is asked about it: the run key is enough. A ticket comes with every shard, so those that were good are remembered.
"""

import time
from collections.abc import Callable, Mapping

from shoal.wire.ticket import CLOCK_SKEW_S, check_ticket

MAX_REMEMBERED = 4096


class Gate:
    def __init__(self, *, run: str, run_key: str, clock: Callable[[], float] = time.time) -> None:
        self._run, self._run_key, self._clock = run, run_key, clock
        self._good_until_s: dict[str, float] = {}

    def check(self, headers: Mapping[str, str]) -> None:
        """Rejected, unless the Authorization header among them (names in lower case) shows a good ticket."""
        header, now_s = headers.get("authorization", ""), self._clock()
        if self._good_until_s.get(header, 0.0) >= now_s:
            return
        ticket = check_ticket(header, run=self._run, run_key=self._run_key, now_s=now_s)
        if len(self._good_until_s) >= MAX_REMEMBERED:
            self._good_until_s = {
                one: until_s for one, until_s in self._good_until_s.items() if until_s >= now_s
            }
        if len(self._good_until_s) < MAX_REMEMBERED:
            self._good_until_s[header] = ticket.expires_at_s + CLOCK_SKEW_S
