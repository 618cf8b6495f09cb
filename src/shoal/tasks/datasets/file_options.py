"""The files a task reads, by path on one machine and by digest between machines.

Whoever opens the run keeps the files under their digests (`keep_files`), and the public terms name them so. Whoever needs
their rows, which no worker does, gets the bytes, compares the digest, and builds the task from its own copy
(`with_files_from`).
"""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from shoal.wire.run_spec import TaskSpec

_ADDRESS = re.compile(r"sha256:([0-9a-f]{64})")
_DIGEST = "_sha256"

Options = Mapping[str, int | float | str]


def is_file_option(name: str) -> bool:
    return name == "path" or name.endswith("_path")


def file_digests(spec: TaskSpec) -> list[str]:
    """SHA-256 of the files that the terms name by digest."""
    found = (_ADDRESS.fullmatch(str(value)) for name, value in spec.options.items() if is_file_option(name))
    return [match[1] for match in found if match]


def keep_files(spec: TaskSpec, folder: Path) -> TaskSpec:
    """Copy the files a spec names by path into `folder`, under their digests; the spec that names them by digest."""
    options = dict(checked_options(spec))
    for name, value in options.items():
        if is_file_option(name) and value != "" and not _ADDRESS.fullmatch(str(value)):
            options[name] = f"sha256:{_keep(Path(str(value)), folder)}"
    return spec.model_copy(update={"options": options})


def with_files_from(spec: TaskSpec, folder: Path) -> TaskSpec:
    """The spec with the files it names by digest found in `folder`."""
    options = dict(spec.options)
    for name, value in options.items():
        if is_file_option(name) and (match := _ADDRESS.fullmatch(str(value))):
            options[name] = str(folder / match[1])
    return spec.model_copy(update={"options": options})


def checked_options(spec: TaskSpec) -> Options:
    """The options without `path_sha256` and its like, which say what digest a file must have."""
    wanted = {name: value for name, value in spec.options.items() if is_digest_of_file(name)}
    for name, value in wanted.items():
        path = spec.options.get(name.removesuffix(_DIGEST))
        if path is None:
            raise ValueError(
                f"task {spec.name!r}: {name} is given, but not {name.removesuffix(_DIGEST)}; name the file"
            )
        found = digest_of(Path(str(path)))
        if found != value:
            raise ValueError(
                f"task {spec.name!r}: {path} has SHA-256 {found}, {name} says {value}; get that file"
            )
    return {name: value for name, value in spec.options.items() if name not in wanted}


def without_digests(spec: TaskSpec) -> TaskSpec:
    """The same without looking at any file."""
    options = {name: value for name, value in spec.options.items() if not is_digest_of_file(name)}
    return spec.model_copy(update={"options": options})


def is_digest_of_file(name: str) -> bool:
    return name.endswith(_DIGEST) and is_file_option(name.removesuffix(_DIGEST))


def digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ValueError(f"no data file at {path}; the task's options name it") from None


def _keep(path: Path, folder: Path) -> str:
    digest = digest_of(path)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / digest).exists():
        partial = folder / f"{digest}.{os.getpid()}.partial"
        shutil.copyfile(path, partial)
        partial.rename(folder / digest)
    return digest
