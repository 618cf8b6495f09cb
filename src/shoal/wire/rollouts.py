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

`decode` reads files from untrusted senders. It checks the footer's counts and encodings before it decodes a value,
because a 647-byte file can ask for a gigabyte. Still run it in a child process with an address-space limit, and treat a
crash of the child as a malformed file: pyarrow aborts on some single changed bytes of a footer.
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
from shoal.wire.requirements import CLASS_PATTERN

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
_METADATA_KEYS = (b"shoal.format", b"shoal.lease_id", b"shoal.policy_version", b"shoal.made_by")


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


def encode(table: RolloutTable) -> bytes:
    """Returns the file's bytes. The same version of pyarrow writes the same bytes for the same table."""
    rows = sorted(table.rows, key=lambda row: (row.prompt_index, row.sample_index))
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in SCHEMA}
    columns["finish"] = [int(finish) for finish in columns["finish"]]
    metadata = {
        "shoal.format": FORMAT,
        "shoal.lease_id": table.lease_id,
        "shoal.policy_version": str(table.policy_version),
    }
    if table.made_by:
        metadata["shoal.made_by"] = table.made_by
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
        metadata = file.metadata.metadata or {}
        arrow = file.read(use_threads=False)
        arrow.validate(full=True)
    except Rejected:
        raise
    except MemoryError:  # includes pyarrow's ArrowMemoryError: the child's address-space limit was reached
        raise Rejected(
            "reject.oversized_table", "decoding needs more memory than a submission may take"
        ) from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
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
    # Do not read a column's codec here: pyarrow 26 aborts the process if the footer names an unknown one.
    # Reading the values of such a column raises as it should, and the counts below bound what any codec can expand to.
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


def _column_chunks(meta: Any) -> Iterator[Any]:
    for group in range(meta.num_row_groups):
        for index in range(meta.num_columns):
            yield meta.row_group(group).column(index)


def _to_table(arrow: Any, metadata: dict[bytes, bytes], limits: TableLimits) -> RolloutTable:
    values = {key: metadata.get(key, b"").decode("ascii", "replace") for key in _METADATA_KEYS}
    if values[b"shoal.format"] != FORMAT:
        raise Rejected("reject.malformed_file", f"format is {values[b'shoal.format']!r}, expected {FORMAT!r}")
    # At most 15 digits: int() raises on thousands of digits, and no version is past 2**53.
    if not re.fullmatch(r"[0-9]{1,15}", values[b"shoal.policy_version"]):
        raise Rejected(
            "reject.malformed_file",
            f"policy version is {values[b'shoal.policy_version'][:32]!r}, expected a number",
        )
    if (made_by := values[b"shoal.made_by"]) and not CLASS_PATTERN.fullmatch(made_by):
        raise Rejected(
            "reject.malformed_file",
            f"compute class is {made_by[:64]!r}, expected DEVICE/ENGINE/KERNELS/PRECISION",
        )
    rows = tuple(_to_rollout(row, limits) for row in arrow.to_pylist())
    # Rewards have no row ids and follow the order of rows: a sender that chose the order could swap the rewards of answers.
    places = [(row.prompt_index, row.sample_index) for row in rows]
    if places != sorted(places):
        raise Rejected("reject.malformed_file", "rows are not sorted by prompt_index, sample_index")
    return RolloutTable(
        lease_id=values[b"shoal.lease_id"],
        policy_version=int(values[b"shoal.policy_version"]),
        rows=rows,
        made_by=made_by,
    )


def _to_rollout(row: dict[str, Any], limits: TableLimits) -> Rollout:
    where = f"row ({row['prompt_index']}, {row['sample_index']})"
    num_tokens = len(row["output_tokens"])
    if not 1 <= num_tokens <= limits.max_output_tokens:
        raise Rejected(
            "reject.bad_values",
            f"{where}: {num_tokens} output tokens, allowed 1 to {limits.max_output_tokens}",
        )
    if len(row["logprobs"]) != num_tokens:
        raise Rejected(
            "reject.bad_values", f"{where}: {len(row['logprobs'])} log-probs for {num_tokens} tokens"
        )
    if len(row["prompt_tokens"]) > limits.max_prompt_tokens:
        raise Rejected(
            "reject.bad_values",
            f"{where}: {len(row['prompt_tokens'])} prompt tokens, at most {limits.max_prompt_tokens}",
        )
    if len(row["proof"]) > limits.max_proof_bytes:
        raise Rejected(
            "reject.malformed_proof",
            f"{where}: {len(row['proof'])} proof bytes, at most {limits.max_proof_bytes}",
        )
    if row["finish"] not in (0, 1, 2):
        raise Rejected("reject.bad_values", f"{where}: finish is {row['finish']}, expected 0, 1 or 2")
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
