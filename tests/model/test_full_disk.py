"""Weights on a full disk: the error is an OSError with the file's name."""

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
from pathlib import Path

import pytest
from shoal.model.weights import save_tensors
try:
    save_tensors([("a", torch.zeros(100_000))], Path(sys.argv[1]))
except OSError as error:
    print(error.errno, error.strerror, error.filename)
"""


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


@pytest.mark.integration
def test_saving_weights_on_a_full_disk_raises_an_os_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        preexec_fn=limit_file_size,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"{errno.EFBIG} File too large {path}\n", done.stderr
    assert list(tmp_path.iterdir()) == []
