"""Shoal's whole algorithm in one file: one process, no network, one core, under a minute.

    python examples/one_process.py [--steps 100] [--lag 2]

A swarm runs the same steps on machines that do not trust each other:

    worker      generate                  samples tokens with the lease's seed; 258 bytes tie them to the policy
    validator   reward, check             computes the reward; one forward pass checks the policy and the samples
    trainer     advantages, loss, update  makes the better answers of a group more likely; publishes the next version

Shape letters: B rows (prompts x samples), T tokens of a row, G samples of a group, H hidden size, V vocabulary.
"""

import argparse
import copy
import hashlib
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal import toploc
from shoal.model.builtin import create_model
from shoal.model.decoder import Decoder, KVCache
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.tasks import Problem, Task, make_task
from shoal.wire.run_spec import TaskSpec, Tolerances
from shoal.wire.seeded_draw import prompt_seed, sample_seed, uniforms

NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS = 16, 16, 6
SUPERVISED_STEPS, SUPERVISED_RATE, SUPERVISED_BATCH = 18, 1e-3, 64
LEARNING_RATE, WARMUP_STEPS, CLIP_NORM, BETAS = 3e-4, 5, 1.0, (0.9, 0.99)
EPS, DELTA = 0.2, 4.0
TOLERANCES = Tolerances()


@dataclass(frozen=True)
class Rollouts:
    """Answers to some prompts; NUM_SAMPLES rows are a group. All prompts have one length, so no padding is needed."""

    seed: str
    prompt_len: int
    tokens_BT: Tensor
    mask_BT: Tensor
    """1 for output tokens up to and including the end token, else 0."""
    logprobs_BT: Tensor
    proofs_B: list[bytes]


# -- worker ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def generate(policy: Decoder, tokenizer: Tokenizer, problems: Sequence[Problem], seed: str) -> Rollouts:
    """Samples answers. Each token is the first whose cumulative probability exceeds the seed's uniform for its position."""
    prompts = [
        tokenizer.encode_prompt(problem.prompt, chat=False)
        for problem in problems
        for _ in range(NUM_SAMPLES)
    ]
    tokens_BT, uniforms_BT = torch.tensor(prompts), draws(seed, len(problems))
    num_rows, prompt_len = tokens_BT.shape
    cache = KVCache(policy, num_slots=num_rows, max_context=prompt_len + MAX_NEW_TOKENS)
    mask_BT, logprobs_BT = torch.zeros(num_rows, prompt_len), torch.zeros(num_rows, prompt_len)
    alive_B, new_BT, states = torch.ones(num_rows, dtype=torch.bool), tokens_BT, []
    for place in range(MAX_NEW_TOKENS):
        cache.context = tokens_BT.shape[1]
        positions_BT = torch.arange(cache.context - new_BT.shape[1], cache.context).expand_as(new_BT)
        states.append(policy(new_BT, positions_BT, cache=cache)[:, -1])
        logp_BV = policy.logits(states[-1]).log_softmax(-1)
        cdf_BV = logp_BV.double().exp().cumsum(-1)
        new_BT = (cdf_BV <= uniforms_BT[:, place, None]).sum(-1, keepdim=True).clamp(max=cdf_BV.shape[1] - 1)
        tokens_BT = torch.cat([tokens_BT, new_BT], 1)
        logprobs_BT = torch.cat([logprobs_BT, logp_BV.gather(1, new_BT)], 1)
        mask_BT = torch.cat([mask_BT, alive_B[:, None].float()], 1)
        alive_B &= ~torch.isin(new_BT[:, 0], torch.tensor(sorted(tokenizer.end_tokens)))
    proofs_B = toploc.build_proofs(proven(torch.stack(states, 1), mask_BT))
    return Rollouts(seed, prompt_len, tokens_BT, mask_BT, logprobs_BT, proofs_B)


def draws(seed: str, num_prompts: int) -> Tensor:
    """Returns the uniform random number of every sample and position, [B, T]."""
    seeds = [sample_seed(seed, i, j) for i in range(num_prompts) for j in range(NUM_SAMPLES)]
    places_T = np.arange(MAX_NEW_TOKENS, dtype=np.uint64)
    return torch.from_numpy(uniforms(np.array(seeds, dtype=np.uint64)[:, None], places_T))


