"""Judges submissions: takes their bytes and claims, returns a verdict on each.

open_submission    read the table, check it against the lease            (no forward pass)
recompute_many     run the model over the rows, verify their proofs      (recompute.py)
give_verdict       check proofs, draws and lengths, grade the answers    (fact_checks.py, grading pool)

Programs and mathematics are expensive to grade, and their text is the model's own only if the proofs passed, so they are graded
last. The text of a submission that was spared the forward pass is the node's choice: if its grading takes longer than
SPARED_S, the submission gets every check.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from shoal.model.stop_strings import stopped_after, text_before_stop
from shoal.model.tokenizer import ChatSetting, Tokenizer, encode_leased_prompts
from shoal.net.waiting import Stopped
from shoal.swarm.validator import fact_checks, format_checks
from shoal.swarm.validator.recompute import CannotCheck, LoadedPolicy, RowsToCheck, recompute_many
from shoal.swarm.validator.table_reader import ReaderFailed, TableReader
from shoal.tasks import CannotGrade, Outcome, Problem, Reward, Task, make_task
from shoal.tasks.datasets.file_options import file_digests
from shoal.tasks.grading.pool import Answer, GradingStopped, GradingTimeout, grading_pool
from shoal.tasks.task import vote_key
from shoal.tasks.task_errors import conversation_before, pose_problem
from shoal.toploc import expected_bytes
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import Claim
from shoal.wire.rollouts import RolloutTable, TableLimits
from shoal.wire.run_spec import RunSpec, TaskSpec
from shoal.wire.seeded_draw import problem_seeds
from shoal.wire.transcript import (
    MAX_EXPECTED,
    MAX_PIECES_BYTES,
    GroupText,
    SampleText,
    Transcript,
    make_sample,
)

PROMPT_SLACK = 4096
"""Prompt tokens that a file may have beyond the longest leased prompt: a file with an edited, longer prompt is then refused
for its prompt and not for its size."""
SHOWN_CHARACTERS = 1000
"""Length of the sampled answer in the evidence, which the ledger keeps for ever."""

SHOWN_EXPECTED = 200
"""Length of the expected answer beside it."""

SPARED_S = 30.0
"""Seconds for grading all rows of a submission whose proofs were not checked."""

Failed = CannotCheck | ReaderFailed
"""The validator's own side failed on one submission."""


def judge(
    data: bytes,
    claim: Claim,
    spec: RunSpec,
    policy: LoadedPolicy,
    *,
    reader: TableReader,
    control_seed: int,
    stop: threading.Event | None = None,
) -> Verdict:
    """Returns the verdict on one submission. Its bytes must have the claimed digest, and `policy` must be the claimed version.

    `spec` should have the task's files. Where it has only their digests, as the public terms do, everything is checked but no
    answer is graded. Raises CannotCheck or ReaderFailed if the validator's own side fails, Stopped if `stop` is set.
    """
    if (refusal := refuse_claim(claim)) is not None:
        return refusal
    (found,) = judge_many([(data, claim)], spec, policy, reader=reader, control_seed=control_seed, stop=stop)
    if isinstance(found, Verdict):
        return found
    raise found


def refuse_claim(claim: Claim) -> Verdict | None:
    """Returns the refusal that needs neither the bytes nor the weights, or None."""
    try:
        format_checks.check_claim(claim)
    except Rejected as rejected:
        return _refusal(claim, rejected, {})
    return None


def judge_many(
    submissions: Sequence[tuple[bytes, Claim]],
    spec: RunSpec,
    policy: LoadedPolicy,
    *,
    reader: TableReader,
    control_seed: int,
    stop: threading.Event | None = None,
) -> list[Verdict | Failed]:
    """Returns a verdict or failure for each submission of one policy version. Their rows share prefills.

    The claims must have passed `refuse_claim`. Raises CannotCheck if a prefill fails, because the row that caused it is unknown.
    """
    opened = [open_submission(data, claim, spec, policy, reader) for data, claim in submissions]
    # The coordinator chose the checks after it had the bytes, so the node could not know them.
    full = [one for one in opened if isinstance(one, OpenedSubmission) and one.claim.checks == "full"]
    to_check = [RowsToCheck(one.table.rows, one.claim.lease) for one in full]
    found = recompute_many(to_check, policy, control_seed=control_seed, stop=stop)
    for submission, facts in zip(full, found, strict=True):
        submission.facts = facts
    verdicts: list[Verdict | Failed] = []
    for one in opened:
        if not isinstance(one, OpenedSubmission):
            verdicts.append(one)
            continue
        try:
            verdicts.append(give_verdict(one, spec, policy, stop))
        except GradingTimeout:
            one.claim = one.claim.model_copy(update={"checks": "full"})
            to_check = [RowsToCheck(one.table.rows, one.claim.lease)]
            (one.facts,) = recompute_many(to_check, policy, control_seed=control_seed, stop=stop)
            verdicts.append(give_verdict(one, spec, policy, stop))
    return verdicts


