"""The rollout table: the golden file, round trips, and malicious files."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.wire.codes import CODES, Rejected
from shoal.wire.record import canonical_json
from shoal.wire.rollouts import FORMAT, SCHEMA, Finish, Rollout, RolloutTable, TableLimits, decode, encode

DOC = Path(__file__).parents[2] / "docs" / "wire" / "rollouts.md"
FIXTURE = Path(__file__).parent / "rollouts_v1.parquet"
BROKEN = Path(__file__).parent / "broken_rollouts.py"
LIMITS = TableLimits(max_rows=4, max_prompt_tokens=8, max_output_tokens=4, max_proof_bytes=16)
METADATA = {"shoal.format": FORMAT, "shoal.lease_id": "0123456789abcdef" * 2, "shoal.policy_version": "3"}


def documented() -> dict[str, Any]:
    block = re.search(r"```json\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    content: dict[str, Any] = json.loads(block[1])
    return content


def golden_table() -> RolloutTable:
    content = documented()
    rows = tuple(
        Rollout(
            prompt_index=row["prompt_index"],
            sample_index=row["sample_index"],
            prompt_tokens=tuple(row["prompt_tokens"]),
            output_tokens=tuple(row["output_tokens"]),
            logprobs=tuple(row["logprobs"]),
            finish=Finish(row["finish"]),
            proof=bytes.fromhex(row["proof"]),
        )
        for row in content["rows"]
    )
    return RolloutTable(lease_id=content["lease_id"], policy_version=content["policy_version"], rows=rows)


def content_sha256(table: RolloutTable) -> str:
    rows = [
        {
            "prompt_index": row.prompt_index,
            "sample_index": row.sample_index,
            "prompt_tokens": list(row.prompt_tokens),
            "output_tokens": list(row.output_tokens),
            "logprobs": list(row.logprobs),
            "finish": int(row.finish),
            "proof": row.proof.hex(),
        }
        for row in table.rows
    ]
    content = {"lease_id": table.lease_id, "policy_version": table.policy_version, "rows": rows}
    return hashlib.sha256(canonical_json(content)).hexdigest()


def write(
    columns: dict[str, list[Any]] | None = None,
    *,
    schema: Any = SCHEMA,
    metadata: dict[str, str] | None = None,
    **options: Any,
) -> bytes:
    """Returns a file that our own writer would not write."""
    if columns is None:
        rows = golden_table().rows
        columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    sink = pa.BufferOutputStream()
    options = {"compression": "zstd", "use_dictionary": False, "store_schema": False} | options
    with pq.ParquetWriter(sink, schema, **options) as writer:
        writer.write_table(pa.Table.from_pydict(columns, schema=schema))
        writer.add_key_value_metadata(METADATA if metadata is None else metadata)
    return bytes(sink.getvalue())


def one_row(**changes: Any) -> dict[str, list[Any]]:
    row = {
        "prompt_index": 0,
        "sample_index": 0,
        "prompt_tokens": [1],
        "output_tokens": [2],
        "logprobs": [-1.0],
        "finish": 0,
        "proof": b"",
    }
    return {name: [value] for name, value in (row | changes).items()}


def refusal(data: bytes, limits: TableLimits = LIMITS) -> str:
    with pytest.raises(Rejected) as caught:
        decode(data, limits)
    return caught.value.code


def test_the_golden_file_decodes_to_the_documented_rows() -> None:
    table = decode(FIXTURE.read_bytes(), LIMITS)
    assert table == golden_table()
    assert content_sha256(table) == documented()["content_sha256"]


def test_the_same_writer_gives_the_same_bytes() -> None:
    assert encode(golden_table()) == encode(golden_table())
    written_by = pq.ParquetFile(FIXTURE).metadata.created_by
    if written_by == f"parquet-cpp-arrow version {pa.__version__}":
        assert encode(golden_table()) == FIXTURE.read_bytes()


def test_rows_are_written_in_order() -> None:
    table = golden_table()
    shuffled = replace(table, rows=tuple(reversed(table.rows)))
    assert decode(encode(shuffled), LIMITS) == table


def test_rows_out_of_order_are_refused() -> None:
    # Rewards follow the order of rows, so the sender must not choose the order.
    rows = tuple(reversed(golden_table().rows))
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    assert refusal(write(columns)) == "reject.malformed_file"


@st.composite
def tables(draw: st.DrawFn) -> RolloutTable:
    rows = []
    for index in range(draw(st.integers(0, 4))):
        length = draw(st.integers(1, 4))
        tokens = st.integers(-(2**31), 2**31 - 1)
        logprobs = st.floats(width=32, allow_nan=False)
        rows.append(
            Rollout(
                prompt_index=index // 2,
                sample_index=index % 2,
                prompt_tokens=tuple(draw(st.lists(tokens, max_size=8))),
                output_tokens=tuple(draw(st.lists(tokens, min_size=length, max_size=length))),
                logprobs=tuple(draw(st.lists(logprobs, min_size=length, max_size=length))),
                finish=draw(st.sampled_from(Finish)),
                proof=draw(st.binary(max_size=16)),
            )
        )
    return RolloutTable(
        lease_id=f"{draw(st.integers(0, 2**128 - 1)):032x}",
        policy_version=draw(st.integers(0, 10**15 - 1)),
        rows=tuple(rows),
    )


@given(tables())
@settings(deadline=None, derandomize=True, max_examples=50)
def test_every_table_survives(table: RolloutTable) -> None:
    assert decode(encode(table), LIMITS) == table


# -- limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (replace(LIMITS, max_rows=3), "reject.oversized_table"),
        (replace(LIMITS, max_prompt_tokens=2), "reject.oversized_table"),
        (replace(LIMITS, max_output_tokens=2), "reject.oversized_table"),
        # All rows together stay within the limit, but one row does not.
        (replace(LIMITS, max_output_tokens=3), "reject.bad_values"),
        (replace(LIMITS, max_proof_bytes=4), "reject.malformed_proof"),
    ],
)
def test_more_than_the_lease_allows_is_refused(limits: TableLimits, code: str) -> None:
    assert refusal(FIXTURE.read_bytes(), limits) == code


def test_a_list_bomb_is_refused_by_its_footer() -> None:
    # One row of eight million zeros: a few hundred bytes on disk, 32 MB in memory.
    bomb = write(one_row(prompt_tokens=[0] * 8_000_000), compression="zstd")
    assert len(bomb) < 5000
    assert refusal(bomb) == "reject.oversized_table"


def test_a_proof_bomb_is_refused_by_its_footer() -> None:
    bomb = write(one_row(proof=bytes(8_000_000)), compression="zstd")
    assert len(bomb) < 5000
    assert refusal(bomb) == "reject.oversized_table"


def test_a_page_that_expands_to_more_than_its_values_is_refused() -> None:
    # One page of eight million zeros whose header and footer say that it has one value. Reading it took 32 MB, and a file of
    # 40 KB with more and larger pages took 20 s of processor time.
    count = 8_000_000
    bomb = write(one_row(prompt_tokens=[0] * count), data_page_size=1 << 30, write_batch_size=count)
    honest, lie = zigzag_varint(count), zigzag_varint(1, width=len(zigzag_varint(count)))
    with pytest.raises(Rejected, match=r"pages of 320\d{5} bytes for 1 values") as caught:
        decode(bomb.replace(honest, lie), LIMITS)
    assert caught.value.code == "reject.oversized_table"


def test_more_pages_than_values_are_refused() -> None:
    columns = {name: values * 4 for name, values in one_row().items()}
    columns["sample_index"] = [0, 1, 2, 3]
    data = write(columns, data_page_size=1, write_batch_size=1)
    assert len(decode(data, LIMITS).rows) == 4
    # The footer's count of values of the first column, which has four pages: type 1, encodings, path, codec, count.
    before = b"prompt_index" + bytes([0x15, 6 << 1, 0x16])
    assert data.count(before + bytes([4 << 1])) == 1
    forged = data.replace(before + bytes([4 << 1]), before + bytes([2 << 1]))
    with pytest.raises(Rejected, match="more pages than its 2 values"):
        decode(forged, LIMITS)


def zigzag_varint(value: int, width: int = 0) -> bytes:
    """Returns Thrift's compact integer, padded to `width` bytes."""
    word, out = value << 1, bytearray()
    while word >= 0x80 or len(out) < width - 1:
        out.append(word & 0x7F | 0x80)
        word >>= 7
    return bytes([*out, word])


