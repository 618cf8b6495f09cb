"""What a lying worker changes, and to whom it may lie. That each lie is found: tests/swarm/validator/test_lies.py."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.model.builtin import create_model
from shoal.rollout.adversary.behaviour import Conduct
from shoal.rollout.adversary.lies import is_loopback, make_conduct
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.rollout.worker.submission import generate, make_requests, make_table
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


def work(conduct: Conduct, lease: Lease, model: Path) -> dict[tuple[int, int], Rollout]:
    """What a worker would send, by prompt and sample: an engine and a conduct, without the network."""
    engine = conduct.engine(
        TorchEngine(compute_dtype=conduct.compute_dtype(SPEC.compute_dtype), proof=SPEC.proof, max_rows=8)
    )
    engine.load(model, 0)
    requests = conduct.requests(make_requests(lease, engine.tokenizer), lease)
    finished = generate(engine, requests, lambda done, rows: None)
    table = conduct.table(make_table(lease, 0, finished), lease)
    return {(row.prompt_index, row.sample_index): row for row in table.rows}


def test_a_forger_changes_nothing_but_proofs(model: Path) -> None:
    lease = make_lease()
    honest = work(Conduct(), lease, model)
    forged = work(make_conduct("forged-proof", URL), lease, model)
    for place, row in forged.items():
        assert replace(row, proof=honest[place].proof) == honest[place]
        assert len(row.proof) == len(honest[place].proof)


def test_an_editor_changes_one_prompt(model: Path) -> None:
    lease = make_lease()
    honest = work(Conduct(), lease, model)
    edited = work(make_conduct("edited-prompt", URL), lease, model)
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
def test_this_machine(url: str) -> None:
    assert is_loopback(url)
    assert isinstance(make_conduct("replay", url), Conduct)


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
def test_lies_are_not_for_other_people(url: str) -> None:
    with pytest.raises(ValueError, match="on this machine"):
        make_conduct("wrong-weights", url)


def test_an_unknown_lie_is_refused_with_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match="unknown lie 'fibbing'; known: wrong-weights, "):
        make_conduct("fibbing", URL)
