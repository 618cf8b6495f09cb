"""A small lease, and honest work on it: a KV-cached decoder that knows nothing of the engine or the validator."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from shoal.model.builtin import create_model
from shoal.model.decoder import Decoder, KVCache
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.tasks import make_task
from shoal.toploc import build_proofs
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.messages import Claim
from shoal.wire.rollouts import Finish, Rollout, RolloutTable
from shoal.wire.run_spec import RunSpec, Sampling, TaskSpec
from shoal.wire.seeded_draw import problem_seeds, sample_seed, uniforms

TASK = TaskSpec(name="sort", options={"length": 4})
NODE = "ab" * 32


def make_spec(**changes: object) -> RunSpec:
    fields: dict[str, object] = {
        "run": "small",
        "task": TASK,
        "compute_dtype": "float32",
        "sampling": Sampling(max_new_tokens=12, samples_per_prompt=4),
        "last_version": 3,
    }
    return RunSpec(**(fields | changes))  # type: ignore[arg-type]


def make_lease(
    spec: RunSpec, *, number: int = 1, prompts: int = 4, versions: tuple[int, ...] = (0,)
) -> Lease:
    seed = hashlib.sha256(f"seed/{number}".encode()).hexdigest()
    seeds = problem_seeds(seed, run=spec.run, purpose="train", chunk=0, num_prompts=prompts)
    task = make_task(spec.task)
    return Lease(
        lease_id=f"{number:032x}",
        run=spec.run,
        node=NODE,
        purpose="train",
        epoch=1,
        seed=seed,
        chunk=0,
        policies=tuple(PolicyRef(version=version, weights_digest="0" * 64) for version in versions),
        relays=(),
        task=spec.task,
        prompts=tuple(task.problem("train", s).prompt for s in seeds),
        chat=task.chat,
        sampling=spec.sampling,
        proof=spec.proof,
        max_bytes=1 << 20,
        issued_at_s=0.0,
        deadline_s=1e12,
    )


def make_policy(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, version: int = 0
) -> LoadedPolicy:
    path = folder / f"tiny-{seed}"
    if not path.exists():
        create_model("tiny", path, seed)
    return LoadedPolicy(version=version, decoder=load_decoder(path, dtype), tokenizer=load_tokenizer(path))


def sharpen(policy: LoadedPolicy, factor: float = 4.0) -> LoadedPolicy:
    """Make a random model sure of itself, as a trained one is: end tokens likely here, unlikely there."""
    assert isinstance(policy.decoder, Decoder)
    with torch.no_grad():
        policy.decoder.model.norm.weight.mul_(factor)
    return policy


@dataclass
class Drawn:
    tokens: list[int]
    logprobs: list[float]
    states: list[torch.Tensor]


@torch.inference_mode()
def generate(lease: Lease, policy: LoadedPolicy, *, temperature: float | None = None) -> list[Drawn]:
    """Generates every row of the lease in one batch; prompts of a sort task have one length."""
    decoder, tokenizer = policy.decoder, policy.tokenizer
    assert isinstance(decoder, Decoder)
    samples, max_new = lease.sampling.samples_per_prompt, lease.sampling.max_new_tokens
    prompts = [
        tokenizer.encode_prompt(prompt, chat=False) for prompt in lease.prompts for _ in range(samples)
    ]
    length = len(prompts[0])
    seeds = [sample_seed(lease.seed, i, j) for i in range(len(lease.prompts)) for j in range(samples)]
    uniform_RT = uniforms(
        np.array(seeds, dtype=np.uint64)[:, None], np.arange(max_new, dtype=np.uint64)[None]
    )
    cache = KVCache(decoder, num_slots=len(prompts), max_context=length + max_new)
    rows = [Drawn([], [], []) for _ in prompts]
    tokens_BT, positions_BT = torch.tensor(prompts), torch.arange(length).expand(len(prompts), length)
    for step in range(max_new):
        cache.context = length + step
        state_BH = decoder(tokens_BT, positions_BT, cache=cache)[:, -1]
        logprobs_BV = torch.log_softmax(
            decoder.logits(state_BH).float() / (temperature or lease.sampling.temperature), dim=-1
        )
        cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
        drawn_B = torch.searchsorted(
            cumulative_BV, torch.from_numpy(uniform_RT[:, step : step + 1].copy()), right=True
        ).clamp(max=decoder.shape.vocab_size - 1)[:, 0]
        for index, row in enumerate(rows):
            if row.tokens and row.tokens[-1] in tokenizer.end_tokens:
                continue
            token = int(drawn_B[index])
            row.tokens.append(token)
            row.logprobs.append(float(logprobs_BV[index, token]))
            if step:
                row.states.append(state_BH[index].clone())
        tokens_BT, positions_BT = drawn_B[:, None], torch.full((len(rows), 1), length + step)
    return rows


def make_table(
    lease: Lease, policy: LoadedPolicy, rows: list[Drawn] | None = None, *, prover: LoadedPolicy | None = None
) -> RolloutTable:
    """Returns the honest table. Liars pass their own `prover` and `rows`."""
    rows = rows if rows is not None else generate(lease, policy)
    ends, hidden = policy.tokenizer.end_tokens, policy.decoder.shape.hidden_size
    states = [torch.stack(row.states) if row.states else torch.zeros(0, hidden) for row in rows]
    proofs = build_proofs(states, topk=lease.proof.topk, segment_tokens=lease.proof.segment_tokens)
    samples = lease.sampling.samples_per_prompt
    return RolloutTable(
        lease_id=lease.lease_id,
        policy_version=policy.version,
        rows=tuple(
            Rollout(
                prompt_index=index // samples,
                sample_index=index % samples,
                prompt_tokens=tuple(
                    policy.tokenizer.encode_prompt(lease.prompts[index // samples], chat=False)
                ),
                output_tokens=tuple(row.tokens),
                logprobs=tuple(row.logprobs),
                finish=Finish.EOS if row.tokens[-1] in ends else Finish.LENGTH,
                proof=proof,
            )
            for index, (row, proof) in enumerate(zip(rows, proofs, strict=True))
        ),
    )


def make_claim(lease: Lease, data: bytes, *, version: int = 0, copy_of: str | None = None) -> Claim:
    return Claim(
        lease=lease,
        policy_version=version,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        received_at_s=1.0,
        deadline_s=1e12,
        copy_of=copy_of,
    )


def with_row(table: RolloutTable, index: int, **changes: object) -> RolloutTable:
    rows = list(table.rows)
    rows[index] = replace(rows[index], **changes)  # type: ignore[arg-type]
    return replace(table, rows=tuple(rows))


def with_rows(table: RolloutTable, **changes: object) -> RolloutTable:
    return replace(table, rows=tuple(replace(row, **changes) for row in table.rows))  # type: ignore[arg-type]
