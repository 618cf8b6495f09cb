"""A writer's turn: the requests that are committed together, and what they share.

Nobody else writes meanwhile, so what one of them has read is still true for the next, until one of them changes it. And each
stands or falls alone: a request that is refused after it has written is undone. Savepoints would do that, two statements for each
request, while hardly any is refused so late: so they are done without, and a turn in which that happens is done again from its
beginning, carefully (desk.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection

from shoal.swarm.coordinator.statements import WRITTEN, tell_driver
from shoal.wire.codes import Rejected

T = TypeVar("T")
_MISSING = object()


class Spoiled(Exception):
    """A request of the turn has to be undone, and there is no savepoint: nothing of the turn may be committed."""


class Turn:
    def __init__(self, db: Connection, *, careful: bool) -> None:
        self.db = db
        self.afterwards: list[Callable[[], None]] = []
        """What to do once all of it is on disk."""
        self.at_end: list[Callable[[], None]] = []
        """What is left to write, just before the commit."""
        self.shared: dict[Any, Any] = {}
        """What lasts as long as the turn."""
        self._careful = careful
        self._known: dict[Any, Any] = {}
        self._wrote = False
        self._info = db.info
        self._info[WRITTEN] = self._note_write

    def end(self) -> None:
        for act in self.at_end:
            act()

    def close(self) -> None:
        """The connection goes back to where others take it from."""
        self._info.pop(WRITTEN, None)

    @contextmanager
    def one(self) -> Iterator[None]:
        """What the block did is undone if it raises."""
        if self._careful:
            with self._savepoint():
                yield
            return
        self._wrote = False
        try:
            yield
        except Rejected as error:
            if self._wrote:
                raise Spoiled from error
            raise

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        tell_driver(self.db, "SAVEPOINT shoal")
        try:
            yield
        except BaseException:
            self._known.clear()
            tell_driver(self.db, "ROLLBACK TO SAVEPOINT shoal")
            tell_driver(self.db, "RELEASE SAVEPOINT shoal")
            raise
        tell_driver(self.db, "RELEASE SAVEPOINT shoal")

    # -- what is known ------------------------------------------------------------------------------------

    def recall(self, read: Callable[..., T], *about: Any) -> T:
        """What `read(db, *about)` gives, read once. Whoever changes it by a `Statement` says so: `forget`, `learn`."""
        found = self._known.get((read, *about), _MISSING)
        if found is _MISSING:
            found = self._known[(read, *about)] = read(self.db, *about)
        made: T = found
        return made

    def learn(self, value: Any, read: Callable[..., Any], *about: Any) -> None:
        """What `recall` would give now."""
        self._known[(read, *about)] = value

    def knows(self, read: Callable[..., Any], *about: Any) -> bool:
        return (read, *about) in self._known

    def known(self, read: Callable[..., Any]) -> list[tuple[Any, ...]]:
        """What was asked `read` about."""
        return [key[1:] for key in self._known if key[0] is read]

    def forget(self, read: Callable[..., Any], *about: Any) -> None:
        """All that `read` gave, or only what it gave about that."""
        for asked in [about] if about else self.known(read):
            self._known.pop((read, *asked), None)

    def _note_write(self, *, told: bool) -> None:
        """`told`: whoever wrote says what is not true any more. Else nothing is known any more."""
        self._wrote = True
        if not told:
            self._known.clear()
