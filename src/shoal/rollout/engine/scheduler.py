"""How much room the running rows take, and how many fit into memory. Plain Python."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shoal.model.shape import Shape
from shoal.rollout.engine.api import Request
from shoal.rollout.engine.rows import Prompt

CONTEXT_STEP = 128
"""Slots are this much longer or shorter, so that prompts a little longer next time change nothing."""


class Room(NamedTuple):
    rows: int
    context: int
    """Positions of each row: its new tokens."""
    new_tokens: int
    prompts: int
    """Prompts, kept once for all rows that start from them."""
    prompt_context: int

    def union(self, other: "Room") -> "Room":
        return Room(*(max(pair) for pair in zip(self, other, strict=True)))


def room_for(requests: Iterable[Request], num_rows: int, *, shelf_prompts: int) -> Room:
    """Enough for `num_rows` of these rows at once, whichever they are.

    `shelf_prompts`: prompts computed at most before rows start from them.
    """
    longest_prompt, new_tokens = 1, 1
    prompts: set[Prompt] = set()
    for request in requests:
        longest_prompt = max(longest_prompt, len(request.prompt_tokens))
        new_tokens = max(new_tokens, request.max_new_tokens)
        prompts.add(request.prompt_tokens)
    kept = min(len(prompts), num_rows) + min(len(prompts), shelf_prompts)
    return Room(num_rows, _rounded(new_tokens), new_tokens, kept, _rounded(longest_prompt))


def fit(shape: Shape, room: Room, *, value_bytes: int, budget_bytes: int) -> Room:
    """The same room with as many slots as the budget allows; ValueError if not one fits."""
    position = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * value_bytes
    new_token = 2 * shape.hidden_size + 8 + 8 + 4  # its state, uniform, id and log-prob
    one = position * room.context + new_token * room.new_tokens
    left = budget_bytes - position * room.prompt_context * room.prompts
    rows = min(room.rows, left // one)
    if rows < 1:
        raise ValueError(
            f"one row of {room.context} positions needs {one / 1e9:.2f} GB, {left / 1e9:.2f} GB are free; "
            "lower max_new_tokens or free memory"
        )
    return room._replace(rows=rows)


def _rounded(context: int) -> int:
    return -(-context // CONTEXT_STEP) * CONTEXT_STEP


def free_memory_bytes() -> int:
    """What the operating system could still hand out; without /proc (not Linux) a careful guess."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30
