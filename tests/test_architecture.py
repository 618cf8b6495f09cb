"""The rules of docs/ARCHITECTURE.md that a machine can check: rooms and floors, sizes, names, and the walk through one rollout."""

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "shoal"

FLOOR = {
    "files": -1,
    "wire": 0,
    "telemetry": 0,
    "background": 0,
    "child_process": 0,
    "landlock": 0,
    "net": 1,
    "tasks": 1,
    "model": 1,
    "shardcast": 2,
    "toploc": 2,
    "diloco": 2,
    "trainer": 3,
    "rollout": 3,
    "swarm.coordinator": 3,
    "swarm.validator": 3,
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
MAX_MODULES = 300
MAX_MODULES_IN_A_FOLDER = 20
MIN_LINES, MAX_LINES = 40, 500
MAX_CHAIN = 8
MAX_CALLS_PER_STAGE = 20
BANNED_NAMES = {"utils", "common", "helpers", "base", "manager"}
STEMS_OF_ONE_MEANING = {"__init__", "__main__", "config"}
"""Stems that may occur in several rooms, because they mean the same everywhere."""

Graph = dict[str, set[str]]


def module_name(path: Path) -> str:
    parts = ("shoal", *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


@cache
def paths() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


@cache
def modules() -> list[Path]:
    return [path for path in paths().values() if path.name not in ("__init__.py", "__main__.py")]


def room_of(name: str) -> str:
    parts = name.split(".")[1:]
    return ".".join(parts[:2]) if parts[:1] == ["swarm"] else (parts[0] if parts else "")


@cache
def imports() -> Graph:
    """The modules of Shoal that each module imports, imports inside functions included."""
    graph: Graph = {}
    for name, tree in trees().items():
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in paths() else node.module)
        graph[name] = {other for other in found if other in paths() and other != name}
    return graph


def test_a_room_imports_only_lower_floors() -> None:
    wrong = []
    for name, others in imports().items():
        room = room_of(name)
        if room not in FLOOR:
            continue
        for other in others:
            their = room_of(other)
            if their in FLOOR and their != room and FLOOR[their] >= FLOOR[room]:
                wrong.append(f"{name} (floor {FLOOR[room]}) imports {other} (floor {FLOOR[their]})")
    assert wrong == []


def test_every_package_is_a_room() -> None:
    rooms = {room_of(name) for name in paths()} - {"", "__main__", "swarm", "api"}
    assert rooms <= set(FLOOR), f"not in the table of rooms: {sorted(rooms - set(FLOOR))}"


def test_the_control_plane_starts_without_torch() -> None:
    program = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, f'{module} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *CONTROL_PLANE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rules_of_the_coordinator_import_only_wire() -> None:
    package = "shoal.swarm.coordinator.rules"
    wrong = []
    for name in paths():
        if not name.startswith(package):
            continue
        for other in imports()[name]:
            if not other.startswith((package, "shoal.wire")):
                wrong.append(f"{name} imports {other}")
        for node in ast.walk(trees()[name]):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [
                f"{name} imports {each}"
                for each in names
                if each.split(".")[0]
                in {"time", "random", "secrets", "os", "pathlib", "sqlalchemy", "socket"}
            ]
    assert wrong == []


def test_honest_code_does_not_import_the_adversary() -> None:
    """Only the command line starts a liar; rollout's honest modules must work without the package."""
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if other.startswith("shoal.rollout.adversary")
        and not name.startswith(("shoal.rollout.adversary", "shoal.cli"))
    ]
    assert wrong == []


def test_number_and_size_of_modules() -> None:
    assert len(modules()) <= MAX_MODULES
    folders: dict[Path, int] = defaultdict(int)
    for path in modules():
        folders[path.parent] += 1
    assert {str(f.relative_to(SRC)): n for f, n in folders.items() if n > MAX_MODULES_IN_A_FOLDER} == {}
    lines = {str(path.relative_to(SRC)): len(path.read_text().splitlines()) for path in modules()}
    assert {name: n for name, n in lines.items() if not MIN_LINES <= n <= MAX_LINES} == {}


