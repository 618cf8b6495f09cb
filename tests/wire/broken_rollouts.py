"""Decodes broken copies of a file, one per seed, and prints each result. test_rollouts.py runs it in a child process.

python broken_rollouts.py FILE FIRST_SEED LAST_SEED
"""

import random
import sys
from pathlib import Path

from shoal.wire.codes import Rejected
from shoal.wire.rollouts import TableLimits, decode

LIMITS = TableLimits(max_rows=4, max_prompt_tokens=8, max_output_tokens=4, max_proof_bytes=16)


def broken(data: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 4, 16))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def outcome(data: bytes) -> str:
    try:
        decode(data, LIMITS)
    except Rejected as rejected:
        return rejected.code
    return "read"


def main() -> None:
    path, first, last = sys.argv[1:]
    data = Path(path).read_bytes()
    for seed in range(int(first), int(last) + 1):
        sys.stdout.write(f"{seed} {outcome(broken(data, seed))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
