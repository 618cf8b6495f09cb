"""Untrusted files: whatever they contain, the validator survives and refuses them with a reason."""

import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.swarm.validator.table_reader import (
    CPU_S,
    BadReply,
    ReaderFailed,
    TableReader,
    decode_reply,
    encode_table,
    extra_cpu_s,
)
from shoal.wire.codes import Rejected
from shoal.wire.rollouts import FORMAT, SCHEMA, Finish, Rollout, RolloutTable, TableLimits, encode

LIMITS = TableLimits(max_rows=8, max_prompt_tokens=64, max_output_tokens=32, max_proof_bytes=516)
LOOSE = TableLimits(max_rows=1000, max_prompt_tokens=10**9, max_output_tokens=10**9, max_proof_bytes=10**9)
METADATA = {"shoal.format": FORMAT, "shoal.lease_id": "a" * 32, "shoal.policy_version": "3"}


def rollout(prompt_index: int = 0, sample_index: int = 0, length: int = 5) -> Rollout:
    return Rollout(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_tokens=(1, 5, 6),
        output_tokens=tuple(range(3, 3 + length)),
        logprobs=tuple(-0.5 * step for step in range(length)),
        finish=Finish.LENGTH,
        proof=bytes(range(258 % 256)) * (length > 1),
    )


TABLE = RolloutTable(
    lease_id="a" * 32, policy_version=3, rows=(rollout(0, 0), rollout(0, 1, 1), rollout(1, 0, 32))
)


def refusal(reader: TableReader, data: bytes, limits: TableLimits = LIMITS) -> str:
    with pytest.raises(Rejected) as refused:
        reader.read(data, limits)
    return refused.value.code


def write(columns: dict[str, list[object]], schema: pa.Schema = SCHEMA) -> bytes:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, schema, compression="zstd", use_dictionary=False, store_schema=False
    ) as writer:
        writer.write_table(pa.Table.from_pydict(columns, schema=schema))
        writer.add_key_value_metadata(METADATA)
    return bytes(sink.getvalue())


def columns_with(**changes: list[object]) -> dict[str, list[object]]:
    plain: dict[str, list[object]] = {
        "prompt_index": [0],
        "sample_index": [0],
        "prompt_tokens": [[1, 2]],
        "output_tokens": [[3, 4]],
        "logprobs": [[-1.0, -2.0]],
        "finish": [1],
        "proof": [b""],
    }
    return plain | changes


def test_a_table_comes_back_as_it_was_written(reader: TableReader) -> None:
    assert reader.read(encode(TABLE), LIMITS) == TABLE
    assert reader.read(encode(TABLE), LIMITS) == TABLE, "the same child serves again"


def test_a_table_that_does_not_fit_the_lease_is_oversized(reader: TableReader) -> None:
    many = RolloutTable(lease_id="a" * 32, policy_version=3, rows=tuple(rollout(index) for index in range(9)))
    assert refusal(reader, encode(many)) == "reject.oversized_table"


def test_broken_files_are_malformed(reader: TableReader) -> None:
    good = encode(TABLE)
    rng = random.Random(1)
    broken = [
        b"",
        b"PAR1",
        good[:-8],
        good[: len(good) // 2],
        good[:-8] + b"\xff\xff\xff\x7f" + b"PAR1",
        rng.randbytes(5000),
        b"PAR1" + rng.randbytes(2000) + (500).to_bytes(4, "little") + b"PAR1",
    ]
    assert {refusal(reader, data) for data in broken} == {"reject.malformed_file"}


def test_other_schemas_are_malformed(reader: TableReader) -> None:
    extra = SCHEMA.append(pa.field("reward", pa.float32()))
    wide = SCHEMA.set(0, pa.field("prompt_index", pa.int64(), nullable=False))
    nullable = pa.schema([field.with_nullable(True) for field in SCHEMA])
    fewer = pa.schema([field for field in SCHEMA if field.name != "proof"])
    without_proof = {name: values for name, values in columns_with().items() if name != "proof"}
    for data in (
        write(columns_with(reward=[1.0]), extra),
        write(columns_with(), wide),
        write(columns_with(proof=[None], finish=[None]), nullable),
        write(without_proof, fewer),
    ):
        assert refusal(reader, data) == "reject.malformed_file"


def test_wrong_footers_and_values_are_refused(reader: TableReader) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_pydict(columns_with(), schema=SCHEMA), sink, use_dictionary=False, store_schema=False
    )
    assert refusal(reader, bytes(sink.getvalue())) == "reject.malformed_file", "no format in the footer"
    assert refusal(reader, write(columns_with(finish=[7]))) == "reject.bad_values"
    assert refusal(reader, write(columns_with(output_tokens=[[]], logprobs=[[]]))) == "reject.bad_values"
    assert refusal(reader, write(columns_with(logprobs=[[-1.0]]))) == "reject.bad_values"
    assert refusal(reader, write(columns_with(proof=[b"x" * 600]))) == "reject.malformed_proof"


def bomb_of_one_row(count: int, *, dictionary: bool = False) -> bytes:
    """One row whose list holds `count` zeros: hundreds of bytes on disk."""
    element = pa.field("element", pa.int32(), nullable=False)
    tokens = pa.ListArray.from_arrays(
        pa.array([0, count], pa.int32()), pa.array(np.zeros(count, dtype=np.int32)), type=pa.list_(element)
    )
    arrays = [
        tokens if name == "output_tokens" else pa.array(values, SCHEMA.field(name).type)
        for name, values in columns_with().items()
    ]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, SCHEMA, compression="zstd", use_dictionary=dictionary, store_schema=False
    ) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))
        writer.add_key_value_metadata(METADATA)
    return bytes(sink.getvalue())


