"""A writer's turn: the requests that are committed together, and what they share.

Nobody else writes meanwhile, so what one of them has read is still true for the next, until one of them changes it. And each
stands or falls alone: a request that is refused after it has written is undone. Savepoints would do that, two statements for each
request, while hardly any is refused so late: so they are done without, and a turn in which that happens is done again from its
beginning, carefully (desk.py).
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection

from shoal.swarm.coordinator.store.sheet import Page, Sheet
from shoal.swarm.coordinator.store.statements import TURN, tell_driver
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
        self.unwritten: set[str] = set()
        """Tables of which the pages have more than the database."""
        self._pages: dict[Sheet, Page] = {}
        self._careful = careful
        self._known: dict[Callable[..., Any], dict[tuple[Any, ...], Any]] = {}
        self._wrote = False
        self._info = db.info
        self._info[TURN] = self

    @property
    def keeps(self) -> bool:
        """Whether rows are kept, and written later (sheet.py)."""
        return not self._careful

    def end(self) -> None:
        for act in self.at_end:
            act()
        try:
            self.write_out()
        except self.db.dialect.loaded_dbapi.DatabaseError as error:
            # One of the requests wrote what the database does not take: alone it will be told so.
            raise Spoiled from error

    def close(self) -> None:
        """The connection goes back to where others take it from."""
        self._info.pop(TURN, None)

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
            self._pages.clear()
            tell_driver(self.db, "ROLLBACK TO SAVEPOINT shoal")
            tell_driver(self.db, "RELEASE SAVEPOINT shoal")
            raise
        tell_driver(self.db, "RELEASE SAVEPOINT shoal")

    # -- what is known ------------------------------------------------------------------------------------

    def recall(self, read: Callable[..., T], *about: Any) -> T:
        """What `read(db, *about)` gives, read once. Whoever changes it by a `Statement` says so: `forget`, `learn`."""
        found = self._known.get(read, {}).get(about, _MISSING)
        if found is _MISSING:
            found = read(self.db, *about)
            self.learn(found, read, *about)
        made: T = found
        return made

    def learn(self, value: Any, read: Callable[..., Any], *about: Any) -> None:
        """What `recall` would give now."""
        self._known.setdefault(read, {})[about] = value

    def knows(self, read: Callable[..., Any], *about: Any) -> bool:
        return about in self._known.get(read, {})

    def known(self, read: Callable[..., Any]) -> list[tuple[Any, ...]]:
        """What was asked `read` about."""
        return list(self._known.get(read, ()))

    def forget(self, read: Callable[..., Any], *about: Any) -> None:
        """All that `read` gave, or only what it gave about that."""
        if about:
            self._known.get(read, {}).pop(about, None)
        else:
            self._known.pop(read, None)

    # -- what is kept -------------------------------------------------------------------------------------

    def page(self, sheet: Sheet) -> Page:
        page = self._pages.get(sheet)
        if page is None:
            page = self._pages[sheet] = Page()
        return page

    def before(self, tables: Collection[str], *, writes: bool, keeps_rows: bool) -> None:
        """A statement about these tables goes out, by whoever says what is not true any more of what is known."""
        if not self.unwritten.isdisjoint(tables):
            self.write_out()
        if writes:
            self.note_write(told=True)
            if not keeps_rows:
                for sheet, page in self._pages.items():
                    if sheet.name in tables:
                        page.rows.clear()

    def before_any(self, *, writes: bool) -> None:
        """The same of a statement of which nothing is known."""
        self.write_out()
        if writes:
            self.note_write(told=False)
            for page in self._pages.values():
                page.rows.clear()

    def write_out(self) -> None:
        if not self.unwritten:
            return
        self.unwritten.clear()
        wrote = self._wrote
        in_order = sorted(self._pages.items(), key=lambda item: item[0].rank)
        for sheet, page in in_order:
            sheet.write(self.db, page)
        for sheet, page in in_order:
            sheet.rewrite(self.db, page)
        self._wrote = wrote  # it is not the doing of whoever only looks

    def note_write(self, *, told: bool) -> None:
        """`told`: whoever wrote says what is not true any more. Else nothing is known any more."""
        self._wrote = True
        if not told:
            self._known.clear()
