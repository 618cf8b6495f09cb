"""The ticket that a member shows to relays: asked for from the coordinator, and again before it ends."""

import threading
import time
from collections.abc import Callable

from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.telemetry import Log
from shoal.wire.record import Sealed
from shoal.wire.ticket import TICKET_S, Ticket, to_header

RENEW_S = TICKET_S / 2
"""Before its end a new one is asked for; the old one does meanwhile."""
PAUSE_S = 5.0
"""After an answer that was no ticket."""


class Tickets:
    """Call it for the Authorization header to show now. From any thread."""

    def __init__(
        self, client: SignedClient, *, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._log, self._clock = client, log, clock
        self._lock = threading.Lock()
        self._header = ""
        self._ask_at_s = float("-inf")

    def __call__(self) -> str:
        """Empty where there is none: relays that are open to all serve without."""
        with self._lock:
            if self._clock() >= self._ask_at_s and not self._client.stop.is_set():
                self._renew()
            return self._header

    def _renew(self) -> None:
        try:
            sealed = self._client.call("POST", "/v1/tickets", None, Sealed[Ticket])
        except (Unreachable, Refused) as reason:
            self._log.warning(f"no new ticket for relays, will ask again: {reason}")
            self._ask_at_s = self._clock() + PAUSE_S
            return
        self._header, self._ask_at_s = to_header(sealed), self._clock() + TICKET_S - RENEW_S
