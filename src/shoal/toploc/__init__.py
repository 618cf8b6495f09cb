"""TOPLOC: 258 bytes that tie 32 hidden states to the model, prompt and tokens that produced them.

    from shoal import toploc
    proofs = toploc.build_proofs([states_TH])                                   # a worker, from its decode states
    checks = toploc.verify_proofs(proofs, [states_TH], control_seed=secret)     # a validator, from one prefill
    problem = toploc.find_problem(checks, compute_dtype="bfloat16")             # None: made from these states

The library takes tensors, not models, and is byte-compatible with toploc 0.1.6. docs/toploc.md is its guide.
"""

from shoal.toploc.build import build_proofs
from shoal.toploc.calibrate import measure_noise
from shoal.toploc.decision import Score, TokenBlock, judges_alone, noise_scores
from shoal.toploc.proof import ProofError, check_format, expected_bytes
from shoal.toploc.segment_rules import find_problem
from shoal.toploc.segments import NO_MATCH, SegmentCheck
from shoal.toploc.verify import start_verifying, verify_proofs

__all__ = [
    "NO_MATCH",
    "ProofError",
    "Score",
    "SegmentCheck",
    "TokenBlock",
    "build_proofs",
    "check_format",
    "expected_bytes",
    "find_problem",
    "judges_alone",
    "measure_noise",
    "noise_scores",
    "start_verifying",
    "verify_proofs",
]
