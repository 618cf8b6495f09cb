"""The rollout table: all rows of one lease in one Parquet file. The schema is versioned and has no optional column.

    prompt_index   int32        which prompt of the lease
    sample_index   int32        which sample of that prompt
    prompt_tokens  list<int32>  the leased prompt, encoded by the policy's tokenizer
    output_tokens  list<int32>  the answer, its end token included
    logprobs       list<float>  log-prob of each output token under the sampling policy
    finish         int8         0: ended on an end token, 1: reached max_new_tokens
    proof          binary       TOPLOC proofs, one after another; empty for a one-token answer

There are no rewards, advantages or node ids: the swarm computes the first two and knows the third.
Rows are sorted by (prompt_index, sample_index). The footer names the format, the lease, the policy version and the
compute class that the worker declares.

`decode` reads files from untrusted senders. It checks the footer's counts, encodings and codecs and the sizes of all pages
before it decodes a value, because a 647-byte file can ask for a gigabyte. Still run it in a child process with limits on address
space and processor time, and treat a crash of the child as a malformed file: pyarrow aborts on some single changed bytes of a
footer.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.wire.codes import Rejected
from shoal.wire.requirements import CLASS_PATTERN, REPLAY_PATTERN

FORMAT = "shoal/rollouts/1"

SCHEMA = pa.schema(
    [
        pa.field("prompt_index", pa.int32(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("prompt_tokens", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("output_tokens", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        pa.field("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False)), nullable=False),
        pa.field("finish", pa.int8(), nullable=False),
        pa.field("proof", pa.binary(), nullable=False),
    ]
)

# DELTA_* decoders can be made to allocate without bound, and with a dictionary a few bytes can expand to any number
# of long values. Our writer uses neither.
_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED"}
_CODECS = {0: "UNCOMPRESSED", 6: "ZSTD"}
"""Codecs by Parquet's numbers. Every other one is one more decompressor that reads a stranger's bytes."""
_MAX_THRIFT_DEPTH = 16
_DATA_PAGES = (0, 3)
"""Parquet's numbers of data pages, versions 1 and 2."""
_METADATA_KEYS = (
    b"shoal.format",
    b"shoal.lease_id",
    b"shoal.policy_version",
    b"shoal.made_by",
    b"shoal.replay",
)


class Finish(IntEnum):
    """Why an answer ended: on an end token, at max_new_tokens, or on a stop string."""

    EOS = 0
    LENGTH = 1
    STOP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One answer. output_tokens and logprobs have the same length T; the proof covers decode states 0 .. T-2."""

    prompt_index: int
    sample_index: int
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTable:
    """The content of one file."""

    lease_id: str
    policy_version: int
    rows: tuple[Rollout, ...]
    made_by: str = ""
    """The compute class that the worker declares (requirements.ComputeClass); empty if it declares none."""
    replay: str = ""
    """The terms under which the worker promises the same bits again (requirements.ReplayTerms); empty if it promises none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLimits:
    """The size that a lease allows a file to have after decoding."""

    max_rows: int
    max_prompt_tokens: int
    max_output_tokens: int
    max_proof_bytes: int

    def max_values(self, column: str) -> int:
        """Returns how many values a column may have."""
        per_row = {
            "prompt_tokens.list.element": self.max_prompt_tokens,
            "output_tokens.list.element": self.max_output_tokens,
            "logprobs.list.element": self.max_output_tokens,
        }
        # The footer counts an empty list as one value.
        return self.max_rows * max(1, per_row.get(column, 1))

    @property
    def max_proof_column_bytes(self) -> int:
        """Uncompressed bytes, with a length before each value; doubled because a writer may add statistics per page."""
        return 2 * self.max_rows * (self.max_proof_bytes + 4) + 4096

    def max_page_bytes(self, column: str, num_values: int, num_pages: int) -> int:
        """Returns how many uncompressed bytes the pages of a column may have together: twice what its values need."""
        if column == "proof":
            return self.max_proof_column_bytes
        return 2 * 4 * num_values + 64 * num_pages + 4096


def encode(table: RolloutTable) -> bytes:
    """Returns the file's bytes. The same version of pyarrow writes the same bytes for the same table."""
    rows = sorted(table.rows, key=lambda row: (row.prompt_index, row.sample_index))
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in SCHEMA}
    columns["finish"] = [int(finish) for finish in columns["finish"]]
    values = (FORMAT, table.lease_id, str(table.policy_version), table.made_by, table.replay)
    metadata = {key: value for key, value in zip(_METADATA_KEYS, values, strict=True) if value}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.write_table(pa.Table.from_pydict(columns, schema=SCHEMA))
        writer.add_key_value_metadata(metadata)
    return bytes(sink.getvalue())


