"""Messages before a prompt, arguments of the chat template, and stop strings: from the lease to the verdict."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from honest_work import make_claim, make_lease, make_spec

from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.model.stop_strings import WINDOW, stopped_after, stops_now, text_before_stop
from shoal.model.tokenizer import CharTokenizer, load_tokenizer
from shoal.rollout.engine.api import Engine, FinishedRow, GenerationRequest, make_requests, make_table
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.rollout.engine.transformers_engine import TransformersEngine
from shoal.swarm.validator.judge import judge, leased_problems
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy
from shoal.swarm.validator.table_reader import TableReader
from shoal.tasks import Problem, make_task
from shoal.tasks.task_errors import TaskError, conversation_before
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease, Message, Verdict
from shoal.wire.rollouts import Finish, RolloutTable, encode
from shoal.wire.run_spec import ProofSpec, Sampling, TaskSpec

STOPPED = TaskSpec(name="sort", options={"length": 4}, stop=("0", "1", "e?"))
SPEC = make_spec(task=STOPPED, sampling=Sampling(max_new_tokens=90, samples_per_prompt=4))
LEASE = make_lease(SPEC, prompts=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    create_model("tiny", folder, 0)
    return folder


def make(kind: str, model: Path) -> Engine:
    options: dict[str, Any] = {
        "compute_dtype": "float32",
        "proof": ProofSpec(),
        "max_rows": 16,
        "device": "cpu",
    }
    engine: Engine = TorchEngine(**options) if kind == "torch" else TransformersEngine(**options)
    engine.load(model, 0)
    return engine


def generate(engine: Engine, requests: list[GenerationRequest], lease: Lease = LEASE) -> RolloutTable:
    engine.submit(requests)
    rows: list[FinishedRow] = []
    while engine.has_work:
        rows += engine.step()
    return make_table(lease, 0, rows)


def judged(table: RolloutTable, model: Path, reader: TableReader, lease: Lease = LEASE) -> Verdict:
    policy = LoadedPolicy(
        version=0, decoder=load_decoder(model, torch.float32), tokenizer=load_tokenizer(model)
    )
    data = encode(table)
    return judge(data, make_claim(lease, data), SPEC, policy, reader=reader, control_seed=3)


@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    kind: str, model: Path, reader: TableReader
) -> None:
    engine = make(kind, model)
    table = generate(engine, make_requests(LEASE, engine.tokenizer))
    assert judged(table, model, reader).code == ACCEPTED
    stopped = [row for row in table.rows if row.finish is Finish.STOP]
    assert stopped, "a model with random weights writes a digit soon"
    for row in table.rows:
        text = engine.tokenizer.decode(row.output_tokens)
        shorter = engine.tokenizer.decode(row.output_tokens[:-1])
        assert not any(stop in shorter for stop in STOPPED.stop)
        assert any(stop in text for stop in STOPPED.stop) == (row.finish is Finish.STOP)


def test_a_worker_that_ignores_the_stop_is_refused(model: Path, reader: TableReader) -> None:
    engine = make("torch", model)
    requests = [replace(request, stop=()) for request in make_requests(LEASE, engine.tokenizer)]
    verdict = judged(generate(engine, requests), model, reader)
    assert verdict.code == "reject.early_stop"
    assert "completes a stop string" in verdict.detail


def test_a_worker_that_stops_without_a_stop_string_is_refused(model: Path, reader: TableReader) -> None:
    engine = make("torch", model)
    table = generate(engine, make_requests(LEASE, engine.tokenizer))
    index, row = next(
        (place, row)
        for place, row in enumerate(table.rows)
        if row.finish is Finish.STOP and len(row.output_tokens) > 1
    )
    cut = replace(row, output_tokens=row.output_tokens[:-1], logprobs=row.logprobs[:-1])
    wrong = replace(row, finish=Finish.LENGTH)
    for lie, words in (
        (cut, "without an end token or a stop string"),
        (wrong, "its last token makes it STOP"),
    ):
        rows = tuple(lie if place == index else one for place, one in enumerate(table.rows))
        verdict = judged(replace(table, rows=rows), model, reader)
        assert (verdict.code, words in verdict.detail) == ("reject.early_stop", True), verdict


def test_the_first_stop_string_is_found_in_any_place() -> None:
    tokenizer = CharTokenizer("ab-")
    for length in (1, 3, 63, 64, 65, 127, 128, 129, 300):
        tokens = tokenizer.encode_prompt("a" * length + "-b" + "a" * 90 + "-b", chat=False)[1:]
        assert stopped_after(tokens, ["-b"], tokenizer.decode) == length + 2
        assert stopped_after(tokens[: length + 1], ["-b"], tokenizer.decode) is None
        assert stops_now(tokens[: length + 2], ["-b"], tokenizer.decode)
        assert not stops_now(tokens[: length + 1], ["-b"], tokenizer.decode)
    assert stopped_after([], ["a"], tokenizer.decode) is None
    assert stopped_after(tokens, [], tokenizer.decode) is None
    assert WINDOW > 64, "the longest stop string fits"
    assert text_before_stop("one two three", ["three", "two"]) == "one "
    assert text_before_stop("one", ["two"]) == "one"


# -- messages ---------------------------------------------------------------------------------------------

ASKED = TaskSpec(name="add", system="You are terse.", chat_template_kwargs={"enable_thinking": False})


def with_context(*context: Message) -> Lease:
    lease = make_lease(make_spec(task=ASKED), prompts=2)
    return lease.model_copy(update={"contexts": (context,) * 2 if context else ()})


def test_the_lease_has_the_messages_and_the_validator_poses_them_again() -> None:
    system = Message(role="system", content="You are terse.")
    task = make_task(ASKED)
    assert len(leased_problems(with_context(system), "small", task)) == 2
    for lie in ((), (Message(role="system", content="You are verbose."),)):
        with pytest.raises(CannotCheck, match="other messages before the prompts"):
            leased_problems(with_context(*lie), "small", task)


def test_a_problem_may_have_its_own_messages() -> None:
    task = make_task(ASKED)
    own = (("system", "Count."), ("user", "1?"), ("assistant", "one"))
    turns = conversation_before(task, ASKED, Problem("2?", "two", messages=own))
    assert [(turn.role, turn.content) for turn in turns] == list(own), (
        "its own system prompt replaces the task's"
    )
    turns = conversation_before(task, ASKED, Problem("2?", "two", messages=own[1:]))
    assert [turn.role for turn in turns] == ["system", "user", "assistant"]
    with pytest.raises(TaskError, match="must be \\('system', 'user' or 'assistant', its text\\)"):
        conversation_before(task, ASKED, Problem("2?", "two", messages=(("tool", "x"),)))
    bare = make_task(TaskSpec(name="sort"))
    with pytest.raises(TaskError, match="need prompts that are chat turns"):
        conversation_before(bare, ASKED, Problem("21=", "12"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", [""]), ("stop", ["x" * 65]), ("stop", ["x"] * 9), ("system", "x" * 20_001), ("label", "A b")],
)
def test_impossible_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        TaskSpec.model_validate_json(json.dumps({"name": "add", field: value}))