def longest_chain(room: str) -> list[str]:
    """The longest chain of imports inside a room. Packages' `__init__` only re-export, and do not count."""
    inside = {name for name, path in paths().items() if room_of(name) == room and path.name != "__init__.py"}
    longest: dict[str, list[str]] = {}

    def follow(name: str, above: tuple[str, ...]) -> list[str]:
        assert name not in above, f"import cycle: {' -> '.join((*above, name))}"
        if name not in longest:
            below = [follow(other, (*above, name)) for other in sorted(imports()[name] & inside)]
            longest[name] = [name, *max(below, key=len, default=[])]
        return longest[name]

    return max((follow(name, ()) for name in sorted(inside)), key=len, default=[])


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_import_chains_are_short_and_have_no_cycle(room: str) -> None:
    chain = longest_chain(room)
    assert len(chain) <= MAX_CHAIN, " -> ".join(chain)


def test_no_class_name_is_defined_twice() -> None:
    defined: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].add(name)
    assert {each: sorted(where) for each, where in defined.items() if len(where) > 1} == {}


def test_no_file_stem_names_two_things() -> None:
    """A file in cli/commands has the name of its command, which may be that of the thing it is about."""
    stems: dict[str, set[str]] = defaultdict(set)
    for path in paths().values():
        if path.parent != SRC / "cli" / "commands":
            stems[path.stem].add(str(path.relative_to(SRC)))
    assert {
        stem: sorted(where)
        for stem, where in stems.items()
        if len(where) > 1 and stem not in STEMS_OF_ONE_MEANING
    } == {}


def test_no_room_or_file_has_a_name_that_says_nothing() -> None:
    for path in paths().values():
        assert not BANNED_NAMES & {part.removesuffix(".py") for part in path.relative_to(SRC).parts}, path


# -- the walk ---------------------------------------------------------------------------------------------


def walk_table() -> dict[str, list[str]]:
    """The functions of each stage, from the table "The walk" of docs/ARCHITECTURE.md."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    section = text.split("## The walk", 1)[1].split("\n## ", 1)[0]
    stages = {}
    for line in section.splitlines():
        if match := re.match(r"\| (\d+ [^|]*?) \|(.*)\|$", line):
            stages[match[1]] = re.findall(r"`([a-z_]+(?:\.\w+)+)`", match[2])
    return stages


def test_the_walk_names_functions_that_exist() -> None:
    stages = walk_table()
    assert len(stages) >= 13
    for stage, functions in stages.items():
        assert 2 <= len(functions) <= MAX_CALLS_PER_STAGE, f"stage {stage}: {len(functions)} calls"
        for function in functions:
            assert resolve(function) is not None, f"stage {stage}: {function} does not exist"


def resolve(function: str) -> object | None:
    """Returns the ast node of `room.module.function` or `room.module.Class.method`."""
    parts = ["shoal", *function.split(".")]
    for cut in range(len(parts) - 1, 1, -1):
        name = ".".join(parts[:cut])
        if name in trees():
            node: ast.AST | None = trees()[name]
            for part in parts[cut:]:
                node = next(
                    (
                        child
                        for child in getattr(node, "body", [])
                        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                        and child.name == part
                    ),
                    None,
                )
            return node
    return None


def test_every_module_can_be_imported_by_name() -> None:
    """A package without `__init__.py` would be missing from the wheel."""
    for path in SRC.rglob("*"):
        if path.is_dir() and any(path.glob("*.py")):
            assert (path / "__init__.py").exists(), path
    importlib.import_module("shoal")


# -- code in model folders ---------------------------------------------------------------------------------


def calls_of(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yields the name of the function or method and the call itself, for every call in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            yield name, node


def constant_arguments(call: ast.Call) -> dict[str | None, object]:
    return {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}


@pytest.mark.parametrize("folder", ["src", "bench", "examples"])
def test_no_call_can_run_code_of_a_model_folder(folder: str) -> None:
    """Libraries that load models run Python files or pickles of a folder unless each call forbids it."""
    for path in (ROOT / folder).rglob("*.py"):
        for name, call in calls_of(path):
            where, given = f"{path.relative_to(ROOT)}:{call.lineno}: {name}", constant_arguments(call)
            if name in ("from_pretrained", "from_config", "EngineArgs"):
                assert given.get("trust_remote_code") is False, f"{where} needs trust_remote_code=False"
            if name == "from_pretrained" and "Model" in ast.unparse(call.func):
                assert given.get("use_safetensors") is True, f"{where} needs use_safetensors=True"
            if name == "load" and ast.unparse(call.func) == "torch.load":
                assert given.get("weights_only") is True, f"{where} needs weights_only=True"


def test_nothing_reads_pickles() -> None:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "joblib", "marshal", "shelve"} & set(imported), name
