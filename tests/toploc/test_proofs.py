"""Building and verifying: batching, honest states, and the statistics of wrong states and forged proofs."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import toploc
from shoal.toploc.field import PRIME, evaluate, evaluate_everywhere, interpolate
from shoal.toploc.proof import proofs_of_points


def random_states(*lengths: int, hidden: int = 128, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, hidden, generator=generator) for length in lengths]


def test_interpolation_passes_through_its_points() -> None:
    rng = np.random.default_rng(0)
    for num_points in (1, 3, 16, 17, 64, 128):
        x_SK = np.stack([rng.choice(PRIME, num_points, replace=False) for _ in range(9)]).astype(np.uint32)
        y_SK = rng.integers(0, PRIME, (9, num_points), dtype=np.uint32)
        coefficients_SK = interpolate(x_SK, y_SK).astype(np.uint16)
        assert (evaluate(coefficients_SK, x_SK.astype(np.int64)) == y_SK).all()
        for s in range(9):
            everywhere = evaluate_everywhere(coefficients_SK, x_SK[s].astype(np.int64))
            assert (everywhere[s] == y_SK[s]).all()


def test_evaluation_is_exact_at_the_edges_of_the_field() -> None:
    coefficients = np.full((1, 128), PRIME - 1, dtype=np.uint16)
    points = np.array([[0, 1, 2, PRIME - 2, PRIME - 1]])
    wanted = [sum((PRIME - 1) * pow(int(x), t, PRIME) for t in range(128)) % PRIME for x in points[0]]
    assert evaluate(coefficients, points)[0].tolist() == wanted
    assert evaluate_everywhere(coefficients, points[0])[0].tolist() == wanted


def test_batching_does_not_change_a_proof() -> None:
    states = random_states(0, 1, 2, 15, 31, 32, 33, 64, 100, 7)
    together = toploc.build_proofs(states)
    assert together == [toploc.build_proofs([one])[0] for one in states]
    assert [len(proof) for proof in together] == [258 * n for n in (0, 1, 1, 1, 1, 1, 2, 2, 4, 1)]
    assert [len(p) for p in together] == [
        toploc.expected_bytes(len(s), topk=128, segment_tokens=32) for s in states
    ]


def test_any_float_dtype_is_proven_as_bfloat16() -> None:
    (states,) = random_states(40)
    assert toploc.build_proofs([states.double()]) == toploc.build_proofs([states.bfloat16()])


def test_wide_states_need_the_modulus_search_and_still_verify() -> None:
    states = random_states(32, 32, 32, 32, hidden=5120)
    proofs = toploc.build_proofs(states)
    for checks in toploc.verify_proofs(proofs, states, control_seed=1):
        assert [(c.exponent_mismatches, c.mantissa_mean) for c in checks] == [(0, 0.0)]


@pytest.mark.parametrize("topk", [256, 512, 1024])
def test_many_points_need_a_long_search_and_still_verify(topk: int) -> None:
    states = random_states(32, 32, 32, 32, hidden=8192, seed=topk)
    proofs = toploc.build_proofs(states, topk=topk)
    for checks in toploc.verify_proofs(proofs, states, topk=topk, control_seed=1):
        assert [(c.exponent_mismatches, c.mantissa_mean) for c in checks] == [(0, 0.0)]
        assert checks[0].control_hits <= 12


def test_honest_states_match_and_miss_the_control_points() -> None:
    states = random_states(5, 64, 33, 1)
    checks = toploc.verify_proofs(toploc.build_proofs(states), states, control_seed=7)
    assert [len(row) for row in checks] == [1, 2, 2, 1]
    for check in (check for row in checks for check in row):
        assert check.exponent_mismatches == check.sign_mismatches == 0
        assert check.mantissa_mean == check.mantissa_median == 0.0
        assert check.control_hits <= 12 and not check.constant
    assert [row[0].num_controls for row in checks] == [128, 128, 128, 0], (
        "one state of 128 values is all top-k"
    )


def test_other_states_mismatch_nearly_everywhere() -> None:
    proofs = toploc.build_proofs(random_states(32, seed=1))
    ((check,),) = toploc.verify_proofs(proofs, random_states(32, seed=2), control_seed=7)
    assert check.exponent_mismatches > 110


def test_flipped_signs_are_counted() -> None:
    states = random_states(8)
    ((check,),) = toploc.verify_proofs(toploc.build_proofs(states), [-states[0]], control_seed=7)
    assert check.exponent_mismatches == 0 and check.sign_mismatches == 128


def test_a_constant_polynomial_hits_every_control_point() -> None:
    """The published rule accepts this forgery, which needs no model and is right about most exponents."""
    states = random_states(32, hidden=5120)
    typical = int(torch.tensor([3.4], dtype=torch.bfloat16).view(torch.int16))
    forged = b"".join(value.to_bytes(2, "big") for value in [PRIME, typical, *[0] * 127])
    ((check,),) = toploc.verify_proofs([forged], states, control_seed=7)
    assert check.exponent_mismatches <= 38, "the published exponent threshold accepts it"
    assert check.control_hits == check.num_controls == 128 and check.constant


def test_no_match_at_all_has_the_published_mantissa_error() -> None:
    states = [torch.full((1, 128), 1.0) * torch.tensor([1.0, -1.0]).repeat(64)]
    indices, bits = np.arange(128)[None], np.full((1, 128), 0x4300, dtype=np.uint16)
    bits[0, 0] = 0x4200
    ((check,),) = toploc.verify_proofs(proofs_of_points(indices, bits), states, control_seed=7)
    assert (check.exponent_mismatches, check.mantissa_mean, check.mantissa_median) == (
        128,
        toploc.NO_MATCH,
        toploc.NO_MATCH,
    )


def test_the_same_control_seed_gives_the_same_checks() -> None:
    states = random_states(32, 16)
    proofs = toploc.build_proofs(states)
    first, again = (toploc.verify_proofs(proofs, states, control_seed=5) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (torch.zeros(3, 128), "all zero"),
        (torch.tensor([[float("inf")] + [1.0] * 127]), "NaN or infinity"),
        (torch.tensor([[3.4e38] + [1.0] * 127]), "NaN or infinity"),
        (torch.tensor([[1.0] * 4000 + [float("nan")] + [1.0] * 95]), "NaN or infinity"),
        (torch.tensor([[1.0] * 20000 + [-float("inf")] + [2.0] * 200]), "NaN or infinity"),
        (torch.ones(3, 128, dtype=torch.int64), "expected \\[tokens, hidden\\] floats"),
        (torch.ones(128), "expected \\[tokens, hidden\\] floats"),
        (torch.ones(1, 100), "100 values, fewer than topk=128"),
    ],
)
def test_states_that_cannot_be_proven_are_refused_with_the_row(states: torch.Tensor, reason: str) -> None:
    with pytest.raises(toploc.ProofError, match=f"row 1: .*{reason}"):
        toploc.build_proofs([*random_states(4), states])


@pytest.mark.parametrize(("topk", "segment_tokens"), [(0, 32), (-1, 32), (128, 0), (128, -3)])
def test_invalid_parameters_raise_value_error(topk: int, segment_tokens: int) -> None:
    states = random_states(40)
    parameters = {"topk": topk, "segment_tokens": segment_tokens}
    for call in (
        lambda: toploc.build_proofs(states, **parameters),
        lambda: toploc.verify_proofs([b""], states, **parameters, control_seed=1),
        lambda: toploc.check_format([b""], [40], hidden_size=128, **parameters),
    ):
        with pytest.raises(ValueError, match=f"topk={topk} and segment_tokens={segment_tokens} must be"):
            call()


@pytest.mark.parametrize("states", [torch.tensor(1.0), torch.ones(128), torch.ones(2, 2, 128)])
def test_states_to_verify_must_have_two_dimensions(states: torch.Tensor) -> None:
    with pytest.raises(toploc.ProofError, match=r"expected \[tokens, hidden\] floats"):
        toploc.verify_proofs([b"\xff\xd9" * 129], [states], control_seed=1)


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "toploc.md").read_text(encoding="utf-8")
    torch.manual_seed(0)
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    assert len(capsys.readouterr().out.splitlines()) == 3, "one line per segment, and the problem of the lies"


@pytest.mark.parametrize("calibrated", [False, True])
def test_find_problem_says_yes_or_why_not(calibrated: bool) -> None:
    generator = torch.Generator().manual_seed(5)

    def noisy(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return [one * (1 + 0.002 * torch.randn(one.shape, generator=generator)) for one in rows]

    noise = None
    if calibrated:
        many = [torch.randn(33, 576, generator=generator) for _ in range(200)]
        honest = toploc.verify_proofs(toploc.build_proofs(many), noisy(many), control_seed=1)
        noise = toploc.measure_noise({"here to here": honest}, model="mine", compute_dtype="bfloat16")
    rows = [torch.randn(length, 576, generator=generator) for length in (40, 3)]
    proofs = toploc.build_proofs(rows)

    def problem(seen: list[torch.Tensor], sent: list[bytes]) -> str | None:
        checks = toploc.verify_proofs(sent, seen, control_seed=2)
        return toploc.find_problem(checks, compute_dtype="bfloat16", noise=noise)

    assert problem(noisy(rows), proofs) is None
    other = [rows[0], torch.randn(3, 576, generator=generator)]
    assert "row 1, proof 0: " in (problem(other, proofs) or "")
    constant = PRIME.to_bytes(2, "big") + (16256).to_bytes(2, "big") + bytes(254)
    assert "row 0, proof 0: it is one constant" in (
        problem(rows, [constant + proofs[0][258:], proofs[1]]) or ""
    )
