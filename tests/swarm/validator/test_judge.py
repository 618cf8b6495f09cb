"""Real submissions of a real (tiny) model: honest ones pass, and every lie gets its own code."""

import base64
import copy
import math
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from honest_work import (
    NODE,
    Drawn,
    generate,
    make_claim,
    make_lease,
    make_policy,
    make_spec,
    make_table,
    sharpen,
    with_row,
    with_rows,
)

from shoal.net.waiting import Stopped
from shoal.swarm.validator.fact_checks import check_forgery
from shoal.swarm.validator.judge import judge, leased_problems
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy
from shoal.swarm.validator.recompute import recompute
from shoal.swarm.validator.table_reader import TableReader
from shoal.tasks import Problem, Reward, Split, make_task
from shoal.tasks.task_errors import UnseededProblem
from shoal.toploc.field import PRIME
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease, PolicyRef, Verdict
from shoal.wire.rollouts import Finish, RolloutTable, encode
from shoal.wire.run_spec import ProofSpec, RunSpec, Sampling, TaskSpec, default_tolerances
from shoal.wire.transcript import Transcript

SPEC = make_spec()
LEASE = make_lease(SPEC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def policy(folder: Path) -> LoadedPolicy:
    return sharpen(make_policy(folder))


@pytest.fixture(scope="module")
def honest(policy: LoadedPolicy) -> RolloutTable:
    return make_table(LEASE, policy)


Judge = Callable[..., Verdict]


def number(verdict: Verdict, name: str) -> float:
    """Returns a number of the verdict's evidence."""
    value = verdict.evidence[name]
    assert not isinstance(value, str)
    return value


@pytest.fixture
def verdict(reader: TableReader, policy: LoadedPolicy) -> Judge:
    def of(
        table: RolloutTable | bytes, *, lease: Lease = LEASE, spec: RunSpec = SPEC, **claim: Any
    ) -> Verdict:
        data = table if isinstance(table, bytes) else encode(table)
        return judge(data, make_claim(lease, data, **claim), spec, policy, reader=reader, control_seed=5)

    return of


def nudged(policy: LoadedPolicy, size: float) -> LoadedPolicy:
    """Returns the model after one step of sign descent of this size."""
    decoder = copy.deepcopy(policy.decoder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.sign().to(parameter.dtype), alpha=size)
    return LoadedPolicy(policy.version, decoder, policy.tokenizer)


# -- the honest -----------------------------------------------------------------------------------------


def test_an_accepted_verdict_has_the_answers_as_text(
    verdict: Judge, honest: RolloutTable, policy: LoadedPolicy
) -> None:
    given = verdict(honest)
    groups = Transcript.unpack(base64.b64decode(given.transcript)).groups
    samples = [sample for group in groups for sample in group.samples]
    assert [sample.reward for sample in samples] == list(given.rewards)
    for row, sample in zip(honest.rows, samples, strict=True):
        assert "".join(sample.pieces) == policy.tokenizer.decode(row.output_tokens)
        assert sample.logprobs == tuple(round(value, 2) for value in row.logprobs)
    problems = leased_problems(LEASE, SPEC.run, make_task(SPEC.task))
    assert [group.expected for group in groups] == [problem.answer for problem in problems]


class Unseeded:
    """A task whose problems do not depend on their seeds."""

    chat = False

    def problem(self, split: Split, seed: int) -> Problem:
        return Problem(secrets.token_hex(), "1")

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        raise NotImplementedError


def test_random_problems_are_told_from_another_release_of_the_task() -> None:
    with pytest.raises(UnseededProblem, match="must depend on the seed only"):
        leased_problems(LEASE, SPEC.run, Unseeded())
    with pytest.raises(CannotCheck, match="gives other prompts"):
        leased_problems(LEASE, SPEC.run, make_task(TaskSpec(name="count")))


@pytest.mark.parametrize("max_new_tokens", [1, 2, 12, 40])
def test_honest_work_is_accepted_with_the_swarms_rewards(
    verdict: Judge, policy: LoadedPolicy, max_new_tokens: int
) -> None:
    spec = make_spec(sampling=Sampling(max_new_tokens=max_new_tokens, samples_per_prompt=4))
    lease = make_lease(spec, number=max_new_tokens)
    table = make_table(lease, policy)
    found = verdict(table, lease=lease, spec=spec)
    assert (found.code, found.lease_id) == (ACCEPTED, lease.lease_id), found.detail
    assert found.output_tokens == sum(len(row.output_tokens) for row in table.rows)
    task, tokenizer = make_task(lease.task), policy.tokenizer
    for row, reward in zip(table.rows, found.rewards, strict=True):
        prompt = lease.prompts[row.prompt_index]
        problem = Problem(prompt=prompt, answer="".join(sorted(prompt.removesuffix("="))))
        text = tokenizer.decode(row.output_tokens)
        assert reward == task.reward(problem, text, len(row.output_tokens)).value
    assert number(found, "exponent_mismatches_max") <= 3 and found.evidence["draw_misses"] == 0


@pytest.mark.parametrize("max_new_tokens", [1, 2, 12])
def test_short_answers_in_bfloat16_are_accepted_too(
    reader: TableReader, tmp_path: Path, max_new_tokens: int
) -> None:
    """A batch in which no row has a second token has states of the prompts only, in the policy's dtype."""
    policy = make_policy(tmp_path, dtype=torch.bfloat16)
    spec = make_spec(
        compute_dtype="bfloat16",
        tolerances=default_tolerances("bfloat16"),
        sampling=Sampling(max_new_tokens=max_new_tokens, samples_per_prompt=4),
    )
    lease = make_lease(spec, number=max_new_tokens)
    data = encode(make_table(lease, policy))
    found = judge(data, make_claim(lease, data), spec, policy, reader=reader, control_seed=5)
    assert found.code == ACCEPTED, found.detail


def test_a_topk_above_the_hidden_size_blames_no_node(verdict: Judge, honest: RolloutTable) -> None:
    lease = LEASE.model_copy(update={"proof": ProofSpec(topk=256)})
    with pytest.raises(
        CannotCheck, match=r"proof\.topk=256 is more than the model's 128 values per hidden state"
    ):
        verdict(honest, lease=lease)


def test_lengths_are_compared_with_budgets(verdict: Judge, policy: LoadedPolicy) -> None:
    task = TaskSpec(name="sort", options={"style": "chat"}, budgets=(10, 20), budget_alpha=0.01)
    spec = make_spec(task=task)
    lease = make_lease(spec, number=77)
    table = make_table(lease, policy)
    found = verdict(table, lease=lease, spec=spec)
    assert found.code == ACCEPTED, found.detail
    for row, reward in zip(table.rows, found.rewards, strict=True):
        target = 10 if "Think for 10 tokens" in lease.prompts[row.prompt_index] else 20
        assert -0.01 * abs(target - len(row.output_tokens)) <= reward + 1e-9
        assert reward < 1
    assert found.evidence["right"] == 0 and 0 < number(found, "unparseable") <= len(table.rows)


def test_a_lease_that_contradicts_its_task_blames_no_node(verdict: Judge, honest: RolloutTable) -> None:
    with pytest.raises(CannotCheck, match="has chat=True, its task has chat=False"):
        verdict(honest, lease=LEASE.model_copy(update={"chat": True}))


def test_right_answers_earn_their_reward(folder: Path, reader: TableReader) -> None:
    """Rows that happen to be right, from a model that was taught one prompt, are paid in file order."""
    spec = make_spec(sampling=Sampling(max_new_tokens=6, samples_per_prompt=2))
    lease = make_lease(spec, prompts=1, number=77)
    taught = make_policy(folder, seed=5)
    prompt = taught.tokenizer.encode_prompt(lease.prompts[0], chat=False)
    answer = taught.tokenizer.encode_answer("".join(sorted(lease.prompts[0].removesuffix("="))))
    row = torch.tensor([prompt + answer])
    optimizer = torch.optim.AdamW(taught.decoder.parameters(), lr=3e-3)
    for _ in range(40):
        hidden = taught.decoder(row[:, :-1], torch.arange(row.shape[1] - 1)[None])
        logits = taught.decoder.logits(hidden)[0, len(prompt) - 1 :]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    data = encode(make_table(lease, taught))
    found = judge(data, make_claim(lease, data), spec, taught, reader=reader, control_seed=1)
    assert (found.code, found.rewards) == (ACCEPTED, (1.0, 1.0)), found.detail


def test_honest_bfloat16_work_passes_its_own_tolerances(folder: Path, reader: TableReader) -> None:
    spec = make_spec(compute_dtype="bfloat16", tolerances=default_tolerances("bfloat16"))
    policy = sharpen(make_policy(folder, dtype=torch.bfloat16))
    data = encode(make_table(LEASE, policy))
    found = judge(data, make_claim(LEASE, data), spec, policy, reader=reader, control_seed=1)
    assert found.code == ACCEPTED, found.detail


def test_batching_does_not_change_the_facts(policy: LoadedPolicy, honest: RolloutTable) -> None:
    together = recompute(honest.rows, LEASE, policy, control_seed=1)
    apart = recompute(honest.rows, LEASE, replace(policy, batch_tokens=20), control_seed=1)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-4)
        assert len(one.segments) == len(other.segments)


