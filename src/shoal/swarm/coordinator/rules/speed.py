"""How fast a node is, as measured: rows a second between receipts. Pure.

A node fetches its next lease while it works on another. So its time on a lease begins with the lease, or with the receipt before,
whichever came later; waiting its turn is not being slow.
"""

MEMORY = 0.7
"""Share of what was known before in what is known now."""
SHORTEST_S = 1e-3


def rows_per_s(
    num_rows: int, *, issued_at_s: float, previous_receipt_s: float | None, received_at_s: float
) -> float:
    began_s = issued_at_s if previous_receipt_s is None else max(issued_at_s, previous_receipt_s)
    return num_rows / max(SHORTEST_S, received_at_s - began_s)


def averaged(before: float, now: float) -> float:
    """Of the times for a row, not of the rates: a node that works on two leases at once delivers one late and the next at once,
    and it is their sum that says how fast it was. `before` is 0 for a node that was never measured."""
    return now if before == 0 else 1 / (MEMORY / before + (1 - MEMORY) / now)