def proven(states_BTH: Tensor, mask_BT: Tensor) -> list[Tensor]:
    """Returns the states that a proof covers: those of output tokens except the first, which comes from the prompt."""
    lengths_B = mask_BT.sum(1).long().tolist()
    return [states_TH[1:length] for states_TH, length in zip(states_BTH, lengths_B, strict=True)]


# -- validator -------------------------------------------------------------------------------------------------


def reward(task: Task, tokenizer: Tokenizer, problems: Sequence[Problem], rollouts: Rollouts) -> list[float]:
    """Computes the rewards from the text. Workers do not send rewards."""
    rewards = []
    for row, (tokens_T, mask_T) in enumerate(zip(rollouts.tokens_BT, rollouts.mask_BT, strict=True)):
        answer = tokens_T[mask_T > 0].tolist()
        problem, text = problems[row // NUM_SAMPLES], tokenizer.decode(answer)
        rewards.append(task.reward(problem, text, len(answer)).value)
    return rewards


@torch.no_grad()
def check(policy: Decoder, rollouts: Rollouts) -> str:
    """Checks finished answers with one forward pass; returns "accepted" or the code of the first failed check."""
    start, ours = rollouts.prompt_len, TOLERANCES
    tokens_BT, mask_BT, claimed_BT = (
        x[:, start:] for x in (rollouts.tokens_BT, rollouts.mask_BT, rollouts.logprobs_BT)
    )
    states_BTH = states_before(policy, rollouts.tokens_BT)[:, start - 1 :]
    checks = toploc.verify_proofs(rollouts.proofs_B, proven(states_BTH, mask_BT), control_seed=0)
    for found in (segment for row in checks for segment in row):
        if found.exponent_mismatches > ours.exponent_mismatches or found.mantissa_mean > ours.mantissa_mean:
            return "reject.wrong_computation"
    logp_BTV = policy.logits(states_BTH).log_softmax(-1)
    logp_BT = logp_BTV.gather(-1, tokens_BT[..., None])[..., 0]
    if (((logp_BT - claimed_BT).abs() * mask_BT).sum(1) / mask_BT.sum(1)).max() > ours.logprob:
        return "reject.wrong_logprobs"
    high_BT = logp_BTV.double().exp().cumsum(-1).gather(-1, tokens_BT[..., None])[..., 0]
    low_BT = high_BT - logp_BT.double().exp()
    uniforms_BT = draws(rollouts.seed, len(tokens_BT) // NUM_SAMPLES)
    missed_BT = (uniforms_BT < low_BT - ours.draw) | (uniforms_BT > high_BT + ours.draw)
    if (missed_BT * mask_BT).sum() / mask_BT.sum() > ours.draw_misses:
        return "reject.wrong_sampling"
    return "accepted"


def states_before(decoder: Decoder, tokens_BT: Tensor) -> Tensor:
    """Returns for every token except the first the state that predicts it, [B, T - 1, H]."""
    inputs_BT = tokens_BT[:, :-1]
    states_BTH: Tensor = decoder(inputs_BT, torch.arange(inputs_BT.shape[1]).expand_as(inputs_BT))
    return states_BTH


# -- trainer ---------------------------------------------------------------------------------------------------


def advantages(rewards: list[float]) -> Tensor:
    """Returns how much better each answer was than its group. A group of equal rewards gives zeros: no signal."""
    rewards_PG = torch.tensor(rewards).view(-1, NUM_SAMPLES)
    return (
        (rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std(1, keepdim=True) + 1e-6)
    ).flatten()


def grpo_loss(logprobs: Tensor, behaviour: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Computes GRPO with two-sided clipping, averaged over all tokens. A test compares it with shoal.trainer.optim.loss."""
    ratio = torch.exp((logprobs - behaviour).clamp(max=20.0))
    bounded, clipped = ratio.clamp(max=DELTA), ratio.clamp(1 - EPS, 1 + EPS)
    return -(torch.minimum(bounded * advantage, clipped * advantage) * mask).sum() / mask.sum()


def update(
    learner: Decoder, optimizer: torch.optim.Optimizer, rollouts: Rollouts, advantage_B: Tensor
) -> float:
    """Trains on one batch of rollouts and returns the loss."""
    logp_BTV = learner.logits(states_before(learner, rollouts.tokens_BT)).log_softmax(-1)
    logp_BT = logp_BTV.gather(-1, rollouts.tokens_BT[:, 1:, None])[..., 0]
    signal_BT = rollouts.mask_BT[:, 1:] * (advantage_B != 0)[:, None]
    loss = grpo_loss(logp_BT, rollouts.logprobs_BT[:, 1:], advantage_B[:, None], signal_BT)
    return descend(learner, optimizer, loss)


def descend(learner: Decoder, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Makes one optimizer step on a clipped gradient."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(learner.parameters(), CLIP_NORM)
    optimizer.step()
    return loss.item()


def warm_up(learner: Decoder, tokenizer: Tokenizer, task: Task) -> None:
    """Trains on right answers first: a model with random weights never earns a reward that could be reinforced."""
    optimizer = torch.optim.AdamW(learner.parameters(), lr=SUPERVISED_RATE, weight_decay=0.0)
    for step in range(SUPERVISED_STEPS):
        problems = [
            task.problem("train", step * SUPERVISED_BATCH + index) for index in range(SUPERVISED_BATCH)
        ]
        prompts_BT = torch.tensor(
            [tokenizer.encode_prompt(problem.prompt, chat=False) for problem in problems]
        )
        answers_BT = torch.tensor([tokenizer.encode_answer(problem.answer) for problem in problems])
        states_BTH = states_before(learner, torch.cat([prompts_BT, answers_BT], 1))
        logits_BTV = learner.logits(states_BTH[:, prompts_BT.shape[1] - 1 :])
        descend(
            learner,
            optimizer,
            torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), answers_BT.flatten()),
        )


def publish(learner: Decoder) -> Decoder:
    """Returns the weights that workers get: the fp32 master weights rounded to bfloat16."""
    policy = copy.deepcopy(learner)
    for parameter in policy.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return policy


# -- the loop --------------------------------------------------------------------------------------------------


def main(num_steps: int, lag: int, seed: int) -> tuple[float, float]:
    """Trains; returns the mean reward of the first and of the last tenth of the steps."""
    torch.set_num_threads(1)
    task = make_task(TaskSpec(name="sort", options={"length": 4}))
    with tempfile.TemporaryDirectory() as folder:
        create_model("tiny", Path(folder) / "model", seed)
        learner, tokenizer = load_decoder(Path(folder) / "model"), load_tokenizer(Path(folder) / "model")
    liar = publish(learner)  # a worker that skips the download and runs other weights
    warm_up(learner, tokenizer, task)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    published = deque([publish(learner)], maxlen=lag + 1)
    curve: list[float] = []
    print("version  reward  loss     honest    liar                      s")
    for version in range(num_steps):
        started_s = time.monotonic()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (version + 1) / (WARMUP_STEPS + 1))
        lease_seed = hashlib.sha256(f"{seed}/{version}".encode()).hexdigest()
        problems = [task.problem("train", prompt_seed(lease_seed, index)) for index in range(NUM_PROMPTS)]
        policy = published[0]  # the oldest allowed version: workers of a swarm lag behind the trainer
        rollouts = generate(policy, tokenizer, problems, lease_seed)
        verdict = check(policy, rollouts)
        assert verdict == "accepted", verdict
        rewards = reward(task, tokenizer, problems, rollouts)
        loss = update(learner, optimizer, rollouts, advantages(rewards))
        published.append(publish(learner))
        curve.append(sum(rewards) / len(rewards))
        if version % 10 == 0 or version == num_steps - 1:
            caught = check(policy, generate(liar, tokenizer, problems, lease_seed))
            print(
                f"{version + 1:7d}  {curve[-1]:6.3f}  {loss:+.4f}  {verdict}  {caught}  {time.monotonic() - started_s:.2f}"
            )
    tenth = max(1, num_steps // 10)
    return sum(curve[:tenth]) / tenth, sum(curve[-tenth:]) / tenth


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Shoal's whole algorithm in one process.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lag", type=int, default=2, help="how many versions workers are behind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    first, last = main(arguments.steps, arguments.lag, arguments.seed)
    print(f"mean reward {first:.3f} -> {last:.3f}")