# -- lies in the file -----------------------------------------------------------------------------------


def test_replayed_and_copied_files_have_different_codes(verdict: Judge, honest: RolloutTable) -> None:
    other = replace(honest, lease_id="f" * 32)
    assert verdict(other, copy_of=NODE).code == "reject.replayed"
    assert verdict(other, copy_of="cd" * 32).code == "reject.copied"


def test_a_file_that_names_its_lease_is_no_copy(verdict: Judge, honest: RolloutTable) -> None:
    assert verdict(honest, copy_of="cd" * 32).code == ACCEPTED


def test_files_of_another_lease_or_version_are_refused(verdict: Judge, honest: RolloutTable) -> None:
    assert verdict(replace(honest, lease_id="f" * 32)).code == "reject.wrong_lease"
    assert verdict(honest, version=1).code == "reject.wrong_lease"
    assert verdict(replace(honest, policy_version=1), version=1).code == "reject.wrong_lease", "not leased"


def test_bytes_that_are_no_table_are_malformed(verdict: Judge) -> None:
    assert verdict(b"PAR1 nothing PAR1").code == "reject.malformed_file"


def test_groups_must_be_complete(verdict: Judge, honest: RolloutTable) -> None:
    rows = honest.rows
    for wrong in (rows[:-1], (*rows[:-1], rows[0]), (*rows[:-1], replace(rows[-1], sample_index=99))):
        assert verdict(replace(honest, rows=wrong)).code == "reject.incomplete_group"


