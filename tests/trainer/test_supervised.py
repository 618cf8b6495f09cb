"""Supervised warm-up makes right answers likely, and is deterministic."""

import threading
from pathlib import Path

import torch
from tiny_learner import CONFIG, make_learner, output_logprobs

from shoal.model.tokenizer import load_tokenizer
from shoal.tasks import make_task
from shoal.telemetry import Log
from shoal.trainer.data.pack import pack
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.supervised import answered_problem, warm_up
from shoal.wire.run_spec import TaskSpec

TASK = make_task(TaskSpec(name="sort", options={"length": 3}))


def warmed(model: Path, num_steps: int) -> Learner:
    config = CONFIG.model_copy(update={"supervised_steps": num_steps, "rows_per_micro_batch": 4})
    learner = make_learner(model, config)
    warm_up(learner, [TASK], load_tokenizer(model), log=Log("test"), stop=threading.Event())
    return learner


def held_out_loss(model: Path, learner: Learner) -> float:
    tokenizer = load_tokenizer(model)
    samples = [answered_problem(TASK, tokenizer, seed) for seed in range(1000, 1032)]
    (micro,) = pack(samples, row_tokens=1000, rows_per_micro_batch=1)
    with torch.no_grad():
        return -float(output_logprobs(learner.decoder, micro).mean())


def test_warm_up_lowers_the_held_out_loss(model: Path) -> None:
    before, after = held_out_loss(model, warmed(model, 0)), held_out_loss(model, warmed(model, 25))
    assert before > 4
    assert after < 2


def test_warm_up_is_deterministic(model: Path) -> None:
    first, second = warmed(model, 4), warmed(model, 4)
    assert first.version == 0
    assert not first.optimizer.state, "the learner's own optimizer starts fresh"
    for left, right in zip(first.decoder.parameters(), second.decoder.parameters(), strict=True):
        assert torch.equal(left, right)


def test_answers_end_with_the_end_token(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    sample = answered_problem(TASK, tokenizer, 5)
    problem = TASK.problem("train", 5)
    assert sample.tokens[: sample.prompt_len] == tuple(tokenizer.encode_prompt(problem.prompt, chat=False))
    assert tokenizer.decode(tuple(sample.tokens[sample.prompt_len :])) == problem.answer
    assert sample.tokens[-1] in tokenizer.end_tokens
