"""Prints the lowest version that pyproject.toml allows of each dependency of the control plane, as pip constraints."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for requirement in project["dependencies"]:
    match = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?>=([0-9.]+).*", requirement)
    if match is None:
        raise SystemExit(f"{requirement!r} names no lowest version; write NAME>=VERSION")
    print(f"{match[1]}=={match[2]}")  # noqa: T201