def decode(data: bytes, limits: TableLimits) -> RolloutTable:
    """Returns the table. Raises Rejected (reject.malformed_file, oversized_table, bad_values or malformed_proof)."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        _check_footer(file, limits)
        _check_codecs(data)
        _check_pages(data, file.metadata, limits)
        metadata = file.metadata.metadata or {}
        arrow = file.read(use_threads=False)
        arrow.validate(full=True)
    except Rejected:
        raise
    except MemoryError:  # includes pyarrow's ArrowMemoryError: the child's address-space limit was reached
        raise Rejected(
            "reject.oversized_table", "decoding needs more memory than a submission may take"
        ) from None
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise Rejected("reject.malformed_file", f"not readable as Parquet: {str(error)[:200]}") from None
    return _to_table(arrow, metadata, limits)


def _check_footer(file: Any, limits: TableLimits) -> None:
    meta = file.metadata
    found = file.schema_arrow.remove_metadata()
    if not found.equals(SCHEMA):
        raise Rejected("reject.malformed_file", f"schema is {_describe(found)}, expected {_describe(SCHEMA)}")
    if meta.num_rows > limits.max_rows:
        raise Rejected("reject.oversized_table", f"{meta.num_rows} rows, the lease allows {limits.max_rows}")
    values: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for column in _column_chunks(meta):
        if not set(column.encodings) <= _ENCODINGS:
            raise Rejected(
                "reject.malformed_file",
                f"{column.path_in_schema}: encodings {column.encodings} are not allowed",
            )
        values[column.path_in_schema] += column.num_values
        num_bytes[column.path_in_schema] += column.total_uncompressed_size
    for name, total in values.items():
        if total > limits.max_values(name):
            raise Rejected(
                "reject.oversized_table",
                f"{name}: {total} values, the lease allows {limits.max_values(name)}",
            )
    if num_bytes["proof"] > limits.max_proof_column_bytes:
        raise Rejected(
            "reject.oversized_table",
            f"proof: {num_bytes['proof']} bytes, the lease allows {limits.max_proof_column_bytes}",
        )


def _check_codecs(data: bytes) -> None:
    # Not by pyarrow's `column.compression`: pyarrow 26 aborts the process if the footer names an unknown codec.
    num_bytes = int.from_bytes(data[-8:-4], "little")
    footer = _ThriftReader(data, len(data) - 8 - num_bytes, len(data) - 8).read_struct()
    found = {column[3][4] for group in footer[4] for column in group[1]}
    if not found <= _CODECS.keys():
        raise Rejected(
            "reject.malformed_file",
            f"compressed with codec {sorted(found - _CODECS.keys())}, allowed: {_CODECS}",
        )


def _check_pages(data: bytes, meta: Any, limits: TableLimits) -> None:
    """Refuses pages that expand to more bytes than their values need.

    pyarrow decompresses a whole page for its first value: 16 pages of 700 MB of zeros fit into 40 KB and take 20 s to read.
    """
    values: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for column in _column_chunks(meta):
        name = column.path_in_schema
        values[name] += column.num_values
        for size in _page_sizes(data, column):
            pages[name] += 1
            num_bytes[name] += size
            # Checked at every page: a file of millions of empty pages must not be walked to its end.
            if pages[name] > max(1, values[name]):
                raise Rejected(
                    "reject.malformed_file", f"{name}: more pages than its {values[name]} values need"
                )
    for name, total in num_bytes.items():
        if total > (allowed := limits.max_page_bytes(name, values[name], pages[name])):
            raise Rejected(
                "reject.oversized_table",
                f"{name}: pages of {total} bytes for {values[name]} values, at most {allowed}",
            )


def _page_sizes(data: bytes, column: Any) -> Iterator[int]:
    """Yields the uncompressed size of each page of a column chunk, from the header before it. Raises Rejected or ValueError."""
    if column.dictionary_page_offset:
        raise Rejected("reject.malformed_file", f"{column.path_in_schema}: dictionaries are not allowed")
    at = column.data_page_offset
    end = at + column.total_compressed_size
    if not 0 <= at <= end <= len(data):
        raise ValueError(f"column chunk at bytes {at} to {end} of {len(data)}")
    while at < end:
        reader = _ThriftReader(data, at, end)
        header = reader.read_struct()
        kind, size, compressed = header[1], header[2], header[3]
        if kind not in _DATA_PAGES or min(size, compressed) < 0:
            raise ValueError(f"page of type {kind} and {size} bytes, {compressed} compressed")
        yield size
        at = reader.at + compressed
    if at != end:
        raise ValueError(f"a page ends {at - end} bytes after its column chunk")


class _ThriftReader:
    """Reads structs of Thrift's compact protocol, which Parquet's footer and page headers are written in.

    Raises ValueError for what Thrift's own reader would read in another way (numbers that it cuts to their type, fields that
    occur twice): otherwise a page could have one size here and another one in pyarrow.
    """

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self._data, self.at, self._end = data, at, end

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        """Returns the values of a struct by field number: integers, bytes, lists and structs."""
        fields: dict[int, Any] = {}
        number = 0
        while kind := (head := self._byte()) & 15:
            number = number + (head >> 4) if head >> 4 else self._integer(16)
            if number in fields or not 0 < number < 1 << 15:
                raise ValueError(f"Thrift field {number} occurs twice or cannot exist")
            fields[number] = kind == 1 if kind <= 2 else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        """Returns a value of one of Thrift's types, given by its number."""
        if depth > _MAX_THRIFT_DEPTH:
            raise ValueError(f"Thrift values are nested deeper than {_MAX_THRIFT_DEPTH} levels")
        match kind:
            case 1 | 2 | 3:  # a boolean of a list, or a byte
                return self._byte()
            case 4 | 5 | 6:  # integers
                return self._integer({4: 16, 5: 32, 6: 64}[kind])
            case 7:  # a double
                return self._bytes(8)
            case 8:  # bytes or text
                return self._bytes(self._varint(31))
            case 9 | 10:  # a list or a set
                head = self._byte()
                size = head >> 4 if head >> 4 < 15 else self._varint(31)
                return [self._value(head & 15, depth + 1) for _ in range(size)]
            case 12:
                return self.read_struct(depth + 1)
            case _:
                raise ValueError(f"Thrift type {kind} is not used by Parquet")

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        start = self.at
        if start < 0 or start + count > self._end:
            raise ValueError("a Thrift struct goes on after its end")
        self.at = start + count
        return self._data[start : self.at]

    def _integer(self, num_bits: int) -> int:
        word = self._varint(num_bits)
        return word >> 1 ^ -(word & 1)

    def _varint(self, num_bits: int) -> int:
        word = shift = 0
        while True:
            byte = self._byte()
            word |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift > 63:
                raise ValueError("a Thrift number has more than 10 bytes")
        if word >> num_bits:
            raise ValueError(f"a Thrift number has more than {num_bits} bits")
        return word