def test_a_dictionary_bomb_is_refused() -> None:
    columns = {name: values * 4 for name, values in one_row(proof=bytes(1_000_000)).items()}
    assert refusal(write(columns, use_dictionary=True)) == "reject.malformed_file"


# -- malformed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"PAR1PAR1", b"hello world", b"PAR1" + b"\xff" * 100 + b"PAR1"]
)
def test_data_that_is_not_parquet_is_refused(data: bytes) -> None:
    assert refusal(data) == "reject.malformed_file"


@pytest.mark.parametrize(
    "options",
    [
        {"use_dictionary": True},
        {"column_encoding": {"proof": "DELTA_LENGTH_BYTE_ARRAY"}},
        {"column_encoding": {"prompt_index": "DELTA_BINARY_PACKED"}},
        {"column_encoding": {"logprobs.list.element": "BYTE_STREAM_SPLIT"}},
    ],
)
def test_other_encodings_are_refused(options: dict[str, Any]) -> None:
    assert refusal(write(**options)) == "reject.malformed_file"


@pytest.mark.parametrize("codec", ["snappy", "gzip", "brotli", "lz4"])
def test_other_codecs_are_refused(codec: str) -> None:
    with pytest.raises(Rejected, match="codec") as caught:
        decode(write(compression=codec), LIMITS)
    assert caught.value.code == "reject.malformed_file"


