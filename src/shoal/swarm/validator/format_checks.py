"""Checks of a submission that need no forward pass: of the claim, the table and the lease.

They are pure functions. Each returns nothing or raises Rejected with its code. The checks after the forward pass are in
fact_checks.py.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from shoal.toploc import ProofError, check_format, expected_bytes
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease
from shoal.wire.messages import Claim
from shoal.wire.requirements import WeightFormat, declared_weights
from shoal.wire.rollouts import Finish, Rollout, RolloutTable, TableLimits
from shoal.wire.run_spec import AdmittedWeights, ProofSpec

LOGPROB_ROUNDING = 1e-4
"""How far above 0 rounding may put the log-prob of a token with probability 1."""
PROMPT_SLACK = 4096
"""Prompt tokens that a file may have beyond the longest leased prompt: a file with an edited, longer prompt is then refused
for its prompt and not for its size."""


def where(row: Rollout) -> str:
    """Returns the name of a row for messages."""
    return f"row ({row.prompt_index}, {row.sample_index})"


def table_limits(lease: Lease, longest_prompt: int) -> TableLimits:
    """Returns the size that a lease allows a file to have; `longest_prompt` is in tokens."""
    max_new = lease.sampling.max_new_tokens
    return TableLimits(
        max_rows=lease.num_rows,
        max_prompt_tokens=longest_prompt + PROMPT_SLACK,
        max_output_tokens=max_new,
        max_proof_bytes=expected_bytes(
            max_new - 1, topk=lease.proof.topk, segment_tokens=lease.proof.segment_tokens
        ),
    )


def check_claim(claim: Claim) -> None:
    """Refuses policy versions that were not leased."""
    leased = [policy.version for policy in claim.lease.policies]
    if claim.policy_version not in leased:
        raise Rejected(
            "reject.wrong_lease", f"policy version {claim.policy_version} is not leased; leased: {leased}"
        )


def check_binding(table: RolloutTable, claim: Claim) -> None:
    """Refuses a file that names another lease or version than the submission: as a copy if it was accepted for that lease.

    A file that names this lease is never a copy. Seeds and weights become public, so anybody can make the bytes that an honest
    node will submit, and submit them first.
    """
    lease = claim.lease
    if table.lease_id != lease.lease_id:
        if claim.copy_of == lease.node:
            raise Rejected("reject.replayed", f"file {claim.sha256[:16]} of this node was accepted before")
        if claim.copy_of is not None:
            raise Rejected(
                "reject.copied", f"file {claim.sha256[:16]} of node {claim.copy_of[:16]} was accepted before"
            )
        raise Rejected(
            "reject.wrong_lease", f"the file was made for lease {table.lease_id[:32]!r}, not {lease.lease_id}"
        )
    if table.policy_version != claim.policy_version:
        raise Rejected(
            "reject.wrong_lease",
            f"the file names policy version {table.policy_version}, the submission {claim.policy_version}",
        )


def check_groups(table: RolloutTable, lease: Lease) -> None:
    """Refuses a table unless it has every sample of every prompt exactly once."""
    samples = lease.sampling.samples_per_prompt
    wanted = {(prompt, sample) for prompt in range(len(lease.prompts)) for sample in range(samples)}
    found = Counter((row.prompt_index, row.sample_index) for row in table.rows)
    problems = (
        ("is missing", sorted(wanted - found.keys())),
        ("is not leased", sorted(found.keys() - wanted)),
        ("occurs more than once", sorted(place for place, count in found.items() if count > 1)),
    )
    for problem, places in problems:
        if places:
            raise Rejected(
                "reject.incomplete_group",
                f"row {places[0]} {problem}, and {len(places) - 1} more; the lease is for {len(wanted)} rows",
            )


def check_prompts(table: RolloutTable, prompt_tokens: Sequence[Sequence[int]]) -> None:
    """Refuses rows whose prompt is not `prompt_tokens`, the leased prompts encoded by the policy's tokenizer."""
    expected = [tuple(tokens) for tokens in prompt_tokens]
    edited = [row for row in table.rows if row.prompt_tokens != expected[row.prompt_index]]
    if not edited:
        return
    if len(edited) == len(table.rows):
        raise Rejected("reject.other_prompts", f"none of the {len(expected)} prompts is the leased one")
    raise Rejected(
        "reject.edited_prompt",
        f"{where(edited[0])}: the prompt is not the leased one; this holds for {len(edited)} of {len(table.rows)} rows",
    )