def test_prompts_must_be_the_leased_ones(verdict: Judge, policy: LoadedPolicy, honest: RolloutTable) -> None:
    hint = tuple(policy.tokenizer.encode_prompt("1234=", chat=False))
    assert verdict(with_row(honest, 3, prompt_tokens=hint)).code == "reject.edited_prompt"
    assert verdict(with_rows(honest, prompt_tokens=hint)).code == "reject.other_prompts"
    longer = (*honest.rows[0].prompt_tokens, *[7] * 300)
    assert verdict(with_row(honest, 0, prompt_tokens=longer)).code == "reject.edited_prompt"


@pytest.mark.parametrize(
    "change",
    [
        {"output_tokens": (5, 6, -1)},
        {"output_tokens": (5, 6, 10**6)},
        {"logprobs": (-1.0, math.nan, -1.0)},
        {"logprobs": (-1.0, -math.inf, -1.0)},
        {"logprobs": (-1.0, 0.5, -1.0)},
    ],
)
def test_values_outside_their_range_are_refused(
    verdict: Judge, honest: RolloutTable, change: dict[str, object]
) -> None:
    plain = {"output_tokens": (5, 6, 7), "logprobs": (-1.0, -1.0, -1.0)}
    assert verdict(with_row(honest, 2, **(plain | change))).code == "reject.bad_values"


