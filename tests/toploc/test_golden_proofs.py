"""Our proofs have the bytes of the published package (golden.json holds proofs made by toploc 0.1.6)."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import toploc
from shoal.toploc.proof import proofs_of_points
from shoal.toploc.segments import batches, top_points

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())


def named(kind: str) -> list[Any]:
    return [
        pytest.param(entry, id=entry.get("name") or f"{entry['hidden']}-{entry['perturb']}")
        for entry in GOLDEN[kind]
    ]


def generated_bits(seed: int, count: int) -> np.ndarray:
    """Repeats the golden file's generator: splitmix64 counters as bfloat16 bit patterns with geometric exponents."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    low = (z & np.uint64(0xFFFFF)) | np.uint64(0x80000)
    lowest_bit = low & (~low + np.uint64(1))
    exponent = np.uint64(118) + np.log2(lowest_bit.astype(np.float64)).astype(np.uint64)
    bits = (
        z >> np.uint64(63) << np.uint64(15) | exponent << np.uint64(7) | z >> np.uint64(56) & np.uint64(127)
    )
    return np.asarray(bits, np.uint16)


def states_of(bits: np.ndarray, hidden: int) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).reshape(-1, hidden)


def sha256(bits: np.ndarray) -> str:
    return hashlib.sha256(bits.tobytes()).hexdigest()


@pytest.mark.parametrize("entry", named("points"))
def test_points_give_the_published_proof(entry: dict[str, Any]) -> None:
    (proof,) = proofs_of_points(np.array([entry["x"]]), np.array([entry["y"]], dtype=np.uint16))
    assert proof.hex() == entry["hex"]
    assert base64.b64encode(proof).decode() == entry["base64"]
    assert int.from_bytes(proof[:2], "big") == entry["modulus"]


@pytest.mark.parametrize("entry", named("activations"))
def test_states_give_the_published_proofs(entry: dict[str, Any]) -> None:
    prefill, hidden, topk = entry["prefill_tokens"], entry["hidden"], entry["topk"]
    bits = generated_bits(entry["seed"], (prefill + entry["tokens"]) * hidden)
    assert sha256(bits) == entry["input_sha256"], "the generator differs from the golden file's"
    states = states_of(bits, hidden)

    proofs = toploc.build_proofs([states[prefill:]], topk=topk, segment_tokens=entry["decode_batching_size"])[
        0
    ]
    if not entry["skip_prefill"]:
        proofs = toploc.build_proofs([states[:prefill]], topk=topk, segment_tokens=prefill)[0] + proofs
    assert proofs.hex() == "".join(entry["hex"])
    assert base64.b64encode(proofs[: 2 + 2 * topk]).decode() == entry["base64_first"]


@pytest.mark.parametrize(
    "entry", [e for e in GOLDEN["activations"] if any(e["tied"])], ids=lambda e: e["name"]
)
def test_ties_at_the_last_place_are_resolved_as_published(entry: dict[str, Any]) -> None:
    states = states_of(generated_bits(entry["seed"], entry["tokens"] * entry["hidden"]), entry["hidden"])
    (batch,) = batches([states], segment_tokens=entry["decode_batching_size"])
    chosen, _ = top_points(batch, entry["topk"])
    assert [set(line.tolist()) for line in chosen] == [set(line) for line in entry["topk_indices"]]


@pytest.mark.parametrize("entry", named("verify"))
def test_verify_gives_the_published_numbers(entry: dict[str, Any]) -> None:
    bits = generated_bits(entry["seed"], entry["tokens"] * entry["hidden"])
    proofs = toploc.build_proofs([states_of(bits, entry["hidden"])])
    seen = bits + np.uint16(5) if entry["perturb"] == "plus5ulp_all" else bits
    assert sha256(seen) == entry["input_sha256"]

    (checks,) = toploc.verify_proofs(proofs, [states_of(seen, entry["hidden"])], control_seed=1)
    found = [[c.exponent_mismatches, c.mantissa_mean, c.mantissa_median] for c in checks]
    assert found == entry["c_path"]


def test_the_readme_example_gives_the_published_proofs() -> None:
    torch.manual_seed(GOLDEN["readme"]["torch_manual_seed"])
    prefill = torch.randn(1, 5, 16, dtype=torch.bfloat16)
    decode = torch.cat([torch.randn(1, 16, dtype=torch.bfloat16) for _ in range(10)])
    first = toploc.build_proofs([prefill[0]], topk=4, segment_tokens=5)
    rest = toploc.build_proofs([decode], topk=4, segment_tokens=3)
    assert (first[0] + rest[0]).hex() == "".join(GOLDEN["readme"]["proofs"])


def test_edge_cases_that_the_package_accepts_silently() -> None:
    """The package returns null proofs for float32 and for topk > numel, and accepts NaN (golden.json, `edge`)."""
    states = torch.randn(4, 16)
    assert toploc.build_proofs([states], topk=5) == toploc.build_proofs([states.bfloat16()], topk=5)
    with pytest.raises(toploc.ProofError, match="32 values, fewer than topk=33"):
        toploc.build_proofs([torch.randn(2, 16)], topk=33)
    nan = torch.full((4, 16), float("nan"), dtype=torch.bfloat16)
    with pytest.raises(toploc.ProofError, match="NaN"):
        toploc.verify_proofs(toploc.build_proofs([states], topk=5), [nan], topk=5, control_seed=1)
    null = GOLDEN["edge"][0]["hex"]
    with pytest.raises(toploc.ProofError, match="modulus 0"):
        toploc.verify_proofs([bytes.fromhex(null[0])], [states], topk=5, control_seed=1)


def test_the_documented_vectors_match_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire" / "proof.md").read_text(encoding="utf-8")
    table, row, coinciding = [block.split("```")[0].strip() for block in page.split("```\n")[3::2]]
    states = torch.tensor([[float(word) for word in line.split()] for line in table.splitlines()])
    assert toploc.build_proofs([states], topk=3, segment_tokens=2)[0].hex() == row
    (proof,) = proofs_of_points(np.array([[0, 65497, 3]]), np.array([[1, 2, 3]], dtype=np.uint16))
    assert proof.hex() == coinciding
