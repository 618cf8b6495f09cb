"""The floors: a room imports only rooms on lower floors, and the control plane starts without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "shoal"

FLOOR = {
    "wire": 0,
    "telemetry": 0,
    "files": -1,  # below wire, which writes key files with it
    "background": 0,
    "child_process": 0,
    "net": 1,
    "tasks": 1,
    "model": 1,
    "shardcast": 2,
    "toploc": 2,
    "diloco": 2,
    "trainer": 3,
    "rollout": 3,
    "swarm": 3,
    "cli": 4,
}

CONTROL_PLANE = [
    "shoal.wire.messages",
    "shoal.net.http_client",
    "shoal.tasks",
    "shoal.shardcast",
    "shoal.swarm.coordinator",
    "shoal.cli.main",
    "shoal.cli.run.roles",
]

BANNED_NAMES = {"utils", "common", "helpers", "base", "manager"}


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


FILES = sorted(
    path
    for path in SRC.rglob("*.py")
    if path.parent != SRC or path.name in ("telemetry.py", "files.py", "background.py", "child_process.py")
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_a_room_imports_only_lower_floors(path: Path) -> None:
    room = room_of(path)
    assert room in FLOOR, f"{path.name}: {room} is not a room of docs/ARCHITECTURE.md"
    for name in imports_of(path):
        if not name.startswith("shoal."):
            continue
        other = name.split(".")[1]
        if other == room or other not in FLOOR:
            continue
        assert FLOOR[other] < FLOOR[room], (
            f"{room} (floor {FLOOR[room]}) imports {name} (floor {FLOOR[other]})"
        )


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_the_control_plane_starts_without_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0, (
        f"{module} imports torch"
    )


def test_no_room_or_file_has_a_name_that_says_nothing() -> None:
    for path in FILES:
        assert not BANNED_NAMES & {part.removesuffix(".py") for part in path.relative_to(SRC).parts}, path
