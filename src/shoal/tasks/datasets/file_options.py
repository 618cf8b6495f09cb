"""The options of a task that name files: by path on one machine, by SHA-256 digest between machines.

An option may also name a folder, such as that of a judge model: it is sent to other machines as one tar file.

The coordinator copies the files to names that are their digests (`keep_files`), and the public terms of the run contain the
digests. A trainer, validator or auditor downloads the bytes, checks the digest, and builds the task from its own copy
(`with_files_from`). Workers do not need the files.
"""

import hashlib
import re
import shutil
import tarfile
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.files import folder_beside, write_atomically, write_bytes_atomically
from shoal.wire.run_spec import RunSpec, TaskSpec

_ADDRESS = re.compile(r"sha256:([0-9a-f]{64})")
_DIGEST = "_sha256"
_NAME = ".name"
_FOLDER = ".folder"
_GRADERS = frozenset({"judge_path"})
"""Options whose files only a grader reads."""

Options = Mapping[str, bool | int | float | str]


def is_file_option(name: str) -> bool:
    """Returns whether a task's option of this name is the path of a file."""
    return name == "path" or name.endswith("_path")


def file_digests(spec: TaskSpec) -> dict[str, str]:
    """Returns the SHA-256 digests of the files that the spec names by digest, by option."""
    return {
        name: match[1]
        for name, value in spec.options.items()
        if is_file_option(name) and (match := _ADDRESS.fullmatch(str(value)))
    }


def run_digests(spec: RunSpec, *, to_grade: bool = True) -> list[str]:
    """Returns the digests of the files of all tasks of a run, each once; without `to_grade`, those that pose problems."""
    found = [one for task in spec.task_specs() for one in file_digests(task).items()]
    return list(dict.fromkeys(digest for name, digest in found if to_grade or name not in _GRADERS))


def keep_files(spec: TaskSpec, folder: Path) -> TaskSpec:
    """Copies the files that a spec names by path into `folder`; returns the spec that names them by digest."""
    options = dict(checked_options(spec))
    for name, value in options.items():
        if is_file_option(name) and value != "" and not _ADDRESS.fullmatch(str(value)):
            options[name] = f"sha256:{_copy_to_digest(Path(str(value)), folder)}"
    return spec.model_copy(update={"options": options})


def file_names(spec: TaskSpec, folder: Path) -> dict[str, str]:
    """Returns the names of the files that a spec names by digest, by option; `folder` is that of `keep_files`."""
    paths = {name: folder / f"{digest}{_NAME}" for name, digest in file_digests(spec).items()}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.exists()}


def with_files_from(spec: TaskSpec, folder: Path) -> TaskSpec:
    """Returns the spec with the files in `folder` instead of digests."""
    files = {name: str(folder / digest) for name, digest in file_digests(spec).items()}
    return spec.model_copy(update={"options": spec.options | files})


def checked_options(spec: TaskSpec) -> Options:
    """Returns the options without digests such as `path_sha256`. Raises ValueError if a file has another digest."""
    wanted = {name: value for name, value in spec.options.items() if is_digest_of_file(name)}
    for name, value in wanted.items():
        path = spec.options.get(name.removesuffix(_DIGEST))
        if path is None:
            raise ValueError(
                f"task {spec.name!r}: {name} is set, but {name.removesuffix(_DIGEST)} is not; set it to the file's path"
            )
        found = digest_of(Path(str(path)))
        if found != value:
            raise ValueError(
                f"task {spec.name!r}: {path} has SHA-256 {found}, but {name} is {value}; use the file with that digest"
            )
    return without_digests(spec).options


def without_digests(spec: TaskSpec) -> TaskSpec:
    """Returns the spec without digests such as `path_sha256`, and reads no file."""
    options = {name: value for name, value in spec.options.items() if not is_digest_of_file(name)}
    return spec.model_copy(update={"options": options})


def is_digest_of_file(name: str) -> bool:
    """Returns whether a task's option of this name is the digest of another option's file."""
    return name.endswith(_DIGEST) and is_file_option(name.removesuffix(_DIGEST))


def digest_of(path: Path) -> str:
    """Returns the SHA-256 digest of a file, or of the tar file of a folder, in hexadecimal."""
    if path.is_dir():
        digest = hashlib.sha256()
        _write_tar(path, SimpleNamespace(write=digest.update))
        return digest.hexdigest()
    with open_data(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_data(path: Path) -> BufferedReader:
    """Opens a data file. Raises ValueError if there is none."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ValueError(f"no data file at {path}; check the path in the task's options") from None


def _copy_to_digest(path: Path, folder: Path) -> str:
    digest = digest_of(path)
    if not (folder / digest).exists():
        with write_atomically(folder / digest) as copy:
            if path.is_dir():
                _write_tar(path, copy)
            else:
                with path.open("rb") as source:
                    shutil.copyfileobj(source, copy)
        # Only the name without its folder: the page shows it.
        write_bytes_atomically(folder / f"{digest}{_NAME}", path.name.encode(), durable=False)
    return digest


def _write_tar(folder: Path, out: Any) -> None:
    """Writes the files of a folder as a tar file whose bytes depend only on their names and contents. `out` needs `write` only.

    Hidden files and folders inside it are left out: a download from the hub has a cache there.
    """
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                entry = tarfile.TarInfo(path.name)
                entry.size = path.stat().st_size
                with path.open("rb") as file:
                    tar.addfile(entry, file)


def unpacked_folder(path: Path) -> Path:
    """Returns the folder at `path`, or the folder of the tar file at `path`, which is unpacked beside it at the first call.

    Raises ValueError if the file is not such a tar file.
    """
    if path.is_dir():
        return path
    folder = path.with_name(path.name + _FOLDER)
    if folder.is_dir():
        return folder
    try:
        with folder_beside(folder) as partial, tarfile.open(path, mode="r:") as tar:
            tar.extractall(partial, filter="data")
            partial.rename(folder)
    except (OSError, tarfile.TarError) as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise ValueError(f"{path} is not the tar file of a folder: {error}") from None
    return folder