def test_proofs_must_have_the_right_count_and_form(verdict: Judge, honest: RolloutTable) -> None:
    proof = honest.rows[0].proof
    assert len(proof) == 258
    for wrong in (b"", proof[:-2], bytes(258), b"\xff\xd8" + proof[2:], proof[:2] + b"\xff\xff" + proof[4:]):
        assert verdict(with_row(honest, 0, proof=wrong)).code == "reject.malformed_proof"
    # Two proofs for a row that can have one: more bytes than the lease allows are seen before the rest.
    assert verdict(with_row(honest, 0, proof=proof * 2)).code == "reject.malformed_proof"


# -- truncated answers ----------------------------------------------------------------------------------


def cut(lease: Lease, policy: LoadedPolicy, *, append_end: bool) -> RolloutTable:
    """Honest generation, cut after three tokens to save the rest; proofs and log-probs are kept consistent."""
    end = next(iter(policy.tokenizer.end_tokens))
    rows = []
    for row in generate(lease, policy):
        if len(row.tokens) < 5:
            rows.append(row)
        elif append_end:
            rows.append(Drawn([*row.tokens[:3], end], [*row.logprobs[:3], -0.1], row.states[:3]))
        else:
            rows.append(Drawn(row.tokens[:3], row.logprobs[:3], row.states[:2]))
    return make_table(lease, policy, rows)


def test_truncated_answers_are_early_stops(verdict: Judge, policy: LoadedPolicy) -> None:
    assert verdict(cut(LEASE, policy, append_end=False)).code == "reject.early_stop"
    found = verdict(cut(LEASE, policy, append_end=True))
    assert found.code == "reject.early_stop", found.detail
    ended = with_rows(cut(LEASE, policy, append_end=False), finish=Finish.EOS)
    assert verdict(ended).code == "reject.early_stop", "says EOS without an end token"


def test_a_truncation_with_the_old_proofs_is_an_early_stop_too(
    verdict: Judge, policy: LoadedPolicy, honest: RolloutTable
) -> None:
    stumps = cut(LEASE, policy, append_end=True)
    kept = tuple(replace(stump, proof=row.proof) for stump, row in zip(stumps.rows, honest.rows, strict=True))
    assert verdict(replace(stumps, rows=kept)).code == "reject.early_stop"


def test_going_on_after_an_end_token_is_refused(
    verdict: Judge, policy: LoadedPolicy, honest: RolloutTable
) -> None:
    end = next(iter(policy.tokenizer.end_tokens))
    tokens = honest.rows[0].output_tokens
    spliced = (*tokens[:2], end, *tokens[3:])
    assert verdict(with_row(honest, 0, output_tokens=spliced)).code == "reject.early_stop"


# -- lies about the computation -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1e-2, 1e-3])
def test_other_weights_are_a_wrong_computation(
    verdict: Judge, policy: LoadedPolicy, folder: Path, size: float | None
) -> None:
    other = sharpen(make_policy(folder, seed=1)) if size is None else nudged(policy, size)
    found = verdict(make_table(LEASE, other))
    assert found.code == "reject.wrong_computation", found.detail
    assert "exponents" in found.detail or "mantissas" in found.detail


