"""The names of versions' folders: v7, and v7.partial while a client brings it."""

import re
from pathlib import Path

_NAME = re.compile(r"v(?P<version>0|[1-9][0-9]{0,17})(?P<partial>\.partial)?")


def version_folder(parent: Path, version: int) -> Path:
    return parent / f"v{version}"


def partial_folder(parent: Path, version: int) -> Path:
    return parent / f"v{version}.partial"


def version_folders(parent: Path) -> dict[int, Path]:
    """Those that have got their final name, oldest first."""
    return _find(parent, partial=False)


def partial_folders(parent: Path) -> dict[int, Path]:
    return _find(parent, partial=True)


def _find(parent: Path, *, partial: bool) -> dict[int, Path]:
    found = {path: _NAME.fullmatch(path.name) for path in parent.iterdir()}
    named = {
        int(match["version"]): path
        for path, match in found.items()
        if match and bool(match["partial"]) == partial
    }
    return dict(sorted(named.items()))
