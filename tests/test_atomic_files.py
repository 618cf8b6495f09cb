"""Atomic writes, locks and full disks."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import files
from shoal.files import (
    AlreadyLocked,
    DiskFull,
    explain_full_disk,
    hold_lock,
    is_locked,
    replace_folder,
    restore_disk_error,
    write_atomically,
    write_bytes_atomically,
)


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_bytes_atomically(path, b"old")
    with pytest.raises(ZeroDivisionError), write_atomically(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    for path in (tmp_path / "report.html", Path("/proc/report.html")):
        with pytest.raises(OSError, match=f"'{path}'$"):
            write_bytes_atomically(path, b"x")


def test_a_path_below_a_file_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    assert not is_locked(tmp_path / "run.toml" / "lock")


def test_a_write_replaces_the_whole_file_and_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key"
    write_bytes_atomically(path, b"a" * 100, mode=0o600)
    write_bytes_atomically(path, b"b", mode=0o600)
    assert path.read_bytes() == b"b"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_appears_complete(tmp_path: Path) -> None:
    partial = tmp_path / "v1.partial"
    partial.mkdir()
    (partial / "file").write_bytes(b"x")
    replace_folder(partial, tmp_path / "v1")
    assert (tmp_path / "v1" / "file").read_bytes() == b"x"
    assert not partial.exists()


def test_only_one_process_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    program = (
        "import sys; from pathlib import Path; from shoal.files import hold_lock\n"
        "with hold_lock(Path(sys.argv[1]), message='taken'): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(path)
        with pytest.raises(AlreadyLocked, match="stop it first"), hold_lock(path, message="stop it first"):
            pass
    finally:
        holder.kill()
        holder.wait()
        for pipe in (holder.stdin, holder.stdout):
            if pipe is not None:
                pipe.close()
    with hold_lock(path, message="still taken"):
        pass


def test_a_full_disk_is_explained_and_other_errors_are_not(tmp_path: Path) -> None:
    expected = rf"no space left in {tmp_path}.*MB free.*free some space"
    with pytest.raises(DiskFull, match=expected), explain_full_disk(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), explain_full_disk(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_a_library_can_write_to_the_temporary_path(tmp_path: Path) -> None:
    with write_atomically(tmp_path / "weights") as file:
        Path(file.name).write_bytes(b"values")
    assert (tmp_path / "weights").read_bytes() == b"values"


def test_an_error_number_in_a_message_is_raised_as_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError) as full, restore_disk_error(tmp_path / "w", ValueError):
        raise ValueError("I/O error: No space left on device (os error 28)")
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "w"))


def test_free_space_decides_where_an_error_gives_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "optimizer.pt"
    with pytest.raises(RuntimeError, match="unexpected pos"), restore_disk_error(path, RuntimeError):
        raise RuntimeError("unexpected pos 400704 vs 598")
    monkeypatch.setattr(files, "FULL_BYTES", 1 << 62)
    with pytest.raises(OSError, match="No space left") as full, restore_disk_error(path, RuntimeError):
        raise RuntimeError("unexpected pos 400704 vs 598")
    assert full.value.filename == str(path)


def test_the_outer_remedy_replaces_the_usual_one_of_a_block_inside(tmp_path: Path) -> None:
    """A process that stops must not promise that the work continues by itself."""
    outer = explain_full_disk(tmp_path, remedy="then start again")
    words = r"^no space left in .*inner.*; then start again$"
    with pytest.raises(DiskFull, match=words), outer, explain_full_disk(tmp_path / "inner"):
        raise OSError(errno.ENOSPC, "No space left on device")
