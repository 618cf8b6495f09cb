"""Reads the rows of a data file one by one, by an index that is made once and kept beside the file.

A file of 285,000 rows is gigabytes as Python objects, and checking its gold answers takes math-verify minutes. So the file is
read once, row by row. The index keeps what choosing a row needs: where the row is, its question's hash and length, its solve
rates, and which rows are unusable and why. A row is parsed again when it is asked for.

    RowIndex.load(path, ...)   the index of a file: from its cache if that has the file's digest, else made and cached
    RowIndex.row(place)        the row itself

The cache of FILE is FILE.index, or a file in the user's cache folder if that folder cannot be written. It is replaced atomically,
so several processes can use it at once; two that find none both make the same one. A JSON Lines file is read in place. Rows of
Parquet, CSV and JSON arrays are kept as JSON Lines in FILE.rows, since those cannot be read at a position.
"""

import codecs
import contextlib
import csv
import hashlib
import io
import json
import os
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from shoal.files import write_atomically, write_bytes_atomically
from shoal.tasks.datasets.file_options import digest_of, open_data
from shoal.tasks.datasets.overlap import question_key
from shoal.tasks.task import Problem

Row = dict[str, Any]
Array = np.ndarray[Any, Any]

INDEX_VERSION = 3
"""Increase it when the index of the same file would differ, so that caches are made again."""
CACHE_FROM_ROWS = 1000
"""A smaller file is indexed again each time: that is fast enough without a cache file."""
BATCH_ROWS = 500
BATCH_CHARS = 4 << 20
"""Problems whose gold answers are checked together: at most this many, and about this many characters."""
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"PK\x03\x04": "unzip"}
"""First bytes of compressed files, and the commands that unpack them."""
SOLVE_RATE = "solve_rate"
"""How the names of columns with a solve rate begin."""


@dataclass(frozen=True, slots=True)
class IndexedFormat:
    """The functions of a data set's format that an index needs."""

    name: str
    key: str
    """Everything that the index depends on besides the file and the name."""
    read: Callable[[Row], Problem]
    """Returns the problem of a row as it is asked in chat; raises if the row is unusable."""
    is_held_out: Callable[[str], bool]
    find_bad: Callable[[Sequence[Problem]], dict[int, str]]
    """Returns the problems whose answers cannot be graded, and why."""
    kinds: frozenset[str] = frozenset()
    """The values of `task_type` whose rows are read; empty reads all."""


@dataclass
class RowIndex:
    """The usable rows of a file, in its order, and the reasons why the others are unusable."""

    numbers: Array
    """Row numbers, from 1: the line in a JSON Lines file, else the position."""
    starts: Array
    lengths: Array
    keys: Array
    """`question_key` of each row."""
    held_out: Array
    chars: Array
    """Number of characters of each prompt in style "chat"."""
    kinds: Array
    """Place of each row's task_type in `kind_names`."""
    rates: dict[str, Array]
    """The columns with solve rates; NaN where a row has none."""
    kind_names: list[str]
    num_rows: int
    bad: dict[int, str]
    rows_fd: int
    """File descriptor of the rows, closed with the index."""

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.rows_fd)

    @classmethod
    def load(
        cls, path: Path, format: IndexedFormat, *, known_bad: frozenset[int] | None = None
    ) -> "RowIndex":
        """Returns the index of a file. With `known_bad` these rows are unusable, and gold answers are not checked."""
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give a data file, such as {path / 'train.jsonl'}")
        key = _cache_key(path, format)
        for base in _cache_bases(path, key):
            found = _read_cache(base, path, key)
            if found is not None and (known_bad is None or known_bad == found.bad.keys()):
                return found
        return _build(path, format, key, known_bad)

    def row(self, place: int) -> Row:
        """Returns the row at this place among the usable ones."""
        data = os.pread(self.rows_fd, int(self.lengths[place]), int(self.starts[place]))
        row: Row = json.loads(data)
        return row

    def __len__(self) -> int:
        return len(self.numbers)


