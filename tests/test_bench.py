"""Every benchmark starts: an option or a record that it uses may have been renamed, which mypy does not always see."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
MODULES_WITHOUT_COMMAND = {"child", "one_loop", "rivals", "stacked", "throttle"}
NEED_TRITON = {"cuda_replay"}


def error_of(script: Path) -> str:
    # shardcast.py has the name of a package that it imports.
    safe_path = ["-P"] if script.stem == "shardcast" else []
    found = subprocess.run(
        [sys.executable, *safe_path, script, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return found.stderr if found.returncode else ""


@pytest.mark.integration
def test_every_benchmark_prints_its_help() -> None:
    left_out = MODULES_WITHOUT_COMMAND | (NEED_TRITON if find_spec("triton") is None else set())
    scripts = [path for path in sorted(BENCH.glob("*.py")) if path.stem not in left_out]
    with ThreadPoolExecutor(2) as pool:
        errors = dict(zip((path.name for path in scripts), pool.map(error_of, scripts), strict=True))
    assert {name: error for name, error in errors.items() if error} == {}
