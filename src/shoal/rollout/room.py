"""How much room the running rows take, and how many fit into memory. Plain Python."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shoal.model.shape import Shape
from shoal.rollout.engine import Request

CONTEXT_STEP = 128
"""Slots are this much longer or shorter, so that prompts a little longer next time change nothing."""


class Room(NamedTuple):
    """Slots, positions of each, and new tokens of each."""

    rows: int
    context: int
    new_tokens: int

    def union(self, other: "Room") -> "Room":
        return Room(*(max(pair) for pair in zip(self, other, strict=True)))


def room_for(requests: Iterable[Request], num_rows: int) -> Room:
    """Enough for `num_rows` of these rows at once, whichever they are."""
    longest, new_tokens = 1, 1
    for request in requests:
        longest = max(longest, len(request.prompt_tokens) + request.max_new_tokens - 1)
        new_tokens = max(new_tokens, request.max_new_tokens)
    return Room(num_rows, -(-longest // CONTEXT_STEP) * CONTEXT_STEP, new_tokens)


def row_bytes(shape: Shape, room: Room, *, value_bytes: int) -> int:
    """Bytes of one slot: keys and values, and for each new token its state, uniform, id and log-prob."""
    cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * value_bytes * room.context
    return cache + room.new_tokens * (2 * shape.hidden_size + 8 + 8 + 4)


def fit(shape: Shape, room: Room, *, value_bytes: int, budget_bytes: int) -> Room:
    """The same room with as many slots as the budget allows; ValueError if not one fits."""
    one = row_bytes(shape, room, value_bytes=value_bytes)
    rows = min(room.rows, budget_bytes // one)
    if rows < 1:
        raise ValueError(
            f"one row of {room.context} positions needs {one / 1e9:.2f} GB, {budget_bytes / 1e9:.2f} GB are free; "
            "lower max_new_tokens or free memory"
        )
    return room._replace(rows=rows)


def free_memory_bytes() -> int:
    """What the operating system could still hand out; without /proc (not Linux) a careful guess."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30
