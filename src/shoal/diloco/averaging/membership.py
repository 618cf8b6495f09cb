"""Finds the peers of a run: who is believed to be alive, who may take part, and how one peer is asked a question."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.diloco.averaging.averager import AveragerSettings, RoundFailed
from shoal.diloco.averaging.peer_messages import Bye, Card, Hello, PeerRequest
from shoal.diloco.transport.mesh import Mesh
from shoal.diloco.transport.stream import StreamBroken
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.record import Record

R = TypeVar("R", bound=Record)
Ping = Callable[[str], Awaitable[bool]]
"""Returns whether a peer counts as alive."""

SUSPECT_S = 10.0
"""Seconds for which an unreachable peer is left out of rounds, unless it says hello before."""

REFUSED_S = 3600.0
"""Seconds for which a peer that sent bad values is left out of averages. It fetches their results meanwhile."""

HELLO_S = 5.0
"""Timeout of a hello."""

DIRECTORY_S = 30.0
"""Timeout of one directory update."""

TIMEOUT_MEMORY_S = 60.0
"""Two timeouts further apart than this are not counted together."""


class PeerTimeout(RoundFailed):
    """No reply in time. The peer may have died, or may be alive on an overloaded machine."""


async def ask_peer(mesh: Mesh, peer: str, request: Record, reply: type[R], deadline_s: float) -> R:
    """Sends one request and returns the reply.

    Raises PeerTimeout after `deadline_s`, and RoundFailed at once if the peer cannot be reached or disconnects.
    """
    try:
        async with asyncio.timeout(deadline_s):
            with contextlib.closing(await mesh.open(peer)) as stream:
                await stream.send(PeerRequest.model_validate({"ask": request}).canonical())
                return reply.parse(bytes(await stream.receive()))
    except TimeoutError:
        raise PeerTimeout(f"no reply from {peer} within {deadline_s:.0f} s") from None
    except (StreamBroken, Rejected) as error:
        raise RoundFailed(f"request to {peer} failed: {error}") from None


@dataclass(slots=True)
class Membership:
    """The known peers of a run, updated by the directory, by hellos and goodbyes, and by broken streams."""

    own_id: str
    _cards: dict[str, Card] = field(default_factory=dict)
    """Each peer's own last card; the directory's card for peers that have not answered yet."""
    _listed: dict[str, Card] = field(default_factory=dict)
    """The directory's cards. A listed peer may be gone, so rounds do not depend on these."""
    _suspect_until_s: dict[str, float] = field(default_factory=dict)
    _timed_out_s: dict[str, float] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)
    _refused_until_s: dict[str, float] = field(default_factory=dict)
    _lied_until_s: dict[str, float] = field(default_factory=dict)
    _failed_fetches: dict[str, tuple[int, float]] = field(default_factory=dict)
    """How often a peer's state could not be fetched in a row, and when last."""

    def record_card(self, card: Card) -> None:
        """Records a card that came from the peer itself, which proves that it is alive."""
        self._gone.discard(card.peer)
        self._suspect_until_s.pop(card.peer, None)
        self._timed_out_s.pop(card.peer, None)
        if card.peer != self.own_id:
            self._cards[card.peer] = card

    def update_from_directory(self, cards: dict[str, Card]) -> None:
        """Adds peers from the directory and drops those whose entry expired. It lags, so it overwrites no card.

        The directory does not authenticate its entries: the state that one claims counts only when the peer says so itself.
        """
        self._listed = cards
        for peer in self._cards.keys() - cards.keys():
            self._cards.pop(peer)
        for peer, card in cards.items():
            if peer != self.own_id and peer not in self._gone:
                self._cards.setdefault(peer, card.model_copy(update={"standing": None}))

    def remove(self, peer: str) -> None:
        """Removes a peer that said goodbye. Its entry in the directory may stay longer."""
        self._cards.pop(peer, None)
        self._gone.add(peer)

    def suspect(self, peer: str, now_s: float) -> None:
        """Leaves a peer out of rounds for SUSPECT_S."""
        if peer != self.own_id:
            self._suspect_until_s[peer] = now_s + SUSPECT_S

    def suspect_lie(self, peer: str, now_s: float) -> None:
        """Leaves a peer that sent a false reply out of rounds for SUSPECT_S, even if it says hello."""
        if peer != self.own_id:
            self._lied_until_s[peer] = now_s + SUSPECT_S

    def record_fetch(self, peer: str, now_s: float, *, failed: bool) -> None:
        """Records whether a peer's state could be fetched."""
        if failed:
            self._failed_fetches[peer] = self._failed_fetches.get(peer, (0, now_s))[0] + 1, now_s
        else:
            self._failed_fetches.pop(peer, None)

    def withholds_state(self, peer: str, now_s: float) -> bool:
        """Returns whether two fetches of a peer's state failed, the last within REFUSED_S.

        The state that such a peer claims does not count: otherwise all would wait for it in every round. A single failure
        may only mean that its machine is busy.
        """
        num, last_s = self._failed_fetches.get(peer, (0, now_s))
        return num > 1 and now_s - last_s < REFUSED_S

    def highest_round(self, now_s: float, *, leader: str) -> int:
        """Returns the highest round that live peers claim; 0 without any. The claim of a leader that withholds its state is ignored."""
        claims = [
            card.standing.round
            for peer, card in self.alive(now_s).items()
            if card.standing is not None and not (peer == leader and self.withholds_state(peer, now_s))
        ]
        return max(claims, default=0)

    def refuse(self, peer: str, now_s: float) -> None:
        """Leaves a peer that sent bad values out of averages for REFUSED_S; also this peer itself, if its own are bad."""
        self._refused_until_s[peer] = now_s + REFUSED_S

    def refused(self, now_s: float) -> tuple[str, ...]:
        """Returns the ids of the peers that are left out of averages, sorted."""
        return tuple(sorted(peer for peer, until_s in self._refused_until_s.items() if until_s > now_s))

    def record_timeout(self, peer: str, now_s: float) -> None:
        """Suspects a peer after its second timeout in a row; one may only mean that its machine is busy."""
        before_s = self._timed_out_s.get(peer)
        self._timed_out_s[peer] = now_s
        if before_s is not None and now_s - before_s < TIMEOUT_MEMORY_S:
            self.suspect(peer, now_s)

    def reachable(self, peer: str) -> bool:
        """Returns whether streams can be opened to a peer. Unknown peers count as reachable."""
        return peer not in self._cards or self._cards[peer].reachable

    def suspected(self, peer: str, now_s: float) -> bool:
        """Returns whether a peer is left out of rounds at the moment."""
        return max(self._suspect_until_s.get(peer, now_s), self._lied_until_s.get(peer, now_s)) > now_s

    def suspects(self, now_s: float) -> tuple[str, ...]:
        """Returns the ids of all suspected peers, sorted."""
        # Copied, here and in `alive`: the live view reads from another thread while the event loop writes.
        known = {*list(self._suspect_until_s), *list(self._lied_until_s)}
        return tuple(sorted(peer for peer in known if self.suspected(peer, now_s)))

    def alive(self, now_s: float) -> dict[str, Card]:
        """Returns the cards of all other peers that are not suspected."""
        out = set(self.suspects(now_s))
        return {peer: card for peer, card in list(self._cards.items()) if peer not in out}

    def latest_cards(self, now_s: float) -> dict[str, Card]:
        """Returns `alive` with the newest known card of each peer, for display.

        Between two rounds peers exchange no messages, so the directory's card may be newer than the peer's own.
        """
        listed = self._listed
        return {
            peer: max(card, listed.get(peer, card), key=Card.age_order)
            for peer, card in self.alive(now_s).items()
        }

    def leader(self, now_s: float, *, self_reachable: bool) -> str | None:
        """Returns the first reachable id. Peers with the same membership choose the same leader without asking."""
        able = [peer for peer, card in self.alive(now_s).items() if card.reachable]
        return min([*able, self.own_id] if self_reachable else able, default=None)