def test_a_parquet_bomb_is_refused_by_its_footer(reader: TableReader) -> None:
    bomb = bomb_of_one_row(8_000_000)
    assert len(bomb) < 100_000
    assert refusal(reader, bomb) == "reject.oversized_table"
    smaller = bomb_of_one_row(8_000_000, dictionary=True)
    assert len(smaller) < 10_000
    assert refusal(reader, smaller) == "reject.malformed_file", "a dictionary is not in our format"


def test_a_bomb_that_passes_the_footer_meets_the_memory_limit() -> None:
    with TableReader(max_memory_bytes=100_000_000) as reader:
        assert refusal(reader, bomb_of_one_row(60_000_000), LOOSE) == "reject.oversized_table"
        assert reader.read(encode(TABLE), LIMITS) == TABLE, "and the reader still works"


def test_a_bomb_with_a_forged_footer_is_harmless(reader: TableReader) -> None:
    """The sender writes num_values: a small number in the footer must not let large pages be decoded."""
    count = 10_000_000
    bomb, honest = bomb_of_one_row(count), _zigzag_varint(count)
    lie = _zigzag_varint(2, width=len(honest))
    in_footer_only = lie.join(bomb.rsplit(honest, 1))
    for forged in (in_footer_only, bomb.replace(honest, lie)):
        assert forged != bomb
        assert refusal(reader, forged) == "reject.oversized_table"
    assert reader.read(encode(TABLE), LIMITS) == TABLE


def _zigzag_varint(value: int, width: int = 0) -> bytes:
    """Thrift's compact i64, padded to `width` bytes."""
    word, out = value << 1, bytearray()
    while word >= 0x80 or len(out) < width - 1:
        out.append(word & 0x7F | 0x80)
        word >>= 7
    out.append(word)
    return bytes(out)


def test_the_processor_time_of_a_file_follows_from_its_size() -> None:
    lease = TableLimits(max_rows=128, max_prompt_tokens=4200, max_output_tokens=64, max_proof_bytes=516)
    assert extra_cpu_s(60_000, lease) == 0, "a small file has CPU_S"
    large = TableLimits(max_rows=512, max_prompt_tokens=4196, max_output_tokens=4096, max_proof_bytes=33024)
    assert CPU_S + extra_cpu_s(30_500_000, large) >= 5 * 0.31, "an honest file of this size takes 0.31 s"


def test_an_idle_child_that_was_killed_is_replaced(reader: TableReader) -> None:
    assert reader.read(encode(TABLE), LIMITS) == TABLE
    assert reader.child.pid is not None
    os.kill(reader.child.pid, signal.SIGKILL)
    assert reader.read(encode(TABLE), LIMITS) == TABLE, "a killed idle child is replaced"


@pytest.mark.parametrize(("status", "blamed"), [("KILL", False), ("ABRT", True)])
def test_a_child_that_is_killed_while_it_reads_is_the_readers_failure(
    tmp_path: Path, status: str, blamed: bool
) -> None:
    """The out-of-memory killer takes the child when the machine has no memory left, whatever the file is."""
    child = tmp_path / "python"
    child.write_text(f"#!/bin/sh\nprintf 'ready\\n'\nhead -c 1 > /dev/null\nkill -{status} $$\n")
    child.chmod(0o755)
    failure = Rejected if blamed else ReaderFailed
    with TableReader(python=str(child)) as reader, pytest.raises(failure) as caught:
        reader.read(encode(TABLE), LIMITS)
    assert blamed or "out-of-memory killer" in str(caught.value)


def test_a_timeout_is_the_readers_failure() -> None:
    with TableReader(wall_s=-1.0) as hurried, pytest.raises(ReaderFailed, match="wall-clock time"):
        hurried.read(encode(TABLE), LIMITS)


def test_random_damage_never_takes_the_reader_down(reader: TableReader) -> None:
    good, rng = encode(TABLE), random.Random(0)
    outcomes = {"same": 0, "refused": 0}
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            reader.read(bytes(data), LIMITS)
            outcomes["same"] += 1
        except Rejected:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100


def test_a_child_that_cannot_start_is_the_readers_failure() -> None:
    reader = TableReader(python="/bin/false")
    with pytest.raises(ReaderFailed, match="before its first request"):
        reader.read(encode(TABLE), LIMITS)
    with pytest.raises(ReaderFailed, match="before its first request"), reader:
        pass


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 100_000,
        b'{"num_rows": Infinity}',
        b'{"num_rows": 1}',
        b'{"code": "accepted", "detail": ""}',
        b"{}",
    ],
)
def test_a_child_that_was_taken_over_cannot_end_the_validator(head: bytes) -> None:
    with pytest.raises(BadReply):
        decode_reply(head + b"\n", LIMITS)


@pytest.mark.parametrize(
    "table",
    [
        replace(TABLE, rows=(replace(rollout(), output_tokens=(), logprobs=()),)),
        replace(TABLE, rows=(rollout(length=LIMITS.max_output_tokens + 1),)),
        replace(TABLE, rows=(replace(rollout(), prompt_tokens=(1,) * (LIMITS.max_prompt_tokens + 1)),)),
        replace(TABLE, rows=(replace(rollout(), proof=bytes(LIMITS.max_proof_bytes + 1)),)),
        replace(TABLE, rows=TABLE.rows[::-1]),
        replace(TABLE, made_by="x" * 1000),
        replace(TABLE, replay="anything"),
    ],
)
def test_a_child_that_was_taken_over_cannot_send_a_table_that_no_file_may_have(table: RolloutTable) -> None:
    assert decode_reply(encode_table(TABLE), LIMITS) == TABLE
    with pytest.raises(BadReply):
        decode_reply(encode_table(table), LIMITS)