def test_an_edited_prompt_that_is_hidden_is_a_wrong_computation(verdict: Judge, policy: LoadedPolicy) -> None:
    """The worker shows the model another prompt and reports the leased one."""
    shown = LEASE.model_copy(update={"prompts": tuple("9" + prompt[1:] for prompt in LEASE.prompts)})
    secret = make_table(shown, policy)
    told = {
        index: tuple(policy.tokenizer.encode_prompt(prompt, chat=False))
        for index, prompt in enumerate(LEASE.prompts)
    }
    rows = tuple(replace(row, prompt_tokens=told[row.prompt_index]) for row in secret.rows)
    assert verdict(replace(secret, rows=rows)).code == "reject.wrong_computation"


def constant_proof(value: float) -> bytes:
    bits = int(torch.tensor([value], dtype=torch.bfloat16).view(torch.int16)) & 0xFFFF
    return b"".join(word.to_bytes(2, "big") for word in [PRIME, bits, *[0] * 127])


def random_proof(rng: np.random.Generator) -> bytes:
    return b"".join(int(word).to_bytes(2, "big") for word in [PRIME, *rng.integers(0, PRIME, 128)])


def test_made_up_proofs_are_forged(verdict: Judge, honest: RolloutTable) -> None:
    rng = np.random.default_rng(0)
    forgeries: dict[str, Callable[[], bytes]] = {
        "constant": lambda: constant_proof(8.0),
        "random": lambda: random_proof(rng),
        "zero": lambda: PRIME.to_bytes(2, "big") + bytes(256),
    }
    for name, make in forgeries.items():
        rows = tuple(replace(row, proof=make() if row.proof else b"") for row in honest.rows)
        found = verdict(replace(honest, rows=rows))
        assert found.code == "reject.forged_proof", f"{name}: {found.detail}"


