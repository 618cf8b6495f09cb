"""Outer states from peer to peer: a header, then every vector in frames; accepted only if the digest matches."""

import asyncio
import contextlib
import random
from collections.abc import Iterable, Iterator

import numpy as np

from shoal.diloco.averaging.averager import FetchedState, RoundFailed
from shoal.diloco.averaging.peer_messages import Card, PeerRequest, StateHeader, StateRequest, StateVersion
from shoal.diloco.outer import OuterState, Vector, is_finite
from shoal.diloco.transport.mesh import Mesh
from shoal.diloco.transport.stream import Stream, StreamBroken
from shoal.wire.codes import Rejected

VALUES_PER_FRAME = 1 << 20
FRAME_STALLS = 4
"""A frame of a state may take this many times as long as a chunk of an exchange: it has four times its bytes."""


class OtherModel(RoundFailed):
    """The peer's state has fragments of other lengths than this peer's model."""


class ServedState:
    """The outer state that this peer offers to others, and the card that describes it.

    Fields change by single assignments: the training thread may write while the peer's event loop reads.
    """

    def __init__(self, shared: str = "") -> None:
        self._shared = shared
        self._held: tuple[OuterState, StateVersion] | None = None
        self._phase_and_step = (0, 0)
        self.in_round = False

    @property
    def version(self) -> StateVersion | None:
        """Identifies the state; None until there is one."""
        return None if self._held is None else self._held[1]

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Values per fragment; None until there is a state."""
        return None if self._held is None else tuple(len(base) for base in self._held[0].bases)

    def replace(self, state: OuterState, version: StateVersion, *, phase: int, step: int) -> None:
        """Offers `state` from now on, with the progress of the same moment: newcomers count from it."""
        self._held = state, version
        self.set_progress(phase=phase, step=step)

    def set_progress(self, *, phase: int, step: int) -> None:
        """Records the inner steps since the last round and in all."""
        self._phase_and_step = phase, step

    def card(self, peer: str, *, reachable: bool) -> Card:
        """Returns the card of this peer as of now."""
        return Card(
            peer=peer,
            reachable=reachable,
            standing=self.version,
            phase=self._phase_and_step[0],
            in_round=self.in_round,
            shared=self._shared,
        )

    async def send(self, stream: Stream) -> None:
        """Sends a peer that asked for the state a header and the state's vectors; without a state, a header that says so."""
        if self._held is None:
            await stream.send(StateHeader(standing=None).canonical())
            return
        state, version = self._held
        phase, step = self._phase_and_step
        lengths = tuple(len(base) for base in state.bases)
        header = StateHeader(standing=version, lengths=lengths, phase=phase, step=step)
        await stream.send(header.canonical())
        for vector in (*state.bases, *state.momenta):
            for piece in _slices(vector):
                await stream.send(piece.astype("<f4", copy=False).tobytes())


async def receive_state(
    stream: Stream, lengths: tuple[int, ...] | None, stall_s: float | None = None
) -> FetchedState:
    """Receives and verifies a state. Raises RoundFailed.

    `lengths`: values per fragment of this peer's model, if known; another model is refused before it is downloaded.
    `stall_s`: seconds within which the header must arrive; None has no limit.
    """
    payload = await _receive_frame(stream, stall_s)
    head = StateHeader.parse(bytes(payload))
    if head.standing is None:
        raise RoundFailed("the peer holds no state yet")
    if lengths is not None and head.lengths != lengths:
        raise OtherModel(
            f"the peer trains another model: fragments of {head.lengths} values, here {lengths}; "
            "use the same model file and the same number of fragments on every site"
        )
    frame_s = None if stall_s is None else FRAME_STALLS * stall_s
    vectors = [await _receive_vector(stream, length, frame_s) for length in (*head.lengths, *head.lengths)]
    num = len(head.lengths)
    state = OuterState(
        round=head.standing.round,
        work=head.standing.work,
        bases=tuple(vectors[:num]),
        momenta=tuple(vectors[num:]),
    )
    if state.digest() != head.standing.state_digest:
        raise RoundFailed("the received state does not match its digest")
    if not all(is_finite(values_N) for values_N in vectors):
        raise RoundFailed("the received state is not finite")
    return FetchedState(state=state, phase=head.phase, step=head.step)


def newest_cards(cards: Iterable[Card], own: StateVersion | None, *, at_least: int) -> list[Card]:
    """Returns the cards with a state that is newer than `own` and has reached round `at_least`, the newest first.

    The order of equal states is random, so that several new peers do not all download from the same one.
    """
    newer = [
        (card.standing.order(), card)
        for card in cards
        if card.standing is not None
        and card.reachable
        and card.standing.round >= at_least
        and (own is None or card.standing.order() > own.order())
    ]
    random.shuffle(newer)
    return [card for _, card in sorted(newer, key=lambda each: each[0], reverse=True)]


async def fetch_state(
    mesh: Mesh, card: Card, lengths: tuple[int, ...] | None, *, stall_s: float
) -> FetchedState:
    """Downloads and verifies the state that the card's peer holds. Raises RoundFailed."""
    peer = card.peer
    try:
        with contextlib.closing(await mesh.open(peer, bulk=True)) as stream:
            await stream.send(PeerRequest(ask=StateRequest(peer=mesh.peer)).canonical())
            fetched = await receive_state(stream, lengths, stall_s)
    except (StreamBroken, Rejected) as error:
        mesh.mark_broken(peer)
        raise RoundFailed(f"state transfer broke off: {error}") from None
    said = card.standing
    if said is not None and (fetched.state.work, fetched.state.round) < (said.work, said.round):
        # Adopting it would take this peer back to a state that the swarm has left.
        raise RoundFailed(
            f"the received state of round {fetched.state.round} is older than the peer's card says"
        )
    return fetched


async def _receive_frame(stream: Stream, within_s: float | None) -> bytes | bytearray:
    try:
        async with asyncio.timeout(within_s):
            return await stream.receive()
    except TimeoutError:
        raise RoundFailed(f"the peer sent nothing of its state for {within_s:.0f} s") from None


async def _receive_vector(stream: Stream, length: int, within_s: float | None) -> Vector:
    try:
        vector = np.empty(length, np.float32)
    except (MemoryError, ValueError) as error:
        raise RoundFailed(f"a fragment of {length} values does not fit into memory: {error}") from None
    for piece in _slices(vector):
        payload = await _receive_frame(stream, within_s)
        if len(payload) != 4 * len(piece):
            raise RoundFailed(f"expected a frame of {4 * len(piece)} bytes of state, got {len(payload)}")
        piece[:] = np.frombuffer(payload, "<f4")
    return vector


def _slices(vector: Vector) -> Iterator[Vector]:
    for at in range(0, len(vector), VALUES_PER_FRAME):
        yield vector[at : at + VALUES_PER_FRAME]
