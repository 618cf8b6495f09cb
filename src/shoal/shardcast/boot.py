"""Whether a folder was last written to since this machine started.

Names and sizes of files tell the truth as long as the kernel that wrote them runs, whatever becomes of our processes. A
power cut may leave a name without its bytes. So nothing is synced to the disk while somebody waits for it: the owner of a
folder leaves the boot's id in it, and where another one is found, everything is hashed before it is believed.
"""

import contextlib
from pathlib import Path

from shoal.shardcast.disk import NoRoom, room_in

BOOT_MARK = ".boot"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def same_boot(folder: Path) -> bool:
    """Whether names in `folder` can be believed. Never, on a system that does not say which boot this is."""
    try:
        return (folder / BOOT_MARK).read_bytes() == _boot_id() != b""
    except FileNotFoundError:
        return False


def mark_boot(folder: Path) -> None:
    """All that lies in `folder` now was checked, or was written since. Without room for the mark, it is checked again next time."""
    with contextlib.suppress(NoRoom), room_in(folder):
        (folder / BOOT_MARK).write_bytes(_boot_id())


def _boot_id() -> bytes:
    try:
        return _BOOT_ID.read_bytes()
    except OSError:
        return b""
