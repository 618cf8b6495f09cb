"""Atomic writes, lock files, full disks and free memory, written once for every room."""

import errno
import fcntl
import os
import re
import resource
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean that a write did not fit: disk full, quota exceeded, file too large."""

FULL_BYTES = 1 << 20
"""A disk with less free space than this is full: torch.save fails without saying why."""

DISK_FULL_REMEDY = "free some space there or use a larger disk; the work then continues by itself"


class DiskFull(OSError):
    """A write failed because there is no space. The message names the folder, the free bytes and the remedy."""

    def __str__(self) -> str:
        return str(self.strerror)


class AlreadyLocked(ValueError):
    """Another process holds the lock file. The message says what its owner should do."""


@contextmanager
def write_atomically(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside `path` and renames it to `path` when the block ends without an error.

    A library that opens files itself can write to `file.name`, the temporary file's path.

    Readers see the old file or the complete new one. With `durable`, file and folder are flushed to disk before this
    returns, so that the new file survives a power cut. If the block raises, the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(partial):
            raise OSError(
                error.errno, error.strerror, str(path)
            ) from error  # names the file that was asked for
        raise
    if durable:
        flush_folder(path.parent)


def write_bytes_atomically(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Writes `content` to `path` through `write_atomically`."""
    with write_atomically(path, mode=mode, durable=durable) as file:
        file.write(content)


@contextmanager
def folder_beside(final: Path) -> Iterator[Path]:
    """Yields an empty folder beside `final`, to be renamed to it, and deletes what is left of it afterwards."""
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # a copy that did not fit would keep the disk full


def replace_folder(partial: Path, final: Path) -> None:
    """Renames a complete folder to its final name and flushes the new name to disk. `final` must not exist."""
    os.rename(partial, final)
    flush_folder(final.parent)


def replace_link(link: Path, target: Path) -> None:
    """Makes `link` a symbolic link to `target`. Readers see the old link or the new one."""
    partial = link.with_name(f".{link.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, link)


def link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` the same file as `source`; a copy on another file system, or on one without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def flush_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk, so that renames and new names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def hold_lock(path: Path, *, message: str) -> Iterator[None]:
    """Holds an exclusive lock on `path` for the block; raises AlreadyLocked(message) if another process has it.

    The operating system releases the lock when the process ends, however it ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AlreadyLocked(message) from None
        yield


def is_locked(path: Path) -> bool:
    """Returns whether some process holds the lock on `path`. A missing file is not locked, nor one below a path that is no folder."""
    try:
        with path.open("ab" if path.exists() else "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return False


def is_disk_full(error: BaseException) -> bool:
    """Returns whether an error means that a write did not fit on the disk."""
    return isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS


@contextmanager
def explain_full_disk(folder: Path, *, remedy: str = DISK_FULL_REMEDY) -> Iterator[None]:
    """Raises DiskFull with folder, free space and remedy where the block raised a disk-full error.

    A remedy that was given replaces the usual one of a block inside: the outer one knows whether the process goes on.
    """
    try:
        yield
    except DiskFull as error:
        raise DiskFull(error.errno, str(error).replace(DISK_FULL_REMEDY, remedy)) from None
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise DiskFull(
            error.errno, f"no space left in {folder} ({error.strerror}, {free_space(folder)}); {remedy}"
        ) from None


@contextmanager
def restore_disk_error(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Raises OSError with the file's name where a library that writes `path` raised one of `kinds` because of the disk.

    safetensors hides the error number in its message; torch.save loses it, so the free space decides.
    """
    try:
        yield
    except kinds as error:
        named = re.search(r"\(os error (\d+)\)", str(error))
        if named is not None:
            number = int(named.group(1))
        elif shutil.disk_usage(path.parent).free < FULL_BYTES:
            number = errno.ENOSPC
        else:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def free_space(folder: Path) -> str:
    """Returns the free space of the disk that holds `folder`, as "12.3 MB free". The folder need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free"


def free_memory_bytes() -> int:
    """Returns the memory that this process can still get: what the machine, its container and its own limit leave of it.

    4 GiB where /proc is missing (not Linux).
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 4 << 30
    found = [1024 * _number_after("MemAvailable:", meminfo.read_text())]
    found += [free for free in (free_data_bytes(), free_cgroup_bytes()) if free is not None]
    return max(0, min(found))


def free_data_bytes() -> int | None:
    """Returns how many more bytes this process may map before RLIMIT_DATA; None without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status")
    if limit == resource.RLIM_INFINITY or not status.exists():
        return None
    return limit - 1024 * _number_after("VmData:", status.read_text())


def free_cgroup_bytes(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Returns what the memory limits of this process's control groups leave, for example those of a container; None without such a limit.

    /proc/meminfo is that of the whole machine. Files in the page cache count as free: the kernel drops them.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    found: list[int] = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        names = ("memory.max", "memory.current", "inactive_file")
        folder = root
        if controllers:  # a line of version 1 of control groups
            if "memory" not in controllers.split(","):
                continue
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            folder = root / "memory"
        # A container may not see the path under which the machine knows it; then its own group is the root.
        own_folder = folder / path.lstrip("/")
        for group in (folder, *(one for one in (own_folder, *own_folder.parents) if folder in one.parents)):
            with suppress(OSError, ValueError):  # no such group, or "max": no limit
                limit, used = (int((group / name).read_text()) for name in names[:2])
                found.append(limit - used + _number_after(names[2], (group / "memory.stat").read_text()))
    return min(found, default=None)


def _number_after(name: str, text: str) -> int:
    """Returns the number in the line of `text` that starts with `name`. Raises ValueError if there is no such line."""
    for line in text.splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    raise ValueError(f"no line {name!r}")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an allocation failed, in the words of Python, of torch on a CPU, or of a GPU."""
    words = ("can't allocate memory", "out of memory", "Cannot allocate memory")
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's error for GPUs
        or (isinstance(error, (RuntimeError, OSError)) and any(word in str(error) for word in words))
    )


def folder_bytes(folder: Path) -> int:
    """Returns the disk space of a folder. Files that several versions share by hard links count once."""
    sizes: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(root, name))
            except FileNotFoundError:  # the file was deleted meanwhile
                continue
            sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())
