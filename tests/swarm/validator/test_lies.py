"""Every lie that `shoal worker --lie` can tell, told by the real engine, and the code it is refused with."""

from pathlib import Path

import pytest
import torch
from honest_work import NODE, make_claim, make_lease, make_spec

from shoal.model.builtin import copy_all_but_weights, create_model
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.adversary.lies import LIES, make_behaviour
from shoal.rollout.engine.api import Behaviour, Engine, make_requests, make_table
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.table_reader import TableReader
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease, Verdict
from shoal.wire.rollouts import encode
from shoal.wire.run_spec import ProofSpec, RunSpec, Sampling

CODE_OF = {
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
    "fabricated": "reject.wrong_computation",
}

SPEC = make_spec(sampling=Sampling(max_new_tokens=12, samples_per_prompt=8))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policy versions, a step of 1e-3 apart, both surer of themselves than random weights are."""
    folder = tmp_path_factory.mktemp("versions")
    create_model("tiny", folder / "v0", 0)
    decoder = load_decoder(folder / "v0")
    generator = torch.Generator().manual_seed(1)
    for version in (0, 1):
        with torch.no_grad():
            if version == 0:
                decoder.model.norm.weight.mul_(4)
            for parameter in decoder.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator).sign(), alpha=1e-3)
        (folder / f"v{version}").mkdir(exist_ok=True)
        if version:
            copy_all_but_weights(folder / "v0", folder / "v1")
        save_weights(decoder, folder / f"v{version}" / WEIGHTS_FILE)
    return [folder / "v0", folder / "v1"]


def work(behaviour: Behaviour, engine: Engine, lease: Lease, folder: Path, version: int) -> bytes:
    """One lease, as the worker's loop has it."""
    if engine.policy_version != version:
        engine.load(folder, version)
    engine.submit(behaviour.requests(make_requests(lease, engine.tokenizer), lease))
    finished = []
    while engine.has_work:
        finished += engine.step()
    return behaviour.data(encode(behaviour.table(make_table(lease, version, finished), lease)))


def two_verdicts(
    lie: str | None, versions: list[Path], reader: TableReader, spec: RunSpec = SPEC
) -> list[Verdict]:
    """Returns the verdicts on two leases, one per version."""
    behaviour = make_behaviour(lie, "http://127.0.0.1:1") if lie else Behaviour()
    engine = behaviour.engine(
        TorchEngine(compute_dtype=behaviour.compute_dtype("float32"), proof=spec.proof, max_rows=32)
    )
    tokenizer, seen, found = load_tokenizer(versions[0]), set(), []
    for version, folder in enumerate(versions):
        lease = make_lease(spec, number=version + 1, versions=(version,))
        data = work(behaviour, engine, lease, folder, version)
        claim = make_claim(lease, data, version=version, copy_of=NODE if data in seen else None)
        seen.add(data)
        policy = LoadedPolicy(version, load_decoder(folder), tokenizer)
        found.append(judge(data, claim, spec, policy, reader=reader, control_seed=11))
    return found


def test_honest_work_of_the_real_engine_is_accepted(versions: list[Path], reader: TableReader) -> None:
    assert [verdict.code for verdict in two_verdicts(None, versions, reader)] == [ACCEPTED, ACCEPTED]


def test_every_lie_has_a_code() -> None:
    assert CODE_OF.keys() == LIES.keys()


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_with_its_code(lie: str, versions: list[Path], reader: TableReader) -> None:
    first, second = two_verdicts(lie, versions, reader)
    assert second.code == CODE_OF[lie], second.detail
    # Two lies need a past to lie about: until then they tell the truth.
    expected_first = ACCEPTED if lie in ("stale-weights", "replay") else CODE_OF[lie]
    assert first.code == expected_first, first.detail
    assert second.rewards == () and second.output_tokens == 0


@pytest.mark.parametrize("lie", [None, "smaller-model", "forged-proof", "typical-proof", "int4-weights"])
def test_proofs_of_another_size_are_lied_about_as_well(
    lie: str | None, versions: list[Path], reader: TableReader
) -> None:
    spec = SPEC.model_copy(update={"proof": ProofSpec(topk=16, segment_tokens=5)})
    wanted = ACCEPTED if lie is None else CODE_OF[lie]
    assert [verdict.code for verdict in two_verdicts(lie, versions, reader, spec)] == [wanted, wanted]
