"""What a lying worker changes, and where lies are allowed. tests/swarm/validator/test_lies.py checks that each is found."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.model.builtin import create_model
from shoal.rollout.adversary.lies import is_loopback, make_behaviour
from shoal.rollout.engine.api import Behaviour, make_requests, make_table
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.tasks import make_task
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.rollouts import Rollout
from shoal.wire.run_spec import RunSpec, Sampling, TaskSpec
from shoal.wire.seeded_draw import problem_seeds

URL = "http://127.0.0.1:8700"
NODE = "ab" * 32
SPEC = RunSpec(
    run="lies",
    task=TaskSpec(name="sort", options={"length": 4}),
    compute_dtype="float32",
    sampling=Sampling(max_new_tokens=40, samples_per_prompt=2),
    last_version=9,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions") / "v0"
    create_model("tiny", folder, seed=0)
    return folder


def make_lease() -> Lease:
    seed = hashlib.sha256(b"lease").hexdigest()
    seeds = problem_seeds(seed, run=SPEC.run, purpose="train", chunk=0, num_prompts=3)
    task = make_task(SPEC.task)
    return Lease(
        lease_id="01" * 16,
        run=SPEC.run,
        node=NODE,
        purpose="train",
        epoch=1,
        seed=seed,
        chunk=0,
        policies=(PolicyRef(version=0, weights_digest="00" * 32),),
        relays=(),
        task=SPEC.task,
        prompts=tuple(task.problem("train", seed).prompt for seed in seeds),
        sampling=SPEC.sampling,
        proof=SPEC.proof,
        max_bytes=1 << 20,
        issued_at_s=0.0,
        deadline_s=1e12,
    )


def work(behaviour: Behaviour, lease: Lease, model: Path) -> dict[tuple[int, int], Rollout]:
    """Returns what a worker would send, by prompt and sample, without the network."""
    engine = behaviour.engine(
        TorchEngine(compute_dtype=behaviour.compute_dtype(SPEC.compute_dtype), proof=SPEC.proof, max_rows=8)
    )
    engine.load(model, 0)
    engine.submit(behaviour.requests(make_requests(lease, engine.tokenizer), lease))
    finished = []
    while engine.has_work:
        finished += engine.step()
    table = behaviour.table(make_table(lease, 0, finished), lease)
    return {(row.prompt_index, row.sample_index): row for row in table.rows}


def test_forged_proof_changes_proofs_only(model: Path) -> None:
    lease = make_lease()
    honest = work(Behaviour(), lease, model)
    forged = work(make_behaviour("forged-proof", URL), lease, model)
    for place, row in forged.items():
        assert replace(row, proof=honest[place].proof) == honest[place]
        assert len(row.proof) == len(honest[place].proof)


def test_edited_prompt_changes_one_prompt(model: Path) -> None:
    lease = make_lease()
    honest = work(Behaviour(), lease, model)
    edited = work(make_behaviour("edited-prompt", URL), lease, model)
    changed = {place[0] for place, row in edited.items() if row.prompt_tokens != honest[place].prompt_tokens}
    assert changed == {0}


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "http://127.9.8.7",
        "http://localhost:80",
        "http://[::1]:8700",
        "http://LOCALHOST",
    ],
)
def test_lies_are_allowed_with_a_coordinator_on_this_machine(url: str) -> None:
    assert is_loopback(url)
    assert isinstance(make_behaviour("replay", url), Behaviour)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:8700",
        "http://0.0.0.0:8700",
        "https://swarm.example",
        "http://127.0.0.1.swarm.example",
        "http://localhost.swarm.example",
        "http://[::2]:1",
    ],
)
def test_lies_are_refused_with_a_remote_coordinator(url: str) -> None:
    with pytest.raises(ValueError, match="on this machine"):
        make_behaviour("wrong-weights", url)


def test_an_unknown_lie_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown lie 'fibbing'; known: wrong-weights, "):
        make_behaviour("fibbing", URL)