def check_weights(table: RolloutTable, lease: Lease, admitted: AdmittedWeights) -> WeightFormat | None:
    """Returns the format that the file declares its weights to be rounded to. Refuses one that the run does not admit.

    Held-out work measures the published weights, so no format is admitted for it.
    """
    declared = declared_weights(table.made_by)
    if not declared:
        return None
    for format in admitted.formats if lease.purpose == "train" else ():
        if format == declared:
            return format
    allowed = ", ".join(admitted.formats) or "no other weights than the published ones"
    work = "held-out work" if lease.purpose == "eval" else "training"
    raise Rejected(
        "reject.weights_not_admitted",
        f"made by {table.made_by}: weights {declared!r} for {work}; the run admits {allowed}"
        + (", for training only" if lease.purpose == "eval" and admitted.formats else ""),
    )


def check_values(table: RolloutTable, vocab_size: int) -> None:
    """Refuses tokens outside the vocabulary, and log-probs that are not finite or above 0."""
    for row in table.rows:
        lowest, highest = min(row.output_tokens), max(row.output_tokens)
        if lowest < 0 or highest >= vocab_size:
            bad = lowest if lowest < 0 else highest
            raise Rejected(
                "reject.bad_values", f"{where(row)}: token {bad} is outside the vocabulary of {vocab_size}"
            )
        for logprob in row.logprobs:
            if not math.isfinite(logprob) or logprob > LOGPROB_ROUNDING:
                raise Rejected("reject.bad_values", f"{where(row)}: a log-prob is {logprob}")


def check_proof_format(table: RolloutTable, proof: ProofSpec, hidden_size: int) -> None:
    """Refuses proofs of the wrong number or form."""
    try:
        check_format(
            [row.proof for row in table.rows],
            [len(row.output_tokens) - 1 for row in table.rows],
            hidden_size=hidden_size,
            topk=proof.topk,
            segment_tokens=proof.segment_tokens,
        )
    except ProofError as error:
        raise Rejected("reject.malformed_proof", f"{where(table.rows[error.row])}: {error.reason}") from None


def check_endings(
    table: RolloutTable,
    end_tokens: Iterable[int],
    max_new_tokens: int,
    stops: Callable[[Sequence[int]], int | None] = lambda tokens: None,
) -> None:
    """Refuses answers that do not end at their first end token, at their first stop string or at max_new_tokens.

    `stops` returns the number of tokens after which an answer contains a stop string.
    """
    ends = frozenset(end_tokens)
    for row in table.rows:
        if not ends.isdisjoint(row.output_tokens[:-1]):
            raise Rejected("reject.early_stop", f"{where(row)}: continues after an end token")
        length, stopped = len(row.output_tokens), stops(row.output_tokens)
        if stopped is not None and stopped < length:
            raise Rejected(
                "reject.early_stop",
                f"{where(row)}: has {length} tokens, but token {stopped} completes a stop string",
            )
        if row.output_tokens[-1] in ends:
            finish = Finish.EOS
        elif stopped is not None:
            finish = Finish.STOP
        elif length == max_new_tokens:
            finish = Finish.LENGTH
        else:
            raise Rejected(
                "reject.early_stop",
                f"{where(row)}: stops after {length} of {max_new_tokens} tokens without an end token or a stop string",
            )
        if row.finish is not finish:
            raise Rejected(
                "reject.early_stop",
                f"{where(row)}: is marked as finished by {row.finish.name}, but its last token makes it {finish.name}",
            )
