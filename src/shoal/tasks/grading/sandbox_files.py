"""Counts and removes the files and processes of a sandboxed program. Loaded by sandbox_child.py; imports no other module of shoal.

Where a program has a /tmp of its own, the kernel limits it. At the levels `user` and `limits` it writes on the machine's disk, so its
monitor counts its files while it runs. Files that are deleted while they are open are not found; there are at most a few hundred.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Iterable, Iterator

SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders of the machine in which a program can write at level `user`."""
MAX_PARTS = 100
"""Parts of a path from which a program nests folders too deep: a path that is longer takes the system longer to look up."""


def remove_files_of(uid: int | None) -> None:
    """Deletes what the program left in folders that all users share; a later program could read it, and the disk would fill up."""
    for entry in _shared_files_of(uid):
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                os.unlink(entry.path)


def _shared_files_of(uid: int | None) -> Iterator["os.DirEntry[str]"]:
    """Yields what the program has in folders that all users share."""
    for folder in SHARED_FOLDERS if uid is not None else ():
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                with contextlib.suppress(OSError):  # another process may have removed it
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        yield entry


def uses_more_than(folder: str, uid: int | None, max_bytes: int, max_files: int) -> bool:
    """Returns whether a running program has more files or bytes. What it nests too deep to be found is too much as well."""
    num_files = num_bytes = 0
    try:
        for info in _files_of(folder, uid):
            num_files += 1
            num_bytes += 512 * info.st_blocks
            if num_files > max_files or num_bytes > max_bytes:
                return True
    except OSError:
        return True
    return False


def _files_of(folder: str, uid: int | None) -> Iterator[os.stat_result]:
    """Yields the files and folders of a running program. Raises OSError for a folder that cannot be read."""
    folders = [folder]
    entries: Iterable[os.DirEntry[str]] = _shared_files_of(uid)
    while True:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # the program has just deleted it
                info = entry.stat(follow_symlinks=False)
                yield info
                if entry.path.count("/") > MAX_PARTS:
                    raise OSError("nested too deep")
                if stat.S_ISDIR(info.st_mode) and entry.path != folder:
                    folders.append(entry.path)
        if not folders:
            return
        entries = ()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            entries = os.scandir(folders.pop())


def remove_tree(path: str) -> None:
    """Deletes a program's folder, as far as this user may. Call it when the program has ended.

    A program can nest folders deeper than Python's stack, the limit on open files and the longest path. So folders inside folders are
    moved up to the first one before they are opened.
    """
    with contextlib.suppress(OSError):
        if os.getuid() != 0:
            os.chmod(path, 0o700)  # root may do everything in any folder
        top = _open_folder(path)
        try:
            pending = _delete_files(top, top)
            while pending:
                name = pending.pop()
                with contextlib.suppress(OSError):
                    inner = _open_folder(name, top)
                    try:
                        pending += _delete_files(inner, top)
                    finally:
                        os.close(inner)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(path)


def _open_folder(name: str, parent: int | None = None) -> int:
    """Opens a folder that nobody but its owner may change from now on: another program could put links into it."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    os.fchmod(fd, 0o700)
    return fd


def _delete_files(folder: int, top: int) -> list[str]:
    """Deletes what is in a folder, except the folders, which are moved to `top`. Returns their new names."""
    moved: list[str] = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # monitor and validator may delete the same folder
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                if os.getuid() != 0:
                    os.chmod(name, 0o700, dir_fd=folder)  # a folder without write permission cannot be moved
                new = os.urandom(16).hex()
                os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
                moved.append(new)
    return moved


# -- processes --------------------------------------------------------------------------------------------


def waited_s(program: int, proc: int, *, adopts: bool) -> float | None:
    """Returns the seconds for which the program waited for a processor; None if its own threads or processes may have used it.

    `adopts` says that this process has one program, and is the parent of processes which that program started and left.
    """
    own = os.getpid()
    try:
        if _read_at(proc, f"{program}/task/{program}/children").strip():
            return None
        if adopts and _read_at(proc, f"{own}/task/{own}/children").split() != [str(program)]:
            return None
        fields = _read_at(proc, f"{program}/status").partition("Threads:")[2].split()
        _, waited_ns, _ = _read_at(proc, f"{program}/schedstat").split()
    except OSError:
        return None  # it has just ended, or this kernel keeps no such counts
    return int(waited_ns) / 1e9 if fields[:1] == ["1"] else None


def _read_at(proc: int, path: str) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY, dir_fd=proc)) as file:
        return file.read()


def kill_remaining(uid: int | None) -> None:
    """Kills the program's remaining processes: all of its user, or all that became our children when their parents ended."""
    if uid is not None:
        _kill_all_of(uid)
    for _ in range(100):
        children = [pid for pid in _processes() if _parent(pid) == os.getpid()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not children:
            return


def _kill_all_of(uid: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def count_own_threads() -> int:
    """Returns how many threads this user runs."""
    count = 0
    for pid in _processes():
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue  # the process has ended
    return count


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0
