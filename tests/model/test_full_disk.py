"""Weights and checkpoints on a disk that is full: the system's own reason with the file's name, whoever was writing."""

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.model import weights

PROGRAM = """
import sys, torch
from pathlib import Path
from shoal.model.weights import save_tensors
try:
    save_tensors([("a", torch.zeros(100_000))], Path(sys.argv[1]))
except OSError as error:
    print(error.errno, error.strerror, error.filename)
"""


def as_on_a_full_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_no_room_for_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        preexec_fn=as_on_a_full_disk,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"{errno.EFBIG} File too large {path}\n", done.stderr
    assert not path.exists()


def test_torch_gives_no_reason_so_the_disk_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="unexpected pos"), weights.disk_errors(tmp_path / "optimizer.pt"):
        raise RuntimeError("unexpected pos 400704 vs 598")
    monkeypatch.setattr(weights, "FULL_BYTES", 1 << 62)
    with (
        pytest.raises(OSError, match="No space left") as full,
        weights.disk_errors(tmp_path / "optimizer.pt"),
    ):
        raise RuntimeError("unexpected pos 400704 vs 598")
    assert full.value.filename == str(tmp_path / "optimizer.pt")
