"""Submissions in, a verdict on each out."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.model.tokenizer import Tokenizer
from shoal.net.waiting import Stopped
from shoal.swarm.validator import fact_checks, format_checks
from shoal.swarm.validator.recompute import CannotCheck, Checked, Policy, recompute_many
from shoal.swarm.validator.table_reader import Reader, ReaderDown
from shoal.tasks import CannotGrade, Outcome, Problem, Reward, Task, make_task
from shoal.tasks.datasets.file_options import file_digests
from shoal.toploc import expected_bytes
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import Claim
from shoal.wire.rollouts import RolloutTable, TableLimits
from shoal.wire.run_spec import RunSpec
from shoal.wire.seeded_draw import problem_seeds

PROMPT_SLACK = 4096
"""Prompt tokens a file may hold beyond the longest leased prompt: an edited prompt should be called one."""
SHOWN_CHARACTERS = 1000
"""Of the sampled answer. It stands in the ledger, for ever."""


Failed = CannotCheck | ReaderDown
"""Our own side failed on one submission."""


def judge(
    data: bytes,
    claim: Claim,
    spec: RunSpec,
    policy: Policy,
    *,
    reader: Reader,
    control_seed: int,
    stop: threading.Event | None = None,
) -> Verdict:
    """The verdict on a submission's bytes, which are known to have the claimed digest.

    `spec` has the run's task with its files at hand; where it names them by digest only, as the public terms do, everything is checked but nothing
    is graded. `policy` is the claimed version. Raises CannotCheck or ReaderDown where our own side fails; never blames for it; Stopped if `stop` is
    set meanwhile.
    """
    (found,) = judge_many([(data, claim)], spec, policy, reader=reader, control_seed=control_seed, stop=stop)
    if isinstance(found, Verdict):
        return found
    raise found


def judge_many(
    submissions: Sequence[tuple[bytes, Claim]],
    spec: RunSpec,
    policy: Policy,
    *,
    reader: Reader,
    control_seed: int,
    stop: threading.Event | None = None,
) -> list[Verdict | Failed]:
    """The same for several of one policy version, whose rows share prefills. CannotCheck is raised if a prefill fails: by whose
    rows is not known then."""
    opened = [_begin(data, claim, spec, policy, reader) for data, claim in submissions]
    # Drawn by the coordinator after it had the bytes: the node could not know.
    full = [one for one in opened if isinstance(one, _Opened) and one.claim.checks == "full"]
    checked = [Checked(one.table.rows, one.claim.lease) for one in full]
    found = recompute_many(checked, policy, control_seed=control_seed, stop=stop)
    for one, facts in zip(full, found, strict=True):
        one.facts = facts
    return [_end(one, spec, policy, stop) if isinstance(one, _Opened) else one for one in opened]


@dataclass
class _Opened:
    """A submission past every check that needs no forward pass."""

    claim: Claim
    task: Task | None
    """None if its files are not at hand."""
    problems: list[Problem]
    table: RolloutTable
    started_s: float
    facts: list[fact_checks.RowFacts] | Rejected | None = None
    """None if its draw spared it."""


def _begin(
    data: bytes, claim: Claim, spec: RunSpec, policy: Policy, reader: Reader
) -> _Opened | Verdict | Failed:
    started_s = time.monotonic()
    try:
        format_checks.check_claim(claim)
        task = None if file_digests(spec.task) else make_task(spec.task)
        problems = [] if task is None else leased_problems(claim.lease, spec.run, task)
        table = open_submission(data, claim, policy, reader=reader)
    except Rejected as rejected:
        return _refusal(claim, rejected, {"policy_version": claim.policy_version})
    except (CannotCheck, ReaderDown) as failed:
        return failed
    return _Opened(claim, task, problems, table, started_s)


def _end(one: _Opened, spec: RunSpec, policy: Policy, stop: threading.Event | None) -> Verdict | Failed:
    claim, table = one.claim, one.table
    evidence: dict[str, float | int | str] = {"policy_version": claim.policy_version}
    try:
        if isinstance(one.facts, Rejected):
            raise one.facts
        if one.facts is not None:
            evidence |= fact_checks.evidence(table.rows, one.facts, spec.tolerances)
            fact_checks.check_facts(table.rows, one.facts, spec.tolerances, spec.noise)
        graded = () if one.task is None else grade(table, one.problems, one.task, policy.tokenizer, stop=stop)
    except Rejected as rejected:
        return _refusal(claim, rejected, evidence)
    except CannotCheck as failed:
        return failed
    if graded:
        evidence |= count_outcomes(graded)
        evidence |= show_sample(table, graded, claim, policy.tokenizer)
    num_tokens = sum(len(row.output_tokens) for row in table.rows)
    words = "" if graded else "; not graded, because the task's files are not here"
    return Verdict(
        lease_id=claim.lease.lease_id,
        code=ACCEPTED,
        detail=f"{len(table.rows)} rows, {num_tokens} tokens, checked in {time.monotonic() - one.started_s:.2f} s{words}",
        rewards=tuple(reward.value for reward in graded),
        output_tokens=num_tokens,
        checks=claim.checks,
        evidence=evidence,
    )


def judge_claim(claim: Claim) -> Verdict | None:
    """The refusal that needs neither the bytes nor the weights, if there is one."""
    try:
        format_checks.check_claim(claim)
    except Rejected as rejected:
        return _refusal(claim, rejected, {})
    return None


def open_submission(data: bytes, claim: Claim, policy: Policy, *, reader: Reader) -> RolloutTable:
    """The table, past every check that needs no forward pass."""
    lease, tokenizer = claim.lease, policy.tokenizer
    hidden_size = policy.decoder.shape.hidden_size
    if lease.proof.topk > hidden_size:  # the operator's mistake, not the node's
        raise CannotCheck(
            f"proof.topk={lease.proof.topk} is more than the model's {hidden_size} values a state: an answer of two tokens has no proof"
        )
    prompt_tokens = encode_prompts(lease, tokenizer)
    table = reader.read(data, table_limits(lease, max(map(len, prompt_tokens))))
    format_checks.check_binding(table, claim)
    format_checks.check_groups(table, lease)
    format_checks.check_prompts(table, prompt_tokens)
    format_checks.check_values(table, tokenizer.vocab_size)
    format_checks.check_endings(table, tokenizer.end_tokens, lease.sampling.max_new_tokens)
    format_checks.check_proof_format(table, lease.proof, hidden_size)
    return table


def table_limits(lease: Lease, longest_prompt: int) -> TableLimits:
    max_new = lease.sampling.max_new_tokens
    return TableLimits(
        max_rows=lease.num_rows,
        max_prompt_tokens=longest_prompt + PROMPT_SLACK,
        max_output_tokens=max_new,
        max_proof_bytes=expected_bytes(
            max_new - 1, topk=lease.proof.topk, segment_tokens=lease.proof.segment_tokens
        ),
    )


def leased_problems(lease: Lease, run: str, task: Task) -> list[Problem]:
    """The problems behind the lease's prompts, derived from its seed as anybody can; CannotCheck if they differ."""
    seeds = problem_seeds(
        lease.seed, run=run, purpose=lease.purpose, chunk=lease.chunk, num_prompts=len(lease.prompts)
    )
    problems = [task.problem(lease.purpose, seed) for seed in seeds]
    if tuple(problem.prompt for problem in problems) != lease.prompts:
        raise CannotCheck(f"the prompts of lease {lease.lease_id} do not follow from its seed")
    if lease.chat != task.chat:
        raise CannotCheck(f"lease {lease.lease_id} says chat={lease.chat}, its task {task.chat}")
    return problems


