"""Outer states from peer to peer: a header, then every vector in frames; accepted only if the digest matches."""

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


class ServedState:
    """The outer state that this peer offers to others, and the card that describes it.

    The training thread writes with single assignments; the peer's event loop reads.
    """

    def __init__(self, shared: str = "") -> None:
        self._shared = shared
        self._held: tuple[OuterState, StateVersion] | None = None
        self.step = self.phase = 0
        self.in_round = False

    @property
    def version(self) -> StateVersion | None:
        """Identifies the state; None until there is one."""
        return None if self._held is None else self._held[1]

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Values per fragment; None until there is a state."""
        return None if self._held is None else tuple(len(base) for base in self._held[0].bases)

    def replace(self, state: OuterState, version: StateVersion) -> None:
        """Offers `state` from now on."""
        self._held = state, version

    def card(self, peer: str, *, reachable: bool) -> Card:
        """Returns the card of this peer as of now."""
        return Card(
            peer=peer,
            reachable=reachable,
            standing=self.version,
            phase=self.phase,
            in_round=self.in_round,
            shared=self._shared,
        )

    async def send(self, stream: Stream) -> None:
        """Sends the state to a peer that asked for it."""
        await send_state(stream, self._held, phase=self.phase, step=self.step)


async def send_state(
    stream: Stream, held: tuple[OuterState, StateVersion] | None, *, phase: int, step: int
) -> None:
    """Sends a header and the state's vectors; without a state, a header that says so."""
    if held is None:
        await stream.send(StateHeader(standing=None).canonical())
        return
    state, version = held
    lengths = tuple(len(base) for base in state.bases)
    await stream.send(StateHeader(standing=version, lengths=lengths, phase=phase, step=step).canonical())
    for vector in (*state.bases, *state.momenta):
        for piece in _slices(vector):
            await stream.send(piece.astype("<f4", copy=False).tobytes())


async def receive_state(stream: Stream, lengths: tuple[int, ...] | None) -> FetchedState:
    """Receives and verifies a state. Raises RoundFailed.

    `lengths`: values per fragment of this peer's model, if known; another model is refused before it is downloaded.
    """
    payload = await stream.receive()
    head = StateHeader.parse(bytes(payload))
    if head.standing is None:
        raise RoundFailed("the peer holds no state yet")
    if lengths is not None and head.lengths != lengths:
        raise RoundFailed(
            f"the peer trains another model: fragments of {head.lengths} values, here {lengths}; "
            "use the same model file and the same number of fragments on every site"
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
        raise RoundFailed("the received state does not match its digest")
    if not all(is_finite(values_N) for values_N in vectors):
        raise RoundFailed("the received state is not finite")
    return FetchedState(state=state, phase=head.phase, step=head.step)


def newest_cards(cards: Iterable[Card], own: StateVersion | None, *, at_least: int) -> list[Card]:
    """Returns the cards with the newest state, if it is newer than `own` and has reached round `at_least`.

    The order is random, so that several new peers do not all download from the same one.
    """
    newer = [
        (card.standing.order(), card)
        for card in cards
        if card.standing is not None
        and card.reachable
        and card.standing.round >= at_least
        and (own is None or card.standing.order() > own.order())
    ]
    newest = max((order for order, _ in newer), default=None)
    holders = [card for order, card in newer if order == newest]
    random.shuffle(holders)
    return holders


async def fetch_state(mesh: Mesh, peer: str, lengths: tuple[int, ...] | None) -> FetchedState:
    """Downloads and verifies the state that `peer` holds. Raises RoundFailed."""
    stream: Stream | None = None
    try:
        stream = await mesh.open(peer, bulk=True)
        await stream.send(PeerRequest(ask=StateRequest(peer=mesh.peer)).canonical())
        return await receive_state(stream, lengths)
    except (StreamBroken, Rejected) as error:
        mesh.mark_broken(peer)
        raise RoundFailed(f"state transfer broke off: {error}") from None
    finally:
        if stream is not None:
            stream.close()


async def _receive_vector(stream: Stream, length: int) -> Vector:
    vector = np.empty(length, np.float32)
    for piece in _slices(vector):
        payload = await stream.receive()
        if len(payload) != 4 * len(piece):
            raise RoundFailed(f"expected a frame of {4 * len(piece)} bytes of state, got {len(payload)}")
        piece[:] = np.frombuffer(payload, "<f4")
    return vector


def _slices(vector: Vector) -> Iterator[Vector]:
    for at in range(0, len(vector), VALUES_PER_FRAME):
        yield vector[at : at + VALUES_PER_FRAME]