def _without_column() -> Any:
    return SCHEMA.remove(SCHEMA.get_field_index("proof"))


def _with_rewards() -> Any:
    return SCHEMA.append(pa.field("rewards", pa.float32(), nullable=False))


def _wider_tokens() -> Any:
    wide = pa.list_(pa.field("element", pa.int64(), nullable=False))
    return SCHEMA.set(3, pa.field("output_tokens", wide, nullable=False))


def _nullable() -> Any:
    return SCHEMA.set(0, pa.field("prompt_index", pa.int32(), nullable=True))


@pytest.mark.parametrize("make_schema", [_without_column, _with_rewards, _wider_tokens, _nullable])
def test_another_schema_is_refused(make_schema: Callable[[], Any]) -> None:
    schema = make_schema()
    columns = {
        name: values for name, values in (one_row() | {"rewards": [1.0]}).items() if name in schema.names
    }
    assert refusal(write(columns, schema=schema)) == "reject.malformed_file"


@pytest.mark.parametrize(
    "change",
    [
        {"shoal.format": "shoal/rollouts/2"},
        {"shoal.policy_version": ""},
        {"shoal.policy_version": "-1"},
        {"shoal.policy_version": "3.0"},
        {"shoal.policy_version": "\u0663"},
        {"shoal.policy_version": "9" * 5000},
    ],
)
def test_a_footer_that_names_something_else_is_refused(change: dict[str, str]) -> None:
    assert refusal(write(metadata=METADATA | change)) == "reject.malformed_file"


def test_a_footer_without_metadata_is_refused() -> None:
    assert refusal(write(metadata={})) == "reject.malformed_file"


@pytest.mark.parametrize(
    "change",
    [
        {"output_tokens": [], "logprobs": []},
        {"output_tokens": [1, 2], "logprobs": [-1.0]},
        {"finish": 3},
        {"finish": -1},
    ],
)
def test_impossible_values_are_refused(change: dict[str, Any]) -> None:
    assert refusal(write(one_row(**change))) == "reject.bad_values"


def test_a_file_by_another_writer_is_accepted() -> None:
    choices: list[dict[str, Any]] = [
        {"compression": "none"},
        {"compression": "zstd", "data_page_size": 1},
        {"data_page_version": "2.0"},
        {"write_statistics": True, "write_page_index": True},
    ]
    for options in choices:
        assert decode(write(**options), LIMITS) == golden_table()


def test_truncated_files_are_refused() -> None:
    data = FIXTURE.read_bytes()
    for length in range(0, len(data), 7):
        assert refusal(data[:length]) == "reject.malformed_file"


def test_broken_files_are_refused_or_read_but_never_crash() -> None:
    # Some changed bytes do no harm (a letter of the name of the writer, for example). pyarrow itself
    # aborts on others (seed 4905), which is why untrusted files are read in a child process, here too.
    outcomes: dict[int, str] = {}
    seed, last = 4900, 6100
    while seed <= last:
        child = subprocess.run(
            [sys.executable, str(BROKEN), str(FIXTURE), str(seed), str(last)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        lines = [line.split() for line in child.stdout.splitlines()]
        outcomes |= {int(number): code for number, code in lines}
        seed += len(lines)
        if seed <= last:
            assert child.returncode < 0, child.stderr  # a signal, not an exception of ours
            outcomes[seed] = "died"
            seed += 1
    assert set(outcomes.values()) <= {"read", "died", *(code for code in CODES if code.startswith("reject."))}
    counts = Counter(outcomes.values())
    assert counts["died"] <= 12
    assert counts["reject.malformed_file"] > 900


def test_a_changed_value_does_not_pass_the_page_checksum() -> None:
    data = FIXTURE.read_bytes()
    table = golden_table()
    for index in range(4, 400):
        changed = bytearray(data)
        changed[index] ^= 0x10
        try:
            assert decode(bytes(changed), LIMITS).rows == table.rows
        except Rejected:
            continue
