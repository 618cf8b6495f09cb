"""Leases without a coordinator, and the work on them: what `shoal arena` and benchmarks of lies generate and check.

leases = [practice_lease("arena", f"seed/{number}", ...) for number in range(64)]
tables = generate_tables(behaviour, engine, leases)
"""

import copy
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace

from shoal.rollout.engine.api import (
    Behaviour,
    Engine,
    FinishedRow,
    GenerationRequest,
    generate,
    make_requests,
    make_table,
)
from shoal.tasks import make_task
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.rollouts import RolloutTable
from shoal.wire.run_spec import ProofSpec, Sampling, TaskSpec
from shoal.wire.seeded_draw import problem_seeds

NODE = "ab" * 32


def practice_lease(
    run: str, name: str, *, task: TaskSpec, sampling: Sampling, proof: ProofSpec, num_prompts: int
) -> Lease:
    """Returns a train lease of version 0. Its prompts and draws follow from `name`."""
    seed = hashlib.sha256(name.encode()).hexdigest()
    seeds = problem_seeds(seed, run=run, purpose="train", chunk=0, num_prompts=num_prompts)
    posed = make_task(task)
    return Lease(
        lease_id=hashlib.sha256(seed.encode()).hexdigest()[:32],
        run=run,
        node=NODE,
        purpose="train",
        epoch=1,
        seed=seed,
        chunk=0,
        policies=(PolicyRef(version=0, weights_digest="0" * 64),),
        relays=(),
        task=task,
        prompts=tuple(posed.problem("train", one).prompt for one in seeds),
        chat=posed.chat,
        sampling=sampling,
        proof=proof,
        max_bytes=1 << 26,
        issued_at_s=0.0,
        deadline_s=1e12,
    )


def generate_tables(
    behaviour: Behaviour, engine: Engine, leases: Sequence[Lease], stop: threading.Event | None = None
) -> list[RolloutTable]:
    """Generates the tables of several leases together. Each lease has its own copy of the behaviour.

    Raises Stopped when `stop` is set.
    """
    behaviours = [copy.copy(behaviour) for _ in leases]
    requests: list[GenerationRequest] = []
    places: list[tuple[int, int]] = []
    for number, (lease, its_own) in enumerate(zip(leases, behaviours, strict=True)):
        for request in its_own.requests(make_requests(lease, engine.tokenizer), lease):
            requests.append(replace(request, prompt_index=len(places)))
            places.append((number, request.prompt_index))
    finished: list[list[FinishedRow]] = [[] for _ in leases]
    for step in generate(engine, requests, stop):
        for row in step:
            number, prompt_index = places[row.request.prompt_index]
            finished[number].append(replace(row, request=replace(row.request, prompt_index=prompt_index)))
    tables = []
    for lease, its_own, rows in zip(leases, behaviours, finished, strict=True):
        rows.sort(key=lambda row: (row.request.prompt_index, row.request.sample_index))
        tables.append(its_own.table(make_table(lease, 0, rows), lease))
    return tables
