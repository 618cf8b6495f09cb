"""Supervised warm-up before version 0: cross-entropy on the task's own answers.

A model with random weights never earns a reward, and a group whose rewards are all equal teaches nothing. A few dozen
supervised steps teach the form of an answer, so that some answers are right and reinforcement learning can begin.
"""

import random
import threading
from collections.abc import Sequence

from shoal.model.tokenizer import ChatSetting, Tokenizer
from shoal.net.waiting import Stopped
from shoal.tasks import Task
from shoal.tasks.task_errors import conversation_before, pose_problem
from shoal.telemetry import Log
from shoal.trainer.data.batch import TrainSample
from shoal.trainer.optim.learner import Learner, clip_gradient, make_optimizer, warmup_rate
from shoal.wire.run_spec import TaskSpec

PROBLEMS_PER_STEP = 64


def warm_up(
    learner: Learner,
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    *,
    specs: Sequence[TaskSpec] = (),
    log: Log,
    stop: threading.Event,
) -> None:
    """Makes `supervised_steps` steps with a separate optimizer; the learner's own starts fresh at version 0.

    Problems are drawn from the tasks by the weights of `specs`, which also have their system prompts.
    """
    config = learner.config
    optimizer = make_optimizer(learner.decoder, config, learning_rate=config.supervised_learning_rate)
    for step in range(config.supervised_steps):
        rng = random.Random(f"supervised/{config.seed}/{step}")
        seeds = [rng.getrandbits(63) for _ in range(PROBLEMS_PER_STEP)]
        weights = [spec.weight for spec in specs] or None
        places = random.Random(f"tasks/{config.seed}/{step}").choices(
            range(len(tasks)), weights, k=len(seeds)
        )
        samples = [
            answered_problem(tasks[place], tokenizer, seed, specs[place] if specs else None)
            for place, seed in zip(places, seeds, strict=True)
        ]
        rate = warmup_rate(
            config.supervised_learning_rate, step=step, warmup_steps=config.supervised_steps // 10
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = _accumulate(learner, samples, stop)
        clip_gradient(learner.decoder, config.clip_norm)
        optimizer.step()
        if (step + 1) % 25 == 0 or step + 1 == config.supervised_steps:
            log.info("supervised warm-up", step=step + 1, of=config.supervised_steps, loss=loss)


def answered_problem(
    task: Task, tokenizer: Tokenizer, seed: int, spec: TaskSpec | None = None
) -> TrainSample:
    """Returns a training problem with its right answer as a sample."""
    problem = pose_problem(task, "train", seed)
    setting = ChatSetting()
    if spec is not None:
        turns = conversation_before(task, spec, problem)
        setting = ChatSetting(tuple((one.role, one.content) for one in turns), spec.chat_template_kwargs)
    prompt = tokenizer.encode_prompt(problem.prompt, chat=task.chat, setting=setting)
    # Without the end of the thought, the model would learn answers that earn nothing.
    thought = "</think>\n\n" if tokenizer.thinks(chat=task.chat, setting=setting) else ""
    answer = tokenizer.encode_answer(thought + problem.answer)
    return TrainSample(
        tokens=(*prompt, *answer),
        prompt_len=len(prompt),
        logprobs=(0.0,) * len(answer),
        advantage=1.0,
        lag=0,
    )


def _accumulate(learner: Learner, samples: list[TrainSample], stop: threading.Event) -> float:
    num_tokens = sum(sample.num_outputs for sample in samples)
    total = 0.0
    for micro in learner.micro_batches(samples):
        if stop.is_set():
            raise Stopped("stopped in the supervised warm-up")
        logprobs_N = learner.policy.scores(micro.to(learner.device)).logprobs_N
        loss = -logprobs_N.sum() / num_tokens
        loss.backward()
        total += float(loss.detach())
    return learner.ranks.total(total)
