"""Lies: each is told by the worker's own code, and each is found by the validator's, with its own code."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.model.builtin import create_model
from shoal.model.load import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.rollout.conduct import Conduct
from shoal.rollout.lies import LIES, is_loopback, make_conduct
from shoal.rollout.submission import generate, make_requests, make_table
from shoal.rollout.torch_engine import TorchEngine
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.reader import Reader
from shoal.swarm.validator.recompute import Policy
from shoal.tasks import make_task
from shoal.wire.codes import CODES
from shoal.wire.draw import problem_seeds
from shoal.wire.lease import Lease, PolicyRef, Verdict
from shoal.wire.messages import Claim
from shoal.wire.rollouts import Rollout, RolloutTable, encode
from shoal.wire.run import RunSpec, Sampling, TaskSpec

URL = "http://127.0.0.1:8700"
NODE = "ab" * 32
SPEC = RunSpec(
    run="lies",
    task=TaskSpec(name="sort", options={"length": 4}),
    compute_dtype="float32",
    sampling=Sampling(max_new_tokens=40, samples_per_prompt=2),
    last_version=9,
)

EXPECTED = {
    "wrong-weights": "reject.wrong_computation",
    "q8-weights": "reject.wrong_computation",
    "int8-weights": "reject.wrong_computation",
    "int4-weights": "reject.wrong_computation",
    "other-dtype": "reject.wrong_computation",
    "stale-weights": "reject.wrong_computation",
    "smaller-model": "reject.wrong_sampling",
    "forged-proof": "reject.forged_proof",
    "typical-proof": "reject.forged_proof",
    "edited-prompt": "reject.edited_prompt",
    "hidden-prompt": "reject.wrong_computation",
    "hidden-token": "reject.wrong_computation",
    "other-prompts": "reject.other_prompts",
    "replaced-tokens": "reject.wrong_computation",
    "truncated": "reject.early_stop",
    "cut-short": "reject.early_stop",
    "wrong-logprobs": "reject.wrong_logprobs",
    "hot-sampling": "reject.wrong_sampling",
    "cold-sampling": "reject.wrong_sampling",
    "other-seeds": "reject.wrong_sampling",
    "best-of-n": "reject.wrong_sampling",
    "copied-rows": "reject.wrong_sampling",
    "replay": "reject.replayed",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions, by number."""
    root = tmp_path_factory.mktemp("versions")
    for version in range(2):
        create_model("tiny", root / f"v{version}", seed=version)
    return [root / "v0", root / "v1"]


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with Reader() as reader:
        yield reader


def make_lease(number: int, *, num_prompts: int = 3) -> Lease:
    seed = hashlib.sha256(f"lease {number}".encode()).hexdigest()
    seeds = problem_seeds(seed, run=SPEC.run, purpose="train", chunk=0, num_prompts=num_prompts)
    task = make_task(SPEC.task)
    return Lease(
        lease_id=f"{number:032x}",
        run=SPEC.run,
        node=NODE,
        purpose="train",
        epoch=1,
        seed=seed,
        chunk=0,
        policies=tuple(PolicyRef(version=version, weights_digest="00" * 32) for version in range(2)),
        relays=(),
        task=SPEC.task,
        prompts=tuple(task.problem("train", seed).prompt for seed in seeds),
        sampling=SPEC.sampling,
        proof=SPEC.proof,
        max_bytes=1 << 20,
        issued_at_s=0.0,
        deadline_s=1e12,
    )


class Worked:
    """A worker's hands: an engine and a conduct, without the network."""

    def __init__(self, conduct: Conduct, folders: list[Path]) -> None:
        self._conduct, self._folders = conduct, folders
        self._engine = conduct.engine(
            TorchEngine(compute_dtype=conduct.compute_dtype(SPEC.compute_dtype), proof=SPEC.proof, max_rows=8)
        )

    def table(self, lease: Lease, version: int) -> RolloutTable:
        if self._engine.policy_version != version:
            self._engine.load(self._folders[version], version)
        requests = self._conduct.requests(make_requests(lease, self._engine.tokenizer), lease)
        finished = generate(self._engine, requests, lambda done, rows: None)
        return self._conduct.table(make_table(lease, version, finished), lease)

    def data(self, lease: Lease, version: int) -> bytes:
        return self._conduct.data(encode(self.table(lease, version)))


def check(data: bytes, lease: Lease, folder: Path, reader: Reader, *, copy_of: str | None = None) -> Verdict:
    version = int(folder.name[1:])
    claim = Claim(
        lease=lease,
        policy_version=version,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        received_at_s=0.0,
        deadline_s=1e12,
        copy_of=copy_of,
    )
    policy = Policy(version, load_decoder(folder), load_tokenizer(folder))
    return judge(data, claim, SPEC, policy, reader=reader, control_seed=7)


def test_honest_work_is_accepted_before_and_after_a_swap(folders: list[Path], reader: Reader) -> None:
    worker = Worked(make_conduct(None, "https://swarm.example"), folders)
    for number, version in ((1, 0), (2, 1), (3, 1), (4, 0)):
        lease = make_lease(number)
        verdict = check(worker.data(lease, version), lease, folders[version], reader)
        assert verdict.code == "accepted", verdict.detail
        assert len(verdict.rewards) == lease.num_rows


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_found_by_its_own_check(lie: str, folders: list[Path], reader: Reader) -> None:
    worker = Worked(make_conduct(lie, URL), folders)
    first, second = make_lease(1), make_lease(2)
    sent = worker.data(first, 0)
    again = worker.data(second, 1)
    copy_of = NODE if again == sent else None  # what the coordinator would have noticed
    verdict = check(again, second, folders[1], reader, copy_of=copy_of)
    assert verdict.code == EXPECTED[lie], verdict.detail
    assert verdict.code in CODES
    assert verdict.rewards == ()


def test_the_first_file_of_a_replayer_is_honest(folders: list[Path], reader: Reader) -> None:
    lease = make_lease(1)
    data = Worked(make_conduct("replay", URL), folders).data(lease, 0)
    assert check(data, lease, folders[0], reader).code == "accepted"


def by_place(table: RolloutTable) -> dict[tuple[int, int], Rollout]:
    return {(row.prompt_index, row.sample_index): row for row in table.rows}


def test_a_forger_changes_nothing_but_proofs(folders: list[Path]) -> None:
    lease = make_lease(1)
    honest = by_place(Worked(Conduct(), folders).table(lease, 0))
    forged = by_place(Worked(make_conduct("forged-proof", URL), folders).table(lease, 0))
    for place, row in forged.items():
        assert replace(row, proof=honest[place].proof) == honest[place]
        assert len(row.proof) == len(honest[place].proof)


def test_an_editor_changes_one_prompt(folders: list[Path]) -> None:
    lease = make_lease(1)
    honest = by_place(Worked(Conduct(), folders).table(lease, 0))
    edited = by_place(Worked(make_conduct("edited-prompt", URL), folders).table(lease, 0))
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
