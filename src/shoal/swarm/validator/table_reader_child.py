"""The reading child: `python -m shoal.swarm.validator.table_reader_child`. Started and fed by reader.py.

Reads strangers' files under limits on memory, processor time and files. It holds no key, needs no network,
and imports nothing but the table format. Its limits are its own doing, before the first file arrives.
"""

import resource
import sys

from shoal.swarm.validator.frames import (
    LENGTH_BYTES,
    READY,
    decode_request,
    encode_refusal,
    encode_table,
)
from shoal.wire.codes import Rejected
from shoal.wire.rollouts import Finish, Rollout, RolloutTable, TableLimits, decode, encode


def main(max_memory_bytes: int, cpu_s: int) -> None:
    _limit(_address_space_bytes() + max_memory_bytes)
    _limit_cpu(cpu_s)
    _read_one_of_ours()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while length := sys.stdin.buffer.read(LENGTH_BYTES):
        _limit_cpu(cpu_s)
        reply = _reply(sys.stdin.buffer.read(int.from_bytes(length, "big")))
        sys.stdout.buffer.write(len(reply).to_bytes(LENGTH_BYTES, "big") + reply)
        sys.stdout.buffer.flush()


def _reply(frame: bytes) -> bytes:
    data, limits = decode_request(frame)
    del frame
    try:
        return encode_table(decode(data, limits))
    except Rejected as rejected:
        return encode_refusal(rejected)
    except MemoryError:
        return encode_refusal(
            Rejected("reject.oversized_table", "decoding needs more memory than a submission may take")
        )


def _read_one_of_ours() -> None:
    """Under these limits an honest file must be readable, else what follows would put the blame on others."""
    row = Rollout(
        prompt_index=0,
        sample_index=0,
        prompt_tokens=(1,),
        output_tokens=(2,),
        logprobs=(-1.0,),
        finish=Finish.EOS,
        proof=b"",
    )
    table = RolloutTable(lease_id="0" * 32, policy_version=0, rows=(row,))
    limits = TableLimits(max_rows=1, max_prompt_tokens=1, max_output_tokens=1, max_proof_bytes=1)
    assert decode(encode(table), limits) == table, "a table of our own does not read back"


def _address_space_bytes() -> int:
    """What is mapped already: libraries reserve more of it on machines with many cores, and use none of it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def _limit(max_memory_bytes: int) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, max_memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(kind, (value, value))


def _limit_cpu(cpu_s: int) -> None:
    """Processor time is counted over the child's life, so each file moves the limit on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + cpu_s, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
