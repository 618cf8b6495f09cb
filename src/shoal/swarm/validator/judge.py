"""Judges submissions: takes their bytes and claims, returns a verdict on each.

open_submission    read the table, check it against the lease            (no forward pass)
screen_many        run the model over one row of each large submission   (path_checks.py)
recompute_many     run the model over the rows, verify their proofs      (recompute.py)
give_verdict       check proofs, draws and lengths, grade the answers    (path_checks.py, fact_checks.py, grading pool,
                                                                          answer_judge.py)

Programs and mathematics are expensive to grade, and their text is the model's own only if the proofs passed, so they are graded
last. The text of a submission that was spared the forward pass is the node's choice: if its grading takes longer than
SPARED_S, the submission gets every check.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from shoal.model.stop_strings import stopped_after, text_before_stop
from shoal.model.tokenizer import ChatSetting, Tokenizer, encode_leased_prompts
from shoal.net.waiting import Stopped
from shoal.swarm.validator import fact_checks, format_checks
from shoal.swarm.validator.answer_judge import judge_answers
from shoal.swarm.validator.decode_replay import DecodeReplay
from shoal.swarm.validator.fact_checks import Evidence
from shoal.swarm.validator.path_checks import RefusedWithEvidence, check_by_paths, screen_many
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy
from shoal.swarm.validator.recompute import RowsToCheck, recompute_many
from shoal.swarm.validator.table_reader import ReaderFailed, TableReader
from shoal.tasks import CannotGrade, Outcome, Problem, Reward, Task, make_task
from shoal.tasks.datasets.file_options import file_digests
from shoal.tasks.datasets.judged_answers import JudgedAnswers
from shoal.tasks.grading.pool import Answer, GradingStopped, GradingTimeout, grading_pool
from shoal.tasks.task import vote_key
from shoal.tasks.task_errors import conversation_before, pose_problem, pose_twice
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import Claim
from shoal.wire.requirements import WeightFormat
from shoal.wire.rollouts import RolloutTable
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

SHOWN_CHARACTERS = 1000
"""Length of the sampled answer in the evidence, which the ledger keeps for ever."""
SHOWN_EXPECTED = 200
"""Length of the expected answer beside it."""
OPENING_S = 2.0
"""Seconds of opening submissions after which those that are open are judged before the next is opened."""
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
) -> Verdict:
    """Returns the verdict on one submission. Its bytes must have the claimed digest, and `policy` must be the claimed version.

    `spec` should have the task's files. Where it has only their digests, as the public terms do, everything is checked but no
    answer is graded. Raises CannotCheck or ReaderFailed if the validator's own side fails.
    """
    if (refusal := refuse_claim(claim)) is not None:
        return refusal
    (found,) = judge_many([(data, claim)], spec, policy, reader=reader, control_seed=control_seed)
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
    replay: DecodeReplay | None = None,
) -> Iterator[Verdict | Failed]:
    """Yields a verdict or failure for each submission of one policy version, in order. Their rows share prefills.

    Each is yielded before the next is graded: if the caller delivers it, no claim runs out because of another that is slow to grade.
    The claims must have passed `refuse_claim`. Raises CannotCheck if a prefill fails, because the row that caused it is unknown.
    """
    for opened in open_in_groups(submissions, spec, policy, reader):
        # The coordinator chose the checks after it had the bytes, so the node could not know them.
        full = [one for one in opened if isinstance(one, OpenedSubmission) and one.claim.checks == "full"]
        recompute_full(full, spec, policy, control_seed, stop)
        for one in opened:
            if not isinstance(one, OpenedSubmission):
                yield one
                continue
            own = policy if one.facts is None else policy_for(one, policy)
            try:
                verdict = give_verdict(one, spec, own, stop, replay)
            except GradingTimeout:
                one.claim = one.claim.model_copy(update={"checks": "full"})
                to_check, own = [RowsToCheck(one.table.rows, one.claim.lease)], policy_for(one, policy)
                (one.facts,) = recompute_many(to_check, own, control_seed=control_seed, stop=stop)
                verdict = give_verdict(one, spec, own, stop, replay)
            yield verdict


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
    judgements: list[str] = field(default_factory=list)
    """The texts of the judge model, one for each row; empty for tasks without a judge."""
    weights: WeightFormat | None = None
    """The format that its weights were rounded to, as the run admits and the file declares; None: they were not rounded."""


def policy_for(one: OpenedSubmission, policy: LoadedPolicy) -> LoadedPolicy:
    """Returns the policy with the weights that a submission declares, so that it is checked as exactly as any other."""
    return policy if one.weights is None else policy.with_weights(one.weights)


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
        weights = format_checks.check_weights(table, claim.lease, spec.admitted_weights)
    except Rejected as rejected:
        return _refusal(claim, rejected, {"policy_version": claim.policy_version})
    except (CannotCheck, ReaderFailed) as failed:
        return failed
    return OpenedSubmission(claim, task, problems, table, started_s, weights=weights)


def open_in_groups(
    submissions: Sequence[tuple[bytes, Claim]], spec: RunSpec, policy: LoadedPolicy, reader: TableReader
) -> Iterator[list[OpenedSubmission | Verdict | Failed]]:
    """Yields the opened submissions in order. A group ends when opening it has taken OPENING_S.

    Without groups, a file that is slow to read would delay the verdicts of all submissions that were claimed with it, also of
    those before it.
    """
    group: list[OpenedSubmission | Verdict | Failed] = []
    began_s = time.monotonic()
    for data, claim in submissions:
        group.append(open_submission(data, claim, spec, policy, reader))
        if time.monotonic() - began_s >= OPENING_S:
            yield group
            group, began_s = [], time.monotonic()
    if group:
        yield group


def recompute_full(
    full: Sequence[OpenedSubmission],
    spec: RunSpec,
    policy: LoadedPolicy,
    control_seed: int,
    stop: threading.Event | None,
) -> None:
    """Computes the facts of submissions that get every check: of one row first, and of the others unless that row refuses them."""
    for weights in dict.fromkeys(one.weights for one in full):
        alike = [one for one in full if one.weights == weights]
        own = policy_for(alike[0], policy)
        tables = [(one.table, one.claim) for one in alike]
        refused = screen_many(tables, spec, own, control_seed=control_seed, stop=stop)
        for one, refusal in zip(alike, refused, strict=True):
            one.facts = refusal
        left = [one for one in alike if one.facts is None]
        to_check = [RowsToCheck(one.table.rows, one.claim.lease) for one in left]
        found = recompute_many(to_check, own, control_seed=control_seed, stop=stop)
        for one, facts in zip(left, found, strict=True):
            one.facts = facts


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
    table = reader.read(data, format_checks.table_limits(lease, max(map(len, prompt_tokens))))
    format_checks.check_binding(table, claim)
    format_checks.check_groups(table, lease)
    format_checks.check_prompts(table, prompt_tokens)
    format_checks.check_values(table, tokenizer.vocab_size)
    stops = partial(stopped_after, stop=lease.task.stop, decode=tokenizer.decode)
    format_checks.check_endings(table, tokenizer.end_tokens, lease.sampling.max_new_tokens, stops)
    format_checks.check_proof_format(table, lease.proof, hidden_size)
    return table


def task_of(lease: Lease, spec: RunSpec) -> TaskSpec:
    """Returns the task of a lease as `spec` has it, with its files. Raises CannotCheck if the run has none of that name."""
    title = lease.task.title
    found = spec.find_task(title, trained=lease.purpose == "train")
    if found is None:
        raise CannotCheck(f"lease {lease.lease_id} is of task {title!r}, which the run's terms do not have")
    return found


def leased_problems(lease: Lease, run: str, task: Task) -> list[Problem]:
    """Returns the problems that follow from the lease's seed.

    Raises CannotCheck if their prompts are not the leased ones, and UnseededProblem if posing them twice here gives different ones.
    """
    seeds = problem_seeds(
        lease.seed,
        run=run,
        purpose=lease.purpose,
        chunk=lease.chunk,
        num_prompts=len(lease.prompts),
        attempts=lease.attempts,
    )
    try:
        problems = [pose_problem(task, lease.purpose, seed) for seed in seeds]
    except OSError as error:  # such as no memory for a child process
        raise CannotCheck(f"the problems cannot be posed: {error}") from None
    if tuple(problem.prompt for problem in problems) != lease.prompts:
        for seed in seeds:
            pose_twice(task, lease.purpose, seed)
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
    one: OpenedSubmission,
    spec: RunSpec,
    policy: LoadedPolicy,
    stop: threading.Event | None,
    replay: DecodeReplay | None = None,
) -> Verdict | Failed:
    """Checks the facts of the forward pass, grades the answers and returns the verdict.

    Raises GradingTimeout if grading takes too long before the proofs were checked.
    """
    claim, table = one.claim, one.table
    evidence: Evidence = {"policy_version": claim.policy_version}
    if one.weights is not None:
        evidence["weights"] = one.weights  # the coordinator computes the credit by it
    try:
        if isinstance(one.facts, Rejected):
            raise one.facts
        if one.facts is not None:
            evidence |= check_by_paths(table, claim, one.facts, spec, policy, stop)
            if replay is not None:
                evidence["replay"] = "differs"  # replaced below, unless `check` raises because bits differ
                evidence |= replay.check(table, claim, policy, secrets.SystemRandom())
        limit_s = SPARED_S if one.facts is None else None
        began_s = time.monotonic()
        graded = () if one.task is None else grade(one, one.task, policy, limit_s=limit_s, stop=stop)
    except RefusedWithEvidence as refused:
        return _refusal(claim, refused, evidence | refused.evidence)
    except Rejected as rejected:
        return _refusal(claim, rejected, evidence)
    except CannotCheck as failed:
        return failed
    if graded:
        evidence |= grading_evidence(one, graded, policy.tokenizer, time.monotonic() - began_s)
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
        transcript=transcribe(one, graded, policy.tokenizer) if graded else "",
    )


def grading_evidence(
    one: OpenedSubmission, graded: tuple[Reward, ...], tokenizer: Tokenizer, took_s: float
) -> Evidence:
    """Returns what a verdict says of the grades: right and unparseable answers (the others are wrong), time, the judge, and a sample."""
    claim, table = one.claim, one.table
    outcomes = Counter(reward.outcome for reward in graded)
    evidence: Evidence = {
        "right": outcomes[Outcome.RIGHT],
        "unparseable": outcomes[Outcome.UNPARSEABLE],
        "grade_s": round(took_s, 2),
    }
    if claim.lease.purpose == "eval":
        evidence |= count_prompts(table, graded, tokenizer)
    if one.judgements:
        evidence["judge"] = str(claim.lease.task.options["judge_path"])
    # A worker could learn the answers of held-out problems from the page, which shows the sample.
    if claim.lease.purpose == "train":
        # The file's digest chooses the row, so that nobody can choose what is shown.
        index = int(claim.sha256[:8], 16) % len(table.rows)
        row = table.rows[index]
        evidence |= {
            "sample_prompt": row.prompt_index,
            "sample_answer": tokenizer.decode(row.output_tokens)[:SHOWN_CHARACTERS],
            "sample_reward": graded[index].value,
            "sample_expected": one.problems[row.prompt_index].answer[:SHOWN_EXPECTED],
        }
    return evidence


def transcribe(one: OpenedSubmission, graded: tuple[Reward, ...], tokenizer: Tokenizer) -> str:
    """Returns the answers as text for the rollout viewer, packed. Judged answers have the judge's text beside them."""
    rows = one.table.rows
    max_bytes = MAX_PIECES_BYTES // len(rows)
    samples: list[list[SampleText]] = [[] for _ in one.problems]
    for row, reward, judgement in zip(rows, graded, one.judgements or [""] * len(rows), strict=True):
        text = make_sample(row, reward.value, reward.outcome.value, tokenizer.decode, max_bytes)
        samples[row.prompt_index].append(text.model_copy(update={"judgement": judgement}))
    groups = tuple(
        GroupText(expected=problem.answer[:MAX_EXPECTED], samples=tuple(of_problem))
        for problem, of_problem in zip(one.problems, samples, strict=True)
    )
    return Transcript(groups=groups).pack()


