"""A disk without room: where, how much is left, and what to do about it; the system's own error names neither file nor remedy.

It is no reason to end. A relay and a client wait, and go on when there is room; a publisher is told, and may publish again.
"""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(OSError):
    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def room_in(folder: Path) -> Iterator[None]:
    """An error for want of room, of whatever is written to this folder meanwhile, becomes one that says so."""
    try:
        yield
    except NoRoom:
        raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise NoRoom(
            error.errno, f"no room in {folder} ({error.strerror}, {_left(folder)}); {_REMEDY}"
        ) from None


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """The same for one new file, which goes if it cannot be finished: its beginning is of no use, and takes what others need."""
    try:
        with room_in(path.parent):
            yield
    except NoRoom:
        path.unlink(missing_ok=True)
        raise


_REMEDY = "make room there, or move it to a larger disk; it goes on from where it was"


def _left(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:  # it may be what there was no room for
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB left"
