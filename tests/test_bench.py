"""Every benchmark starts: an option or a record that it uses may have been renamed, which mypy does not always see."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
NEEDED = {"pictures": "pyte", "compile_kernels": "triton"}
"""Packages that no extra has, by the benchmark that imports them."""


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
    scripts = [
        path
        for path in sorted(BENCH.glob("*.py"))
        if "__main__" in path.read_text() and (path.stem not in NEEDED or find_spec(NEEDED[path.stem]))
    ]
    with ThreadPoolExecutor(2) as pool:
        errors = dict(zip((path.name for path in scripts), pool.map(error_of, scripts), strict=True))
    assert {name: error for name, error in errors.items() if error} == {}


@pytest.mark.integration
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_pictures_of_the_reproduction_page_can_be_drawn_again(tmp_path: Path) -> None:
    """`make figures` needs only what bench/results has."""
    page = (BENCH.parent / "docs" / "reproduction.md").read_text()
    wanted = set(re.findall(r"\(img/([\w.-]+\.png)\)", page))
    run = subprocess.run(
        [sys.executable, str(BENCH / "figures.py"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert wanted and wanted == {path.name for path in tmp_path.iterdir()}
    for count in re.findall(r"[\d,]{5,}", run.stdout.split("generated")[1]):
        assert count in page, f"{count} output tokens are not in docs/reproduction.md"
    assert all((BENCH.parent / "docs" / "img" / name).is_file() for name in wanted)