def grade(
    one: OpenedSubmission,
    task: Task,
    policy: LoadedPolicy,
    *,
    limit_s: float | None,
    stop: threading.Event | None,
) -> tuple[Reward, ...]:
    """Returns the reward of each row, in file order. With `limit_s`, raises GradingTimeout when the time is up.

    Answers of a task with a judge model are judged together, on the device of the policy, and their judgements are kept in `one`.
    Without `limit_s`, only a grader that is too slow takes longer than the pool allows: CannotCheck, which no node is blamed for.
    """
    lease, tokenizer = one.claim.lease, policy.tokenizer
    try:
        thinks = tokenizer.thinks(chat=lease.chat, setting=ChatSetting((), lease.task.chat_template_kwargs))
    except ValueError as error:
        raise CannotCheck(f"the chat template cannot be rendered here: {error}") from None
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
        if isinstance(task, JudgedAnswers):
            judged = judge_answers(
                task, answers, device=str(policy.decoder.head().weight_VH.device), stop=stop
            )
            one.judgements = [judgement.text for judgement in judged]
            return tuple(judgement.reward for judgement in judged)
        return tuple(grading_pool().grade(task, answers, limit_s=limit_s, stop=stop))
    except GradingStopped as stopped:
        raise Stopped(str(stopped)) from None
    except CannotGrade as error:
        if limit_s is not None and isinstance(error, GradingTimeout):
            raise
        raise CannotCheck(f"an answer could not be graded: {error}") from None


def count_prompts(table: RolloutTable, graded: tuple[Reward, ...], tokenizer: Tokenizer) -> Evidence:
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


def _refusal(claim: Claim, rejected: Rejected, evidence: Evidence) -> Verdict:
    return Verdict(
        lease_id=claim.lease.lease_id, code=rejected.code, detail=rejected.detail, evidence=evidence
    )
