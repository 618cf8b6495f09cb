"""A small disk of its own, to be filled to the last byte."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(parent: Path, num_bytes: int) -> Iterator[Path]:
    """Mounted in a folder of `parent`; the test is skipped where that is not allowed."""
    folder = parent / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Fills the disk except for `leave` bytes. Delete the returned file to free the space."""
    filler, spare = disk / "filler", disk / "spare"
    spare.write_bytes(bytes(leave))
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 8, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    spare.unlink()
    return filler
