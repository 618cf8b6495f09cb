"""Submissions of several tasks and evaluations, judged together: each by its own task and temperature."""

from dataclasses import replace
from pathlib import Path

import pytest
from honest_work import make_claim, make_lease, make_policy, make_spec, make_table, sharpen

from shoal.model.tokenizer import CharTokenizer
from shoal.swarm.validator.judge import count_prompts, judge_many, task_of
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy
from shoal.swarm.validator.table_reader import TableReader
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, vote_key
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease, Verdict
from shoal.wire.rollouts import Finish, Rollout, RolloutTable, encode
from shoal.wire.run_spec import OwnSampling, TaskSpec

SHORT = TaskSpec(name="sort", label="short", options={"length": 3})
SPEC = make_spec(more_tasks=(SHORT,))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return sharpen(make_policy(tmp_path_factory.mktemp("models")))


def of_task(spec: TaskSpec, number: int, temperature: float = 1.0) -> Lease:
    lease = make_lease(SPEC.model_copy(update={"task": spec}), number=number, prompts=2)
    return lease.model_copy(
        update={"sampling": lease.sampling.model_copy(update={"temperature": temperature})}
    )


def test_rows_of_several_temperatures_share_a_prefill(policy: LoadedPolicy) -> None:
    leases = [of_task(SPEC.task, 1), of_task(SHORT, 2, temperature=0.3), of_task(SHORT, 3)]
    tables = [make_table(lease, policy) for lease in leases]
    # The last one samples at another temperature than its lease says.
    tables[2] = make_table(leases[2].model_copy(update={"sampling": leases[1].sampling}), policy)
    data = [encode(table) for table in tables]
    with TableReader() as reader:
        judged = judge_many(
            [(one, make_claim(lease, one)) for one, lease in zip(data, leases, strict=True)],
            SPEC,
            policy,
            reader=reader,
            control_seed=7,
        )
        verdicts = [one for one in judged if isinstance(one, Verdict)]
    assert [verdict.code for verdict in verdicts[:2]] == [ACCEPTED, ACCEPTED]
    assert verdicts[2].code.startswith("reject.")


def test_a_lease_is_judged_by_its_own_task() -> None:
    assert task_of(of_task(SHORT, 1), SPEC) == SHORT
    unknown = SHORT.model_copy(update={"label": "third"})
    with pytest.raises(CannotCheck, match="is of task 'third', which the run's terms do not have"):
        task_of(of_task(unknown, 1), SPEC)


def test_prompts_with_a_right_answer_and_with_a_right_majority_are_counted() -> None:
    tokenizer = CharTokenizer("0123456789 =\n")

    def row(prompt: int, sample: int, text: str) -> Rollout:
        tokens = tuple(tokenizer.encode_prompt(text, chat=False))
        return Rollout(
            prompt_index=prompt,
            sample_index=sample,
            prompt_tokens=(1,),
            output_tokens=tokens,
            logprobs=(0.0,) * len(tokens),
            finish=Finish.LENGTH,
            proof=b"",
        )

    answers = [("7", "7", "8"), ("8", "8", "7"), ("8", "7", "6"), ("8", "8", "8")]  # 7 is right
    rows = [
        row(prompt, sample, text) for prompt, texts in enumerate(answers) for sample, text in enumerate(texts)
    ]
    graded = tuple(RIGHT if text == "7" else WRONG for texts in answers for text in texts)
    table = RolloutTable(lease_id="0" * 32, policy_version=0, rows=tuple(rows))
    assert count_prompts(table, graded, tokenizer) == {"passed": 3, "majority": 1}
    first = replace(rows[6], sample_index=1), replace(rows[7], sample_index=0), rows[8]
    tied = replace(table, rows=first)
    assert count_prompts(tied, (WRONG, RIGHT, UNPARSEABLE), tokenizer)["majority"] == 1, (
        "the first sample wins a tie"
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("so \\boxed{ 1 2 } then", "12"),
        ("maybe 3\n\nThe answer is 1,042.\n", "1042"),
        ("<think>7</think> It is 007", "7"),
        ("Therefore\n  Paris ", "paris"),
        ("", ""),
    ],
)
def test_votes_are_counted_by_what_answers_say(text: str, key: str) -> None:
    assert vote_key(text) == key


def test_own_sampling_replaces_single_values(tmp_path: Path) -> None:
    own = SHORT.model_copy(update={"sampling": OwnSampling(max_new_tokens=3)})
    assert SPEC.sampling.of(own).max_new_tokens == 3
    assert SPEC.sampling.of(own).temperature == SPEC.sampling.temperature
