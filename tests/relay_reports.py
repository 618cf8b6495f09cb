"""Reports of relays, with the delegation that the coordinator asks for."""

import time
from collections.abc import Iterable

from shoal.wire.delegation import delegate_relay
from shoal.wire.keys import Key
from shoal.wire.messages import RelayReport


def delegated_report(
    operator: Key,
    url: str,
    versions: Iterable[int],
    *,
    relay: str | None = None,
    bytes_sent: int = 0,
    now_s: float | None = None,
) -> RelayReport:
    """Returns the report of the key `relay`, by default the operator's own, for a URL that is delegated to it.

    The delegation began a minute ago: a newer one for the same URL would end it.
    """
    began_s = (time.time() if now_s is None else now_s) - 60
    delegation = delegate_relay(operator, relay or operator.public, url, now_s=began_s)
    return RelayReport(url=url, versions=tuple(versions), bytes_sent=bytes_sent, delegation=delegation)
