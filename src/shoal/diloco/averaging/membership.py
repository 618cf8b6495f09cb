"""What a peer holds and shows: its outer state, for others to fetch, and the card that says which it is."""

from shoal.diloco.averaging.peer_messages import Card, Standing, StateHead
from shoal.diloco.averaging.state_transfer import send_state
from shoal.diloco.outer import OuterState
from shoal.diloco.transport.mesh import Stream


class Holding:
    """Written by the training thread in single assignments, read on the peer's event loop."""

    def __init__(self, shared: str = "") -> None:
        self._shared = shared
        self._held: tuple[OuterState, Standing] | None = None
        self.step = self.phase = 0
        self.in_round = False

    @property
    def standing(self) -> Standing | None:
        return None if self._held is None else self._held[1]

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Values per fragment, once there is a model."""
        return None if self._held is None else tuple(len(base) for base in self._held[0].bases)

    def show(self, state: OuterState, standing: Standing) -> None:
        self._held = state, standing

    def card(self, peer: str, *, reachable: bool) -> Card:
        return Card(
            peer=peer,
            reachable=reachable,
            standing=self.standing,
            phase=self.phase,
            in_round=self.in_round,
            shared=self._shared,
        )

    async def send(self, stream: Stream) -> None:
        """The state, to whoever asked for it."""
        if self._held is None:
            await stream.send(StateHead(standing=None).canonical())
            return
        state, standing = self._held
        head = StateHead(
            standing=standing,
            lengths=tuple(len(base) for base in state.bases),
            phase=self.phase,
            step=self.step,
        )
        await send_state(stream, head, state)