@dataclass
class OpenedSubmission:
    """A submission that passed every check without a forward pass."""

    claim: Claim
    task: Task | None
    """None if the task's files are missing."""
    problems: list[Problem]
    table: RolloutTable
    started_s: float
    facts: list[fact_checks.RowFacts] | Rejected | None = None
    """None if the coordinator did not ask for a full check."""


def open_submission(
    data: bytes, claim: Claim, spec: RunSpec, policy: LoadedPolicy, reader: TableReader
) -> OpenedSubmission | Verdict | Failed:
    """Reads a submission and runs every check that needs no forward pass."""
    started_s = time.monotonic()
    try:
        own = task_of(claim.lease, spec)
        task = None if file_digests(own) else make_task(own)
        problems = [] if task is None else leased_problems(claim.lease, spec.run, task)
        table = read_and_check_table(data, claim, policy, reader=reader)
    except Rejected as rejected:
        return _refusal(claim, rejected, {"policy_version": claim.policy_version})
    except (CannotCheck, ReaderFailed) as failed:
        return failed
    return OpenedSubmission(claim, task, problems, table, started_s)


def read_and_check_table(
    data: bytes, claim: Claim, policy: LoadedPolicy, *, reader: TableReader
) -> RolloutTable:
    """Returns the table after every check that needs no forward pass. Raises Rejected, CannotCheck or ReaderFailed."""
    lease, tokenizer = claim.lease, policy.tokenizer
    hidden_size = policy.decoder.shape.hidden_size
    if lease.proof.topk > hidden_size:  # the operator's mistake, not the node's
        raise CannotCheck(
            f"proof.topk={lease.proof.topk} is more than the model's {hidden_size} values per hidden state, so "
            "the shortest answers cannot be proven; lower proof.topk"
        )
    prompt_tokens = encode_prompts(lease, tokenizer)
    table = reader.read(data, table_limits(lease, max(map(len, prompt_tokens))))
    format_checks.check_binding(table, claim)
    format_checks.check_groups(table, lease)
    format_checks.check_prompts(table, prompt_tokens)
    format_checks.check_values(table, tokenizer.vocab_size)
    stops = partial(stopped_after, stop=lease.task.stop, decode=tokenizer.decode)
    format_checks.check_endings(table, tokenizer.end_tokens, lease.sampling.max_new_tokens, stops)
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


def task_of(lease: Lease, spec: RunSpec) -> TaskSpec:
    """Returns the task of a lease as `spec` has it, with its files. Raises CannotCheck if the run has none of that name."""
    title = lease.task.title
    found = spec.find_task(title, trained=lease.purpose == "train")
    if found is None:
        raise CannotCheck(f"lease {lease.lease_id} is of task {title!r}, which the run's terms do not have")
    return found


def leased_problems(lease: Lease, run: str, task: Task) -> list[Problem]:
    """Returns the problems that follow from the lease's seed. Raises CannotCheck if their prompts are not the leased ones."""
    seeds = problem_seeds(
        lease.seed,
        run=run,
        purpose=lease.purpose,
        chunk=lease.chunk,
        num_prompts=len(lease.prompts),
        attempts=lease.attempts,
    )
    problems = [pose_problem(task, lease.purpose, seed) for seed in seeds]
    if tuple(problem.prompt for problem in problems) != lease.prompts:
        raise CannotCheck(
            "posing the lease's problems again gives other prompts: problem() must depend on the seed only, and coordinator "
            "and validators need the same release of the task"
        )
    contexts = tuple(conversation_before(task, lease.task, problem) for problem in problems)
    if lease.contexts != (contexts if any(contexts) else ()):
        raise CannotCheck(
            "posing the lease's problems again gives other messages before the prompts: coordinator and validators need the same "
            "release of the task"
        )
    if lease.chat != bool(task.chat):
        raise CannotCheck(f"lease {lease.lease_id} has chat={lease.chat}, its task has chat={task.chat}")
    return problems