def test_proofs_that_fit_everywhere_meet_the_control_points(policy: LoadedPolicy) -> None:
    """A proof that fits at any position is caught by control points alone: the check for constants is switched off."""
    spec = make_spec(sampling=Sampling(max_new_tokens=33, samples_per_prompt=4))
    lease = make_lease(spec, number=9)
    table = make_table(lease, policy)
    states = torch.stack(generate(lease, policy)[0].states).flatten()
    forged = constant_proof(float(states.abs().topk(128).values.median()))
    rows = tuple(replace(row, proof=forged * (len(row.proof) // 258)) for row in table.rows)
    facts = recompute(rows, lease, policy, control_seed=1)
    blind = [
        replace(fact, segments=tuple(s._replace(constant=False) for s in fact.segments)) for fact in facts
    ]
    with pytest.raises(Rejected, match="points that no proof commits to") as refused:
        check_forgery(rows, blind, spec.tolerances)
    assert refused.value.code == "reject.forged_proof"
    check_forgery(table.rows, recompute(table.rows, lease, policy, control_seed=1), spec.tolerances)


def test_random_proofs_over_other_tokens_are_a_wrong_computation(verdict: Judge, folder: Path) -> None:
    """Nothing in it is the leased model's, and a random proof looks like one of an unrelated model."""
    rng = np.random.default_rng(0)
    other = make_table(LEASE, sharpen(make_policy(folder, seed=1)))
    rows = tuple(replace(row, proof=random_proof(rng) if row.proof else b"") for row in other.rows)
    assert verdict(replace(other, rows=rows)).code == "reject.wrong_computation"


# -- lies about the sampling ----------------------------------------------------------------------------


def through_the_right_model(lease: Lease, policy: LoadedPolicy, tokens: list[list[int]]) -> RolloutTable:
    """Tokens of whatever origin, prefilled through the leased model: its own states, proofs and log-probs."""
    rows = []
    for index, output in enumerate(tokens):
        prompt = policy.tokenizer.encode_prompt(
            lease.prompts[index // lease.sampling.samples_per_prompt], chat=False
        )
        row = torch.tensor([prompt + output])
        with torch.inference_mode():
            hidden = policy.decoder(row[:, :-1], torch.arange(row.shape[1] - 1)[None])[0]
            logprobs = torch.log_softmax(policy.decoder.logits(hidden[len(prompt) - 1 :]).float(), dim=-1)
        claimed = [float(logprobs[step, token]) for step, token in enumerate(output)]
        rows.append(Drawn(output, claimed, list(hidden[len(prompt) :])))
    return make_table(lease, policy, rows)


def test_tokens_of_another_model_are_a_wrong_sampling(
    verdict: Judge, policy: LoadedPolicy, folder: Path
) -> None:
    other = sharpen(make_policy(folder, seed=1))
    tokens = [row.tokens for row in generate(LEASE, other)]
    found = verdict(through_the_right_model(LEASE, policy, tokens))
    assert found.code == "reject.wrong_sampling", found.detail


def test_another_temperature_is_a_wrong_sampling(verdict: Judge, policy: LoadedPolicy) -> None:
    found = verdict(make_table(LEASE, policy, generate(LEASE, policy, temperature=1.5)))
    assert found.code == "reject.wrong_sampling", found.detail


def test_one_replaced_token_is_a_wrong_sampling(verdict: Judge, policy: LoadedPolicy) -> None:
    """One wrong answer is corrected and all else is honest: in float32 no token may differ from its draw."""
    tokens = [row.tokens for row in generate(LEASE, policy)]
    long = next(index for index, row in enumerate(tokens) if len(row) == 12)
    tokens[long] = [*tokens[long][:5], (tokens[long][5] + 30) % 80 + 3, *tokens[long][6:]]
    found = verdict(through_the_right_model(LEASE, policy, tokens))
    assert found.code == "reject.wrong_sampling", found.detail
    assert number(found, "draw_misses") >= 1


def test_another_seed_is_a_wrong_sampling(verdict: Judge, policy: LoadedPolicy) -> None:
    """Best of n, or rows swapped within a group: honest draws, but not the leased ones."""
    reseeded = LEASE.model_copy(update={"seed": "12" * 32})
    assert verdict(make_table(reseeded, policy)).code == "reject.wrong_sampling"


def test_wrong_logprobs_alone_are_named_so(verdict: Judge, honest: RolloutTable) -> None:
    shifted = tuple(min(0.0, logprob + 0.05) for logprob in honest.rows[1].logprobs)
    assert verdict(with_row(honest, 1, logprobs=shifted)).code == "reject.wrong_logprobs"
    zeros = tuple(replace(row, logprobs=(0.0,) * len(row.logprobs)) for row in honest.rows)
    assert verdict(replace(honest, rows=zeros)).code == "reject.wrong_logprobs"


# -- our own side ---------------------------------------------------------------------------------------


def test_a_check_can_be_stopped(policy: LoadedPolicy, honest: RolloutTable) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        recompute(honest.rows, LEASE, policy, control_seed=1, stop=stop)


def test_a_lease_that_contradicts_itself_blames_no_node(verdict: Judge, honest: RolloutTable) -> None:
    lease = LEASE.model_copy(update={"prompts": ("1111=", *LEASE.prompts[1:])})
    with pytest.raises(CannotCheck, match="gives other prompts"):
        verdict(honest, lease=lease)


def test_broken_weights_blame_no_node(
    reader: TableReader, policy: LoadedPolicy, honest: RolloutTable
) -> None:
    broken = LoadedPolicy(0, copy.deepcopy(policy.decoder), policy.tokenizer)
    with torch.no_grad():
        next(broken.decoder.parameters()).fill_(math.nan)
    data = encode(honest)
    with pytest.raises(CannotCheck, match="not finite"):
        judge(data, make_claim(LEASE, data), SPEC, broken, reader=reader, control_seed=1)


def test_several_leased_versions_accept_the_one_that_was_used(verdict: Judge, honest: RolloutTable) -> None:
    refs = tuple(PolicyRef(version=version, weights_digest="0" * 64) for version in (0, 1, 2))
    lease = LEASE.model_copy(update={"policies": refs})
    assert verdict(honest, lease=lease).code == ACCEPTED
