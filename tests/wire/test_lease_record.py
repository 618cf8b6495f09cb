"""The lease: only the run's key opens it, and any change to a field is detected."""

import json

import pytest

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Message, PolicyRef, Verdict
from shoal.wire.record import Sealed, seal
from shoal.wire.run_spec import ProofSpec, RunSpec, Sampling, TaskSpec

KEY = Key.from_seed(bytes(range(32)))
LEASE = Lease(
    lease_id="0123456789abcdef" * 2,
    run="demo",
    node="ab" * 32,
    purpose="train",
    epoch=1,
    seed="cd" * 32,
    chunk=0,
    policies=(PolicyRef(version=2, weights_digest="ef" * 32), PolicyRef(version=3, weights_digest="01" * 32)),
    relays=("http://127.0.0.1:9001",),
    origin="http://127.0.0.1:9000",
    task=TaskSpec(name="sort", options={"length": 4}),
    prompts=("1234=", "4321="),
    attempts=(0, 3),
    contexts=((Message(role="system", content="Sort."),), ()),
    sampling=Sampling(temperature=1.0, max_new_tokens=8, samples_per_prompt=4),
    proof=ProofSpec(),
    max_bytes=100_000,
    issued_at_s=10.0,
    deadline_s=70.0,
)


def test_a_lease_survives_the_wire() -> None:
    received = Sealed[Lease].parse(seal(LEASE, KEY).model_dump_json()).open(KEY.public)
    assert received == LEASE
    assert received.num_rows == 8


@pytest.mark.parametrize("field", sorted(Lease.model_fields))
def test_every_field_is_under_the_seal(field: str) -> None:
    sent = json.loads(seal(LEASE, KEY).model_dump_json())
    value = sent["body"][field]
    changed = {str: "f" * len(value) if isinstance(value, str) else "", int: 77, float: 99.5}
    sent["body"][field] = changed.get(type(value), value[:-1] if isinstance(value, list) else {"name": "add"})
    assert sent["body"][field] != value
    with pytest.raises(Rejected):
        Sealed[Lease].parse(json.dumps(sent)).open(KEY.public)


def test_there_are_two_purposes() -> None:
    with pytest.raises(Rejected, match="purpose"):
        Lease.parse(LEASE.model_dump_json().replace('"train"', '"trial"'))


def test_impossible_terms_are_refused() -> None:
    for text in ('"temperature":0', '"temperature":1e999', '"temperature":-1'):
        with pytest.raises(Rejected, match="temperature"):
            Lease.parse(LEASE.model_dump_json().replace('"temperature":1.0', text))


def test_a_verdict_holds_finite_numbers_only() -> None:
    base = {"lease_id": LEASE.lease_id, "code": "accepted", "detail": ""}
    assert Verdict.parse(json.dumps(base | {"rewards": [0.5, 1.0]})).rewards == (0.5, 1.0)
    with pytest.raises(Rejected):
        Verdict.parse(json.dumps(base | {"rewards": [float("nan")]}))


def test_a_run_spec_names_its_defaults() -> None:
    spec = RunSpec(
        run="demo", task=TaskSpec(name="sort"), compute_dtype="float32", sampling=Sampling(), last_version=3
    )
    assert RunSpec.parse(spec.model_dump_json()) == spec
    assert (spec.proof.topk, spec.proof.segment_tokens, spec.max_lag) == (128, 32, 2)
