"""How a role's process ends: by a signal, or because its supervisor is gone."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

DEMO = Path(__file__).parent.parent.parent / "runs" / "demo.toml"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a coordinator with a pipe to its standard input."""
    arguments = ["coordinator", str(DEMO), "--dir", str(tmp_path / "c"), "--port", "0", "--stop-with-stdin"]
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if b"serving" in line:
                break
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal(coordinator: subprocess.Popen[bytes], number: signal.Signals) -> None:
    coordinator.send_signal(number)
    assert coordinator.stderr is not None
    rest = coordinator.stderr.read()
    assert coordinator.wait(30) == 130
    assert b"Traceback" not in rest


def test_the_end_of_standard_input(coordinator: subprocess.Popen[bytes]) -> None:
    assert coordinator.stdin is not None
    coordinator.stdin.close()
    assert coordinator.wait(30) == 130