class Discovery:
    """Finds the other peers: announces this peer in the mesh's directory, reads its entries, and says hello.

    Runs on the peer's event loop. `card` returns the present card of this peer.
    """

    def __init__(self, mesh: Mesh, card: Callable[[], Card], settings: AveragerSettings, log: Log) -> None:
        self._mesh, self.card, self._settings, self._log = mesh, card, settings, log
        self.membership = Membership(mesh.peer)

    async def announce_loop(self) -> None:
        """Updates the directory every `announce_s`, until it is cancelled."""
        while True:
            await asyncio.sleep(self._settings.announce_s)
            try:
                async with asyncio.timeout(DIRECTORY_S):
                    await self.update_directory()
            except (StreamBroken, TimeoutError) as error:
                reason = str(error) or f"no answer within {DIRECTORY_S:.0f} s"
                self._log.warning("directory update failed", reason=reason)

    async def update_directory(self) -> None:
        """Announces this peer's card and reads those of the others."""
        await self._mesh.announce(self.card().canonical(), for_s=4 * self._settings.announce_s)
        cards: dict[str, Card] = {}
        for peer, payload in (await self._mesh.cards()).items():
            with contextlib.suppress(Rejected):
                card = Card.parse(bytes(payload))
                if card.peer == peer and self.admits(peer):
                    cards[peer] = card
        self.membership.update_from_directory(cards)

    def admits(self, peer: str) -> bool:
        """Returns whether a peer may take part in this run."""
        return self._settings.admit is None or peer in self._settings.admit

    async def greet_all(self) -> list[Card]:
        """Says hello to every live peer: they learn of this one before the directory tells them. Returns their cards."""
        cards = await asyncio.gather(*(self.hello(peer) for peer in self._live_peers()))
        return [card for card in cards if card is not None]

    async def greet_as_newcomer(self) -> list[Card]:
        """Returns the cards of the peers with the same shared settings; the others are refused.

        Raises ValueError if at least half of the peers have other settings. Fewer may be liars that keep newcomers away.
        """
        cards = await self.greet_all()
        other = [card for card in cards if self.differs(card)]
        if other and 2 * len(other) >= len(cards):
            raise ValueError(
                f"peer {other[0].peer} has {other[0].shared}, this one {self._settings.shared}: they could never "
                "commit a round; give every site the same file"
            )
        for card in other:
            self._log.warning("peer refused: it has other settings", peer=card.peer, settings=card.shared)
            self.membership.refuse(card.peer, time.monotonic())
        return [card for card in cards if card not in other]

    def differs(self, card: Card) -> bool:
        """Returns whether a peer says that it has other shared settings."""
        return bool(card.shared and self._settings.shared) and card.shared != self._settings.shared

    async def hello(self, peer: str) -> Card | None:
        """Asks a peer for its card and records whether it answers. None: it did not, or it may not be asked."""
        if not self.membership.reachable(peer) or not self.admits(peer):
            return None  # an outbound-only peer cannot be called, which does not mean that it is gone
        try:
            card = await ask_peer(self._mesh, peer, Hello(card=self.card()), Card, HELLO_S)
            if card.peer != peer:
                # Recorded, it would replace what the named peer says of itself, or add a peer that does not exist.
                raise RoundFailed(f"{peer} replied with the card of {card.peer}")
        except PeerTimeout:
            self.membership.record_timeout(peer, time.monotonic())
            return None
        except RoundFailed:
            self.membership.suspect(peer, time.monotonic())
            return None
        self.membership.record_card(card)
        return card

    async def ping(self, peer: str) -> bool:
        """Returns whether a peer counts as alive. After a single timeout it still does: it may be busy."""
        return await self.hello(peer) is not None or not self.membership.suspected(peer, time.monotonic())

    async def say_goodbye(self) -> None:
        """Tells the live peers that this one leaves, for at most 2 s."""
        bye = Bye(peer=self._mesh.peer)
        byes = (ask_peer(self._mesh, peer, bye, Card, 2.0) for peer in self._live_peers())
        await asyncio.gather(*byes, return_exceptions=True)

    def _live_peers(self) -> list[str]:
        return list(self.membership.alive(time.monotonic()))
