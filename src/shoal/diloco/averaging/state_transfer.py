"""States from peer to peer: a head, then every vector in frames; taken only if the whole fits the digest."""

from collections.abc import Iterator

import numpy as np

from shoal.diloco.averaging.averager import Fetched, RoundFailed
from shoal.diloco.averaging.peer_messages import StateHead
from shoal.diloco.outer import OuterState, Vector
from shoal.diloco.transport.mesh import Stream

SLICE = 1 << 20
"""Values per frame."""


async def send_state(stream: Stream, head: StateHead, state: OuterState) -> None:
    await stream.send(head.canonical())
    for vector in (*state.bases, *state.momenta):
        for piece in _slices(vector):
            await stream.send(piece.astype("<f4", copy=False).tobytes())


async def receive_state(stream: Stream, lengths: tuple[int, ...] | None) -> Fetched:
    """`lengths`: what this peer's model has per fragment, if it knows; another model is refused before it is read."""
    payload = await stream.receive()
    head = StateHead.parse(bytes(payload))
    if head.standing is None:
        raise RoundFailed("that peer holds no state yet")
    if lengths is not None and head.lengths != lengths:
        raise RoundFailed(
            f"that peer trains another model: fragments of {head.lengths} values, here {lengths}; "
            "use the same model file and the same fragments on every site"
        )
    vectors = [await _receive_vector(stream, length) for length in (*head.lengths, *head.lengths)]
    num = len(head.lengths)
    state = OuterState(
        round=head.standing.round,
        work=head.standing.work,
        bases=tuple(vectors[:num]),
        momenta=tuple(vectors[num:]),
    )
    if state.digest() != head.standing.state_digest:
        raise RoundFailed("a state that does not fit its digest")
    return Fetched(state=state, phase=head.phase, step=head.step)


async def _receive_vector(stream: Stream, length: int) -> Vector:
    vector = np.empty(length, np.float32)
    for piece in _slices(vector):
        payload = await stream.receive()
        if len(payload) != 4 * len(piece):
            raise RoundFailed(f"a frame of {len(payload)} bytes where a state has {4 * len(piece)}")
        piece[:] = np.frombuffer(payload, "<f4")
    return vector


def _slices(vector: Vector) -> Iterator[Vector]:
    for at in range(0, len(vector), SLICE):
        yield vector[at : at + SLICE]