def encode_prompts(lease: Lease, tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return encode_leased_prompts(lease, tokenizer)
    except ValueError as error:
        raise CannotCheck(f"the policy's tokenizer cannot encode a leased prompt: {error}") from None


def give_verdict(
    one: OpenedSubmission, spec: RunSpec, policy: LoadedPolicy, stop: threading.Event | None
) -> Verdict | Failed:
    """Checks the facts of the forward pass, grades the answers and returns the verdict.

    Raises GradingTimeout if grading takes too long before the proofs were checked.
    """
    claim, table = one.claim, one.table
    evidence: dict[str, float | int | str] = {"policy_version": claim.policy_version}
    try:
        if isinstance(one.facts, Rejected):
            raise one.facts
        if one.facts is not None:
            evidence |= check_by_paths(one, one.facts, spec, policy, stop)
        limit_s = SPARED_S if one.facts is None else None
        began_s = time.monotonic()
        graded = (
            () if one.task is None else grade(one, one.task, policy.tokenizer, limit_s=limit_s, stop=stop)
        )
    except RefusedWithEvidence as refused:
        return _refusal(claim, refused, evidence | refused.evidence)
    except Rejected as rejected:
        return _refusal(claim, rejected, evidence)
    except CannotCheck as failed:
        return failed
    if graded:
        evidence |= count_outcomes(graded) | {"grade_s": round(time.monotonic() - began_s, 2)}
        if claim.lease.purpose == "eval":
            evidence |= count_prompts(table, graded, policy.tokenizer)
        evidence |= show_sample(table, graded, claim, policy.tokenizer, one.problems)
    num_tokens = sum(len(row.output_tokens) for row in table.rows)
    note = "" if graded else "; not graded, because the task's files are missing here"
    return Verdict(
        lease_id=claim.lease.lease_id,
        code=ACCEPTED,
        detail=f"{len(table.rows)} rows, {num_tokens} tokens, checked in {time.monotonic() - one.started_s:.2f} s{note}",
        rewards=tuple(reward.value for reward in graded),
        output_tokens=num_tokens,
        checks=claim.checks,
        evidence=evidence,
        transcript=transcribe(table, graded, policy.tokenizer, one.problems) if graded else "",
    )


ON_PROBATION = frozenset(
    ("reject.wrong_computation", "reject.wrong_sampling", "reject.wrong_logprobs", "void.uncertain")
)
"""Refusals that the noise of an unknown compute class could explain."""


class RefusedWithEvidence(Rejected):
    """A refusal with the numbers behind it."""

    def __init__(self, rejected: Rejected, evidence: dict[str, float | int | str]) -> None:
        super().__init__(rejected.code, rejected.detail)
        self.evidence = evidence


def check_by_paths(
    one: OpenedSubmission,
    facts: Sequence[fact_checks.RowFacts],
    spec: RunSpec,
    policy: LoadedPolicy,
    stop: threading.Event | None,
) -> dict[str, float | int | str]:
    """Checks the facts with the noise of the declared compute class and returns the numbers behind the verdict.

    Work of a class that the calibration does not have is judged by the widest noise of all its pairs. If that refuses it,
    a second forward pass with other kernels checks it again, and it is refused only if both do. Raises RefusedWithEvidence.
    """
    try:
        return check_by_noise(one, facts, spec, policy)
    except RefusedWithEvidence as refused:
        pairs = () if spec.noise is None else spec.noise.pairs
        known = not pairs or any(pair.made_by == one.table.made_by for pair in pairs)
        if known or refused.code not in ON_PROBATION:
            raise
        first = refused
    again = replace(policy, plain=not policy.plain)
    to_check = [RowsToCheck(one.table.rows, one.claim.lease)]
    (found,) = recompute_many(to_check, again, control_seed=secrets.randbits(64), stop=stop)
    if isinstance(found, Rejected):
        raise first
    try:
        return check_by_noise(one, found, spec, again) | {"refused_by_first_path": first.code}
    except RefusedWithEvidence:
        raise first from None


def check_by_noise(
    one: OpenedSubmission, facts: Sequence[fact_checks.RowFacts], spec: RunSpec, policy: LoadedPolicy
) -> dict[str, float | int | str]:
    """Checks the facts of one path. Returns the numbers, or raises RefusedWithEvidence."""
    rows, made_by, checked_by = one.table.rows, one.table.made_by, str(policy.compute_class())
    of_pair = None if spec.noise is None else spec.noise.of_pair(made_by, checked_by)
    noise = of_pair or spec.noise
    scores = fact_checks.score_facts(rows, facts, noise)
    evidence = fact_checks.evidence(rows, facts, spec.tolerances, scores)
    if made_by:
        evidence |= {"made_by": made_by, "checked_by": checked_by, "pair_measured": int(of_pair is not None)}
    try:
        fact_checks.check_facts(rows, facts, spec.tolerances, noise, scores)
    except Rejected as rejected:
        raise RefusedWithEvidence(rejected, evidence) from None
    return evidence


def transcribe(
    table: RolloutTable, graded: tuple[Reward, ...], tokenizer: Tokenizer, problems: Sequence[Problem]
) -> str:
    """Returns the answers as text for the rollout viewer, packed."""
    max_bytes = MAX_PIECES_BYTES // len(table.rows)
    samples: list[list[SampleText]] = [[] for _ in problems]
    for row, reward in zip(table.rows, graded, strict=True):
        text = make_sample(row, reward.value, reward.outcome.value, tokenizer.decode, max_bytes)
        samples[row.prompt_index].append(text)
    groups = tuple(
        GroupText(expected=problem.answer[:MAX_EXPECTED], samples=tuple(of_problem))
        for problem, of_problem in zip(problems, samples, strict=True)
    )
    return Transcript(groups=groups).pack()


def grade(
    one: OpenedSubmission,
    task: Task,
    tokenizer: Tokenizer,
    *,
    limit_s: float | None,
    stop: threading.Event | None,
) -> tuple[Reward, ...]:
    """Returns the reward of each row, in file order. With `limit_s`, raises GradingTimeout when the time is up.

    Without it, only a grader that is too slow takes longer than the pool allows: CannotCheck, which no node is blamed for.
    """
    lease = one.claim.lease
    thinks = tokenizer.thinks(chat=lease.chat, setting=ChatSetting((), lease.task.chat_template_kwargs))
    answers = [
        Answer(
            one.problems[row.prompt_index],
            text_before_stop(tokenizer.decode(row.output_tokens), lease.task.stop),
            len(row.output_tokens),
            thinks,
        )
        for row in one.table.rows
    ]
    try:
        return tuple(grading_pool().grade(task, answers, limit_s=limit_s, stop=stop))
    except GradingStopped as stopped:
        raise Stopped(str(stopped)) from None
    except CannotGrade as error:
        if limit_s is not None and isinstance(error, GradingTimeout):
            raise
        raise CannotCheck(f"an answer could not be graded: {error}") from None


def count_outcomes(graded: tuple[Reward, ...]) -> dict[str, float | int | str]:
    """Returns the number of right answers and of answers that could not be parsed; the others are wrong."""
    outcomes = Counter(reward.outcome for reward in graded)
    return {"right": outcomes[Outcome.RIGHT], "unparseable": outcomes[Outcome.UNPARSEABLE]}


def count_prompts(
    table: RolloutTable, graded: tuple[Reward, ...], tokenizer: Tokenizer
) -> dict[str, float | int | str]:
    """Returns the number of prompts with a right answer, and of those whose most frequent answer is right.

    Of answers that are equally frequent, that of the lowest sample index counts.
    """
    by_prompt: dict[int, list[tuple[int, str, bool]]] = {}
    for row, reward in zip(table.rows, graded, strict=True):
        vote = (
            row.sample_index,
            vote_key(tokenizer.decode(row.output_tokens)),
            reward.outcome is Outcome.RIGHT,
        )
        by_prompt.setdefault(row.prompt_index, []).append(vote)
    passed = majority = 0
    for votes in by_prompt.values():
        votes.sort()
        passed += any(right for _, _, right in votes)
        counts = Counter(key for _, key, _ in votes)  # keys in the order of their first sample
        winner = max(counts, key=lambda key: counts[key])
        rights = [right for _, key, right in votes if key == winner]
        majority += 2 * sum(rights) > len(rights)
    return {"passed": passed, "majority": majority}


def show_sample(
    table: RolloutTable,
    graded: tuple[Reward, ...],
    claim: Claim,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
) -> dict[str, float | int | str]:
    """Returns one answer as text for the run's page, or nothing for held-out problems: a worker could learn their answers from the page.

    The file's digest chooses the row, so that nobody can choose what is shown.
    """
    if claim.lease.purpose != "train":
        return {}
    index = int(claim.sha256[:8], 16) % len(table.rows)
    row = table.rows[index]
    return {
        "sample_prompt": row.prompt_index,
        "sample_answer": tokenizer.decode(row.output_tokens)[:SHOWN_CHARACTERS],
        "sample_reward": graded[index].value,
        "sample_expected": problems[row.prompt_index].answer[:SHOWN_EXPECTED],
    }


def _refusal(claim: Claim, rejected: Rejected, evidence: dict[str, float | int | str]) -> Verdict:
    return Verdict(
        lease_id=claim.lease.lease_id, code=rejected.code, detail=rejected.detail, evidence=evidence
    )
