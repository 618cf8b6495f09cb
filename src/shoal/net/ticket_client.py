"""Tickets that a member of a run shows to private relays: requested from the coordinator and renewed before they expire."""

import threading
import time
from collections.abc import Callable

from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.telemetry import Log
from shoal.wire.record import Sealed
from shoal.wire.ticket import TICKET_S, Ticket, to_header

RENEW_S = TICKET_S / 2
"""A new ticket is requested this long before the old one expires; until then the old one is used."""
PAUSE_S = 5.0
"""Pause after a failed request for a ticket."""


class Tickets:
    """Returns the Authorization header for relays when called. Thread-safe."""

    def __init__(
        self, client: SignedClient, *, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._log, self._clock = client, log, clock
        self._lock = threading.Lock()
        self._header = ""
        self._ask_at_s = float("-inf")

    def __call__(self) -> str:
        """Returns the header, renewed if it is due; "" without a ticket, which is enough for public relays."""
        with self._lock:
            if self._clock() >= self._ask_at_s and not self._client.stop.is_set():
                self._renew()
            return self._header

    def _renew(self) -> None:
        try:
            sealed = self._client.call("POST", "/v1/tickets", None, Sealed[Ticket])
        except (Unreachable, Refused) as reason:
            self._log.warning(f"cannot renew the ticket for relays, will retry: {reason}")
            self._ask_at_s = self._clock() + PAUSE_S
            return
        self._header, self._ask_at_s = to_header(sealed), self._clock() + TICKET_S - RENEW_S