def _column_chunks(meta: Any) -> Iterator[Any]:
    for group in range(meta.num_row_groups):
        for index in range(meta.num_columns):
            yield meta.row_group(group).column(index)


def _to_table(arrow: Any, metadata: dict[bytes, bytes], limits: TableLimits) -> RolloutTable:
    found, lease_id, version, made_by, replay = (
        metadata.get(key, b"").decode("ascii", "replace") for key in _METADATA_KEYS
    )
    problem = ""
    if found != FORMAT:
        problem = f"format is {found!r}, expected {FORMAT!r}"
    # At most 15 digits: int() raises on thousands of digits, and no version is past 2**53.
    elif not re.fullmatch(r"[0-9]{1,15}", version):
        problem = f"policy version is {version[:32]!r}, expected a number"
    elif made_by and not CLASS_PATTERN.fullmatch(made_by):
        problem = f"compute class is {made_by[:64]!r}, expected DEVICE/ENGINE/KERNELS/PRECISION"
    elif replay and not REPLAY_PATTERN.fullmatch(replay):
        problem = f"replay terms are {replay[:64]!r}, expected MACHINE/THREADS/ROWS"
    if problem:
        raise Rejected("reject.malformed_file", problem)
    rows = tuple(_to_rollout(row, limits) for row in arrow.to_pylist())
    # Rewards have no row ids and follow the order of rows: a sender that chose the order could swap the rewards of answers.
    places = [(row.prompt_index, row.sample_index) for row in rows]
    if places != sorted(places):
        raise Rejected("reject.malformed_file", "rows are not sorted by prompt_index, sample_index")
    return RolloutTable(
        lease_id=lease_id,
        policy_version=int(version),
        rows=rows,
        made_by=made_by,
        replay=replay,
    )


def _to_rollout(row: dict[str, Any], limits: TableLimits) -> Rollout:
    where = f"row ({row['prompt_index']}, {row['sample_index']})"
    num_tokens = len(row["output_tokens"])
    code, problem = "reject.bad_values", ""
    if not 1 <= num_tokens <= limits.max_output_tokens:
        problem = f"{num_tokens} output tokens, allowed 1 to {limits.max_output_tokens}"
    elif len(row["logprobs"]) != num_tokens:
        problem = f"{len(row['logprobs'])} log-probs for {num_tokens} tokens"
    elif len(row["prompt_tokens"]) > limits.max_prompt_tokens:
        problem = f"{len(row['prompt_tokens'])} prompt tokens, at most {limits.max_prompt_tokens}"
    elif len(row["proof"]) > limits.max_proof_bytes:
        code = "reject.malformed_proof"
        problem = f"{len(row['proof'])} proof bytes, at most {limits.max_proof_bytes}"
    elif row["finish"] not in (0, 1, 2):
        problem = f"finish is {row['finish']}, expected 0, 1 or 2"
    if problem:
        raise Rejected(code, f"{where}: {problem}")
    return Rollout(
        prompt_index=row["prompt_index"],
        sample_index=row["sample_index"],
        prompt_tokens=tuple(row["prompt_tokens"]),
        output_tokens=tuple(row["output_tokens"]),
        logprobs=tuple(row["logprobs"]),
        finish=Finish(row["finish"]),
        proof=row["proof"],
    )


def _describe(schema: Sequence[Any]) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
