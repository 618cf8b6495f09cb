"""A corpus of broken and hostile Parquet files, seeded, each read as a stranger's is: in a child under limits of memory and time.

Every one is read or refused as the contributor's doing. None takes the reader down, none costs more than its limits.
"""

import random
import struct
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_reader import LIMITS, METADATA, TABLE, columns_with

from shoal.swarm.validator.table_reader import TableReader
from shoal.wire.codes import Rejected
from shoal.wire.rollouts import SCHEMA, encode

SEED = 20261115
PER_FILE = 40
"""Broken copies of each good file."""


def written(**options: Any) -> bytes:
    """Returns a table written with other codecs, encodings or pages than ours."""
    sink = pa.BufferOutputStream()
    rows: dict[str, list[object]] = {name: values * 4 for name, values in columns_with().items()}
    rows["sample_index"] = [0, 1, 2, 3]
    options = {"compression": "zstd", "use_dictionary": False, "store_schema": False} | options
    with pq.ParquetWriter(sink, SCHEMA, **options) as writer:
        writer.write_table(pa.Table.from_pydict(rows, schema=SCHEMA), row_group_size=options.get("rows", 2))
        writer.add_key_value_metadata(METADATA)
    return bytes(sink.getvalue())


def good_files() -> dict[str, bytes]:
    files = {"ours": encode(TABLE)}
    for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
        files[codec] = written(compression=codec)
    files["dictionary"] = written(use_dictionary=True)
    files["pages of version 2"] = written(data_page_version="2.0")
    files["checksums"] = written(write_page_checksum=True)
    files["delta lengths"] = written(column_encoding={"proof": "DELTA_LENGTH_BYTE_ARRAY"})
    return files


def flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.choice((1, 4, 8))] = rng.randbytes(rng.choice((1, 4, 8)))


def cut_end(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def cut_middle(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 64)]


def repeat(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.randrange(1, 64)]


def footer_length(data: bytearray, rng: random.Random) -> None:
    data[-8:-4] = struct.pack("<I", rng.choice((0, 1, len(data), len(data) * 2, 2**31 - 1, 2**32 - 1)))


def in_footer(data: bytearray, rng: random.Random) -> None:
    """Where counts, sizes, offsets and encodings stand."""
    (length,) = struct.unpack("<I", data[-8:-4])
    length = max(2, min(length, len(data) - 8))
    for _ in range(rng.randrange(1, 6)):
        data[len(data) - 8 - rng.randrange(1, length)] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def of_another(data: bytearray, rng: random.Random) -> None:
    """Joins the head of one file to the footer of another."""
    other = rng.choice(list(GOOD.values()))
    data[rng.randrange(len(data)) :] = other[rng.randrange(len(other)) :]


GOOD = good_files()
DAMAGE = (flip, overwrite, cut_end, cut_middle, repeat, footer_length, in_footer, in_footer, of_another)


def test_the_corpus(reader: TableReader) -> None:
    rng, outcomes = random.Random(SEED), Counter[str]()
    for name, good in GOOD.items():
        for number in range(PER_FILE):
            data = bytearray(good)
            for _ in range(rng.choice((1, 1, 2, 4))):
                if len(data) > 16:
                    rng.choice(DAMAGE)(data, rng)
            try:
                reader.read(bytes(data), LIMITS)
                outcomes["read"] += 1
            except Rejected as rejected:
                assert rejected.code.startswith("reject."), (name, number, rejected.code)
                outcomes[rejected.code] += 1
    assert sum(outcomes.values()) == PER_FILE * len(GOOD)
    assert outcomes["reject.malformed_file"] > PER_FILE * len(GOOD) // 2, outcomes
    assert reader.read(encode(TABLE), LIMITS) == TABLE  # and it reads on


@pytest.mark.parametrize("name", GOOD)
def test_what_the_format_allows_and_what_it_does_not(reader: TableReader, name: str) -> None:
    """Only what the format names is decoded at all: the decoders of all else are never reached."""
    if name in ("ours", "none", "zstd", "pages of version 2", "checksums"):
        assert len(reader.read(GOOD[name], LIMITS).rows) in (3, 4)
        return
    with pytest.raises(Rejected) as refused:
        reader.read(GOOD[name], LIMITS)
    assert refused.value.code == "reject.malformed_file"


def test_lengths_of_nothing(reader: TableReader) -> None:
    for data in (b"", b"PAR1", b"PAR1PAR1", b"PAR1" + bytes(4) + b"PAR1", b"PARE" * 3, bytes(1 << 16)):
        with pytest.raises(Rejected) as refused:
            reader.read(data, LIMITS)
        assert refused.value.code == "reject.malformed_file"