def copy_index(source: Path, copy: Path, format: IndexedFormat) -> None:
    """Gives a copy of a data file the cached index of its source, if there is one."""
    key = _cache_key(source, format)
    for base in _cache_bases(source, key):
        if _read_cache(base, source, key) is None:
            continue
        for suffix in (".rows", ".index"):
            old, new = base.with_name(base.name + suffix), copy.with_name(copy.name + suffix)
            if old.exists() and not new.exists():
                with old.open("rb") as file:
                    _copy_file(file, new)
        return


# -- cache ------------------------------------------------------------------------------------------------


def _cache_key(path: Path, format: IndexedFormat) -> str:
    """Returns everything that the index of a file depends on."""
    try:
        grader = version("math-verify")
    except PackageNotFoundError:
        grader = "none"
    return f"{INDEX_VERSION}/{format.name}/{format.key}/{digest_of(path)}/{grader}"


def _cache_bases(path: Path, key: str) -> list[Path]:
    """Returns the paths that caches of a file have without their suffix: beside the file, and in the user's cache folder."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [path, home / "shoal" / "data" / hashlib.sha256(key.encode()).hexdigest()[:32]]


def _read_cache(base: Path, path: Path, key: str) -> RowIndex | None:
    """Returns the cached index, or None if there is none, or one of another file or release."""
    index, rows = base.with_name(f"{base.name}.index"), base.with_name(f"{base.name}.rows")
    try:
        with np.load(io.BytesIO(index.read_bytes()), allow_pickle=False) as arrays:
            meta = json.loads(arrays["meta"].tobytes())
            if meta["key"] != key:
                return None
            named = {name: arrays[name] for name in _ARRAYS}
            rates = {name: arrays[f"rate/{name}"] for name in meta["rates"]}
        if meta["rows_bytes"] and rows.stat().st_size != meta["rows_bytes"]:
            return None
        fd = os.open(rows if meta["rows_bytes"] else path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    bad = {int(number): reason for number, reason in meta["bad"].items()}
    return RowIndex(
        **named, rates=rates, kind_names=meta["kinds"], num_rows=meta["num_rows"], bad=bad, rows_fd=fd
    )


_ARRAYS = {
    "numbers": "i4", "starts": "i8", "lengths": "i4", "keys": "u8", "held_out": "?", "chars": "i4", "kinds": "i4"
}  # fmt: skip
"""The columns of an index and their types."""


def _write_cache(base: Path, index: RowIndex, key: str, rows_bytes: int) -> None:
    meta = {
        "key": key,
        "rates": list(index.rates),
        "kinds": index.kind_names,
        "num_rows": index.num_rows,
        "bad": index.bad,
        "rows_bytes": rows_bytes,
    }
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    arrays |= {f"rate/{name}": column for name, column in index.rates.items()}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_bytes_atomically(base.with_name(f"{base.name}.index"), buffer.getvalue())


# -- building ---------------------------------------------------------------------------------------------


def _build(path: Path, format: IndexedFormat, key: str, known_bad: frozenset[int] | None) -> RowIndex:
    builder = _IndexBuilder(format, known_bad)
    in_place = _layout(path) == "lines"
    with path.open("rb") if in_place else tempfile.TemporaryFile() as rows:
        builder.add_all(_lines(rows) if in_place else _copied(read_rows(path), rows))
        rows.flush()
        index = builder.finish(os.dup(rows.fileno()))
        rows_bytes = 0 if in_place else os.fstat(rows.fileno()).st_size
        if index.num_rows < CACHE_FROM_ROWS:
            return index
        for base in _cache_bases(path, key):
            with contextlib.suppress(OSError):  # a folder that cannot be written, or a full disk
                # Root may write anywhere, but a folder without write permission must stay as it is.
                if base.parent.exists() and not base.parent.stat().st_mode & 0o222:
                    continue
                if rows_bytes:
                    _copy_file(rows, base.with_name(f"{base.name}.rows"))
                _write_cache(base, index, key, rows_bytes)
                break
    return index


def _copy_file(source: IO[bytes], path: Path) -> None:
    with write_atomically(path) as target:
        source.seek(0)
        shutil.copyfileobj(source, target)


@dataclass(slots=True)
class _RawRow:
    """A row and its place in the file of rows."""

    number: int
    row: Row | str
    """A text says why it is not a row."""
    start: int
    length: int


class _IndexBuilder:
    """Collects what an index keeps of each row. Gold answers are checked by all cores while rows are read."""

    def __init__(self, format: IndexedFormat, known_bad: frozenset[int] | None) -> None:
        self._format, self._known_bad = format, known_bad
        self._bad: dict[int, str] = {}
        self._columns: dict[str, list[Any]] = {name: [] for name in _ARRAYS}
        self._rates: dict[str, list[float]] = {}
        self._kinds: dict[str, int] = {}
        self._num_rows = 0
        self._batch: list[tuple[int, Problem]] = []
        self._batch_chars = 0
        self._checks: list[tuple[list[int], Future[dict[int, str]]]] = []

    def add_all(self, rows: Iterator[_RawRow]) -> None:
        cores = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(cores, thread_name_prefix="gold") as pool:
            for raw in rows:
                self._add(raw)
                if len(self._batch) >= BATCH_ROWS or self._batch_chars >= BATCH_CHARS:
                    numbers, problems = self._take()
                    self._checks.append((numbers, pool.submit(self._format.find_bad, problems)))
                    while sum(not one.done() for _, one in self._checks) > 2 * cores:
                        # Otherwise the problems of the whole file would wait in memory.
                        next(one for _, one in self._checks if not one.done()).result()
            numbers, problems = self._take()
            # Checked in this thread: another thread would start its own child process for mathematics, too slow for a small file.
            last = self._format.find_bad(problems) if numbers else {}
            self._bad |= {numbers[place]: reason for place, reason in last.items()}
            for several, found in self._checks:
                self._bad |= {several[place]: reason for place, reason in found.result().items()}

    def _take(self) -> tuple[list[int], list[Problem]]:
        """Returns the numbers and problems of the rows that wait to be checked, and forgets them."""
        batch, self._batch, self._batch_chars = self._batch, [], 0
        return [number for number, _ in batch], [problem for _, problem in batch]

    def _add(self, raw: _RawRow) -> None:
        row, kinds = raw.row, self._format.kinds
        if kinds and not isinstance(row, str) and row.get("task_type") not in kinds:
            return
        self._num_rows += 1
        if self._known_bad is not None and raw.number in self._known_bad:
            self._bad[raw.number] = "the run's list of unusable rows has it"
            return
        try:
            if isinstance(row, str):
                raise ValueError(row)
            problem = self._format.read(row)
            for text in (problem.prompt, *(content for _, content in problem.messages)):
                text.encode()  # JSON may contain half a surrogate pair, which no lease could carry
        except KeyError as error:
            has = sorted(row)[:12]
            self._bad[raw.number] = f"no field {error}, which {self._format.name} needs; it has {has}"
            return
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            self._bad[raw.number] = str(error)
            return
        self._keep(raw, row, problem)
        if self._known_bad is None:
            self._batch.append((raw.number, problem))
            self._batch_chars += len(problem.check) + len(problem.prompt)

    def _keep(self, raw: _RawRow, row: Row, problem: Problem) -> None:
        kind = row.get("task_type")
        # All turns: conversations often end with the same words, such as "Go on."
        asked = "\n\n".join([*(text for _, text in problem.messages), problem.prompt])
        values = {
            "numbers": raw.number,
            "starts": raw.start,
            "lengths": raw.length,
            "keys": question_key(asked),
            "held_out": self._format.is_held_out(asked),
            "chars": len(asked),
            "kinds": self._kinds.setdefault(kind if isinstance(kind, str) else "", len(self._kinds)),
        }
        for name, value in values.items():
            self._columns[name].append(value)
        count = len(self._columns["numbers"])
        for name, value in row.items():
            if name.startswith(SOLVE_RATE) and isinstance(value, int | float):
                column = self._rates.setdefault(name, [])
                column += [float("nan")] * (count - 1 - len(column))
                column.append(float(value))

    def finish(self, rows_fd: int) -> RowIndex:
        arrays = {name: np.array(column, _ARRAYS[name]) for name, column in self._columns.items()}
        count = len(arrays["numbers"])
        good = ~np.isin(arrays["numbers"], np.array(sorted(self._bad), dtype="i4"))
        rates = {
            name: np.array(column + [float("nan")] * (count - len(column)), dtype="f4")[good]
            for name, column in self._rates.items()
        }
        return RowIndex(
            **{name: array[good] for name, array in arrays.items()},
            rates=rates,
            kind_names=list(self._kinds),
            num_rows=self._num_rows,
            bad=dict(sorted(self._bad.items())),
            rows_fd=rows_fd,
        )


# -- files ------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Yields all rows with their numbers, from 1: the line in a JSON Lines file, else the position in the list.

    A row that is not an object is yielded as a text that says so. Raises ValueError if the file cannot be read at all.
    """
    layout = _layout(path)
    if layout == "parquet":
        yield from _parquet_rows(path)
    elif layout == "csv":
        yield from _csv_rows(path)
    elif layout == "lines":
        with path.open("rb") as file:
            yield from ((raw.number, raw.row) for raw in _lines(file))
    else:
        try:
            rows = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}; is the file complete?") from None
        for number, row in enumerate(rows, start=1):
            yield number, _object_or_problem(row)


