"""Data sets of the Hugging Face hub, or of its local cache: `path = "hf:org/name?config=main&split=train&revision=abc"`.

The rows are written to a JSON Lines file in the user's cache folder, and the task reads that file. The public terms of a run
contain the file's digest, so validators and the trainer get exactly these rows from the coordinator and need no hub.
`hf:/path/to/folder` reads a folder that the package `datasets` knows how to read.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from shoal.files import write_atomically
from shoal.tasks.datasets.file_options import is_file_option
from shoal.wire.run_spec import TaskSpec

PREFIX = "hf:"
_SETTINGS = ("config", "split", "revision")


def with_hub_files(spec: TaskSpec) -> TaskSpec:
    """Returns the spec with local files instead of `hf:` addresses. Downloads them if they are not cached."""
    options = {
        name: str(hub_file(str(value))) if is_file_option(name) and str(value).startswith(PREFIX) else value
        for name, value in spec.options.items()
    }
    return spec.model_copy(update={"options": options})


# A command may ask several times, and the hub's newest revision may change meanwhile.
@functools.lru_cache(maxsize=16)
def hub_file(address: str) -> Path:
    """Returns a JSON Lines file with the rows of an `hf:` address. Raises ValueError with the remedy if they cannot be loaded."""
    name, settings = _parse(address)
    rows = _load(address, name, settings)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-")[-60:]
    path = home / "shoal" / "hub" / f"{stem}-{hashlib.sha256(address.encode()).hexdigest()[:16]}.jsonl"
    with write_atomically(path) as file:
        for row in rows:
            file.write(json.dumps(_plain(row), sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return path


def _parse(address: str) -> tuple[str, dict[str, str]]:
    name, mark, query = address.removeprefix(PREFIX).partition("?")
    settings = dict(parse_qsl(query))
    if not name or (mark and not settings) or settings.keys() - set(_SETTINGS):
        raise ValueError(f"{address}: expected hf:ORG/NAME?split=train, with any of {', '.join(_SETTINGS)}")
    return name, {"split": "train"} | settings


def _load(address: str, name: str, settings: Mapping[str, str]) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError(f"{address} needs the package datasets: pip install 'shoal-rl[datasets]'") from None
    datasets.disable_progress_bars()
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            name, settings.get("config"), split=settings["split"], revision=settings.get("revision")
        )
    except Exception as error:  # the package raises many kinds, some of other packages
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        raise ValueError(
            f"{address}: {reason}; check the name, split and config. Without a connection to the hub, set HF_HOME to a cache "
            "that has the data set, or use path with a file"
        ) from error
    return rows


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that are texts, numbers or lists and objects of them; images and sounds are left out."""
    plain = {}
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            continue
        plain[name] = value
    return plain
