"""Who is thought to be alive. Fed by the directory, by hellos and goodbyes, and by streams that break."""

from dataclasses import dataclass, field

from shoal.diloco.averaging.peer_messages import Card

SUSPECT_S = 10.0
"""How long a peer that could not be reached is left out, unless it says hello."""

MISSED_S = 60.0
"""Two silences further apart than this have nothing to do with each other."""


@dataclass(slots=True)
class Roster:
    me: str
    _cards: dict[str, Card] = field(default_factory=dict)
    """What peers said of themselves; of those who have said nothing yet, what the directory says."""
    _listed: dict[str, Card] = field(default_factory=dict)
    """What the directory says. It may be of a peer that is gone, so no round rests on it."""
    _suspect_until_s: dict[str, float] = field(default_factory=dict)
    _missed_s: dict[str, float] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)

    def heard(self, card: Card) -> None:
        """From the peer itself: it lives, whatever was thought of it."""
        self._gone.discard(card.peer)
        self._suspect_until_s.pop(card.peer, None)
        self._missed_s.pop(card.peer, None)
        if card.peer != self.me:
            self._cards[card.peer] = card

    def read(self, cards: dict[str, Card], now_s: float) -> None:
        """From the directory, which lags: it adds peers and drops those whose entry ran out, no more."""
        self._listed = cards
        for peer in self._cards.keys() - cards.keys():
            self._cards.pop(peer)
        for peer, card in cards.items():
            if peer != self.me and peer not in self._gone:
                self._cards.setdefault(peer, card)

    def left(self, peer: str) -> None:
        """It said goodbye. Its entry in the directory may outlive it."""
        self._cards.pop(peer, None)
        self._gone.add(peer)

    def suspect(self, peer: str, now_s: float) -> None:
        if peer != self.me:
            self._suspect_until_s[peer] = now_s + SUSPECT_S

    def missed(self, peer: str, now_s: float) -> None:
        """It was silent, which a busy machine is too: suspected only if it was silent the last time as well."""
        before_s = self._missed_s.get(peer)
        self._missed_s[peer] = now_s
        if before_s is not None and now_s - before_s < MISSED_S:
            self.suspect(peer, now_s)

    def reachable(self, peer: str) -> bool:
        """As far as is known; who is not known may be."""
        return peer not in self._cards or self._cards[peer].reachable

    def suspected(self, peer: str, now_s: float) -> bool:
        return self._suspect_until_s.get(peer, now_s) > now_s

    def suspects(self, now_s: float) -> tuple[str, ...]:
        # A copy, here and below: a view asks from another thread.
        return tuple(sorted(peer for peer, until_s in list(self._suspect_until_s.items()) if until_s > now_s))

    def alive(self, now_s: float) -> dict[str, Card]:
        """Everybody else, without suspects."""
        out = set(self.suspects(now_s))
        return {peer: card for peer, card in list(self._cards.items()) if peer not in out}

    def shown(self, now_s: float) -> dict[str, Card]:
        """The same with the newest card of each, for a person: between two rounds peers say nothing to each other."""
        listed = self._listed
        return {
            peer: max(card, listed.get(peer, card), key=Card.age_order)
            for peer, card in self.alive(now_s).items()
        }

    def leader(self, now_s: float, *, me_reachable: bool) -> str | None:
        """The first reachable id: peers with the same roster choose the same one without asking."""
        able = [peer for peer, card in self.alive(now_s).items() if card.reachable]
        return min([*able, self.me] if me_reachable else able, default=None)