def _layout(path: Path) -> Literal["parquet", "array", "lines", "csv"]:
    """Returns how the file is written, by its first characters. Raises ValueError for a file whose rows cannot be found."""
    with open_data(path) as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8)
    if start[:4] == b"PAR1":
        return "parquet"
    for magic, tool in _COMPRESSED.items():
        if start.startswith(magic):
            raise ValueError(f"{path} is compressed; unpack it with {tool}")
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path} is in UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8 {path} > NEW_FILE")
    text = start.lstrip()
    if text.startswith((b"{\n", b"{\r\n")):
        raise ValueError(
            f"{path}: its first JSON object takes several lines, and a row must be on one line: jq -c . {path} > NEW_FILE. If the "
            f"rows are a list inside the object, write that list alone: jq -c '.NAME[]' {path} > NEW_FILE"
        )
    first = text[:1]
    return "array" if first == b"[" else "lines" if first in (b"{", b"") else "csv"


def _lines(file: IO[bytes]) -> Iterator[_RawRow]:
    start = 0
    for number, whole in enumerate(file, start=1):
        # Programs of Windows begin a file with a byte order mark, which is no JSON.
        line = whole.removeprefix(codecs.BOM_UTF8) if number == 1 else whole
        if line.strip():
            yield _RawRow(number, _parse(line), start + len(whole) - len(line), len(line))
        start += len(whole)