def encode_prompts(lease: Lease, tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return [tokenizer.encode_prompt(prompt, chat=lease.chat) for prompt in lease.prompts]
    except ValueError as error:
        raise CannotCheck(f"the policy's tokenizer cannot encode a leased prompt: {error}") from None


def grade(
    table: RolloutTable,
    problems: list[Problem],
    task: Task,
    tokenizer: Tokenizer,
    *,
    stop: threading.Event | None,
) -> tuple[Reward, ...]:
    """What each row is worth, in file order. After every other check: what is graded is what the leased model drew."""
    graded = []
    for row in table.rows:
        if stop is not None and stop.is_set():
            raise Stopped("stopped between two answers")
        text = tokenizer.decode(row.output_tokens)
        try:
            graded.append(task.reward(problems[row.prompt_index], text, len(row.output_tokens)))
        except CannotGrade as error:
            raise CannotCheck(f"an answer could not be graded: {error}") from None
    return tuple(graded)


def count_outcomes(graded: tuple[Reward, ...]) -> dict[str, float | int | str]:
    """How many rows were right, and how many gave no answer at all: apart from wrong, which is the rest."""
    outcomes = Counter(reward.outcome for reward in graded)
    return {"right": outcomes[Outcome.RIGHT], "unparseable": outcomes[Outcome.UNPARSEABLE]}


def show_sample(
    table: RolloutTable, graded: tuple[Reward, ...], claim: Claim, tokenizer: Tokenizer
) -> dict[str, float | int | str]:
    """One answer in words, for people who watch. Held-out problems are not shown: a worker could learn them.

    Which one follows from the file's digest: nobody chooses what is seen.
    """
    if claim.lease.purpose != "train":
        return {}
    index = int(claim.sha256[:8], 16) % len(table.rows)
    row = table.rows[index]
    return {
        "sample_prompt": row.prompt_index,
        "sample_answer": tokenizer.decode(row.output_tokens)[:SHOWN_CHARACTERS],
        "sample_reward": graded[index].value,
    }


def _refusal(claim: Claim, rejected: Rejected, evidence: dict[str, float | int | str]) -> Verdict:
    return Verdict(
        lease_id=claim.lease.lease_id, code=rejected.code, detail=rejected.detail, evidence=evidence
    )