def _parse(line: bytes) -> Row | str:
    try:
        return _object_or_problem(json.loads(line))
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"


def _object_or_problem(row: object) -> Row | str:
    return row if isinstance(row, dict) else f"{type(row).__name__}, expected an object"


def _copied(rows: Iterator[tuple[int, Row | str]], target: IO[bytes]) -> Iterator[_RawRow]:
    """Writes rows as JSON Lines and yields each with its place."""
    start = 0
    for number, row in rows:
        data = b"" if isinstance(row, str) else json.dumps(row, default=str).encode() + b"\n"
        target.write(data)
        yield _RawRow(number, row, start, len(data))
        start += len(data)


def _csv_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Yields the rows of CSV with a line of column names. A row's number is that of its last line, as an editor shows it.

    The columns are separated by commas or, if the line of names has none, by tabs or semicolons.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = file.readline()
            file.seek(0)
            delimiter = next((one for one in (",", "\t", ";") if one in names), ",")
            reader = csv.DictReader(file, strict=True, delimiter=delimiter)
            for row in reader:
                good = None not in row and None not in row.values()
                expected = len(reader.fieldnames or ())
                yield (
                    reader.line_num,
                    row if good else f"{expected} columns expected, as in line 1; is it CSV?",
                )
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"{path}: not JSON, not Parquet, and not CSV in UTF-8: {error}; correct the file, or save it as CSV in UTF-8"
        ) from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}; is it complete?") from None
