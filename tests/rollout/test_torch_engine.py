"""The engine against a loop that recomputes everything for every token; weight swaps, limits and proofs."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from shoal import toploc
from shoal.model.builtin import ALPHABET, create_model
from shoal.model.decoder import Decoder
from shoal.model.fused import fuse
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import CharTokenizer, load_tokenizer
from shoal.model.weights import WEIGHTS_FILE
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.prompt_cache import PREFILL_SIZES, PrefillSize
from shoal.rollout.engine.sampling import draw_tokens
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.shardcast.delta import apply_deltas, write_delta
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import sample_seed, uniforms

PROOF = ProofSpec(topk=128, segment_tokens=4)
SEED = "ab" * 32
PROMPTS = ["5291=", "7=", "What is 12 + 7?", "13+25="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "v0"
    create_model("tiny", folder, seed=11)
    _make_ends_likely(folder)
    return folder


def test_tokens_logprobs_and_ends_equal_the_naive_loop(folder: Path) -> None:
    requests = _requests(folder, num_samples=6, max_new_tokens=14)
    requests[3] = replace(requests[3], temperature=0.5)
    requests[5] = replace(requests[5], max_new_tokens=1)
    finished = _run(_engine(folder, max_rows=64), requests)

    decoder, end_tokens = load_decoder(folder), load_tokenizer(folder).end_tokens
    assert {row.finish for row in finished.values()} == {Finish.EOS, Finish.LENGTH}
    assert len({len(row.output_tokens) for row in finished.values()}) > 4
    for request in requests:
        row = finished[request]
        tokens, logprobs = _naive(decoder, request, end_tokens)
        assert list(row.output_tokens) == tokens
        np.testing.assert_allclose(row.logprobs, logprobs, atol=1e-5)
        assert row.finish == (Finish.EOS if tokens[-1] in end_tokens else Finish.LENGTH)


@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_a_row_does_not_depend_on_its_neighbours(folder: Path, max_rows: int) -> None:
    requests = _requests(folder, num_samples=4, max_new_tokens=14)
    together = _run(_engine(folder, max_rows=64), requests)
    few = _run(_engine(folder, max_rows=max_rows), requests)
    for request in requests:
        assert few[request].output_tokens == together[request].output_tokens
        np.testing.assert_allclose(few[request].logprobs, together[request].logprobs, atol=1e-5)


def test_longer_rows_submitted_later_change_no_other_row(folder: Path) -> None:
    short = _requests(folder, num_samples=2, max_new_tokens=9)
    long = [
        replace(request, max_new_tokens=60)
        for request in _requests(folder, num_samples=3, max_new_tokens=9)[6:]
    ]
    engine = _engine(folder, max_rows=32)
    engine.submit(short)
    found = engine.step() + engine.step()
    engine.submit(long)
    found += _drain(engine)

    alone = _run(_engine(folder, max_rows=32), short) | _run(_engine(folder, max_rows=32), long)
    assert len(found) == len(short) + len(long)
    assert {row.request: row.output_tokens for row in found} == {
        request: row.output_tokens for request, row in alone.items()
    }


def test_proofs_verify_against_one_prefill_of_the_whole_row(folder: Path) -> None:
    requests = _requests(folder, num_samples=4, max_new_tokens=14)
    requests[5] = replace(requests[5], max_new_tokens=1)
    finished = list(_run(_engine(folder, max_rows=8), requests).values())
    decoder = load_decoder(folder)
    states = [_states(decoder, row) for row in finished]
    assert [len(row.proof) for row in finished] == [
        258 * -(-(len(row.output_tokens) - 1) // PROOF.segment_tokens) for row in finished
    ]
    assert [row.request for row in finished if row.proof == b""] == [requests[5]]

    checks = toploc.verify_proofs(
        [row.proof for row in finished], states, topk=128, segment_tokens=4, control_seed=1
    )
    segments = [check for row in checks for check in row]
    assert len(segments) > 20
    assert max(check.exponent_mismatches for check in segments) <= 2
    assert max(check.mantissa_mean for check in segments) < 0.5


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_swap_equals_a_fresh_load(folder: Path, tmp_path: Path, compute_dtype: str) -> None:
    create_model("tiny", tmp_path / "v1", seed=12)
    requests = _requests(folder, num_samples=3, max_new_tokens=8)
    swapped = _engine(folder, max_rows=16, compute_dtype=compute_dtype)
    first = _run(swapped, requests)
    swapped.load(tmp_path / "v1", 1)
    assert swapped.policy_version == 1
    second = _run(swapped, requests)

    fresh = _run(_engine(tmp_path / "v1", max_rows=16, compute_dtype=compute_dtype), requests)
    assert second == fresh
    assert {row.output_tokens for row in first.values()} != {row.output_tokens for row in second.values()}


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_swap_by_delta_equals_a_fresh_load_and_moves_no_tensor(
    folder: Path, tmp_path: Path, compute_dtype: str
) -> None:
    old, new, payload = folder / WEIGHTS_FILE, tmp_path / "new" / WEIGHTS_FILE, tmp_path / "payload"
    for copy in ("new", "made"):
        shutil.copytree(folder, tmp_path / copy)
    tensors = load_file(old)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, new, metadata={"format": "pt"})
    size, digest = old.stat().st_size, blake3(old.read_bytes()).hexdigest()
    assert write_delta(old, new, payload, old_blake3=digest, max_bytes=size)
    requests = _requests(folder, num_samples=3, max_new_tokens=8)
    engine = _engine(folder, max_rows=16, compute_dtype=compute_dtype)
    first, places = _run(engine, requests), _weight_places(engine)
    apply_deltas(old, [payload], tmp_path / "made" / WEIGHTS_FILE)
    engine.load(tmp_path / "made", 1)

    second = _run(engine, requests)
    assert second == _run(_engine(tmp_path / "new", max_rows=16, compute_dtype=compute_dtype), requests)
    assert {row.logprobs for row in first.values()} != {row.logprobs for row in second.values()}
    assert _weight_places(engine) == places


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logprobs_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = _write_reference(family, tmp_path)
    requests = _requests(tmp_path, num_samples=3, max_new_tokens=10)
    for row in _run(_engine(tmp_path, max_rows=5), requests).values():
        tokens = torch.tensor([[*row.request.prompt_tokens, *row.output_tokens]])
        with torch.no_grad():
            logits = reference(tokens).logits[0, len(row.request.prompt_tokens) - 1 : -1]
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(row.output_tokens)[:, None]).squeeze(1)
        np.testing.assert_allclose(row.logprobs, theirs, atol=2e-5)


def test_long_prompts_are_computed_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests(folder, num_samples=2, max_new_tokens=8)
    whole = _run(_engine(folder, max_rows=16), requests)
    monkeypatch.setitem(PREFILL_SIZES, "cpu", PrefillSize(4, 16))
    pieces = _run(_engine(folder, max_rows=16), requests)
    for request in requests:
        assert pieces[request].output_tokens == whole[request].output_tokens
        np.testing.assert_allclose(pieces[request].logprobs, whole[request].logprobs, atol=1e-5)


@pytest.mark.parametrize("max_rows", [1, 3, 16])
def test_prompts_computed_ahead_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    requests = _requests(folder, num_samples=3, max_new_tokens=8)
    again = [replace(request, sample_seed=request.sample_seed + 1) for request in requests[:4]]
    plain = _run(_engine(folder, max_rows=16), [*requests, *again])
    monkeypatch.setitem(PREFILL_SIZES, "cpu", PrefillSize(2048, 2, batches=2))
    engine = _engine(folder, max_rows=max_rows)
    finished = []
    for request in [
        *requests,
        *again,
    ]:  # one by one, so that prompts of earlier rows are running, ready or being computed
        engine.submit([request])
        finished += engine.step()
    engine.submit([])
    while engine.has_work:
        finished += engine.step()
    assert {row.request: row.output_tokens for row in finished} == {
        request: row.output_tokens for request, row in plain.items()
    }


def test_rows_that_do_not_fit_into_memory_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = _requests(folder, num_samples=4, max_new_tokens=9)
    together = _run(_engine(folder, max_rows=64), requests)
    monkeypatch.setattr("shoal.rollout.engine.torch_engine.free_bytes", lambda _: 2_200_000)  # three rows
    engine = _engine(folder, max_rows=64)
    few = _run(engine, requests)
    assert {r: row.output_tokens for r, row in few.items()} == {
        r: row.output_tokens for r, row in together.items()
    }
    monkeypatch.setattr("shoal.rollout.engine.torch_engine.free_bytes", lambda _: 10_000)
    with pytest.raises(ValueError, match="lower max_new_tokens or free memory"):
        _run(_engine(folder, max_rows=64), requests)


def test_fused_weights_share_memory_with_the_decoder(folder: Path) -> None:
    decoder = load_decoder(folder)
    before = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    weights = fuse(decoder)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, before[name])
    decoder.get_parameter("model.layers.1.self_attn.k_proj.weight").data.fill_(3.0)
    decoder.get_parameter("model.layers.1.mlp.up_proj.weight").data.fill_(5.0)
    q, kv = 4 * 32, 2 * 32
    assert (weights.layers[1].qkv_QH[q : q + kv] == 3.0).all()
    assert (weights.layers[1].gate_up_FH[256:] == 5.0).all()


def test_invalid_requests_and_loads_are_refused(folder: Path, tmp_path: Path) -> None:
    request = _requests(folder, num_samples=1, max_new_tokens=4)[0]
    with pytest.raises(ValueError, match="load a version first"):
        TorchEngine(compute_dtype="float32", proof=PROOF, max_rows=2).submit([request])
    engine = _engine(folder, max_rows=2)
    with pytest.raises(ValueError, match="exceed the model's 2048 positions; lower max_new_tokens"):
        engine.submit([replace(request, max_new_tokens=2048)])
    for temperature in (0, float("nan")):
        with pytest.raises(ValueError, match=f"temperature={temperature}"):
            engine.submit([replace(request, temperature=temperature)])
    with pytest.raises(
        ValueError, match="prompt tokens from 3 to 99999, but the model's vocabulary has 88 entries"
    ):
        engine.submit([request, replace(request, prompt_tokens=(3, 99999))])
    assert not engine.has_work
    engine.submit([request])
    with pytest.raises(ValueError, match="finish them first"):
        engine.load(folder, 1)
    _drain(engine)

    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="no weights at"):
        engine.load(tmp_path, 1)
    assert engine.policy_version is None
    with pytest.raises(ValueError, match="no complete weights"):
        engine.submit([request])
    engine.load(folder, 2)  # the refused rows do not block the engine


def test_the_example_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert len(names["finished"]) == 8 and all(row.proof for row in names["finished"])


def test_draws_follow_the_distribution_and_never_return_a_token_of_probability_0() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    points = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    logits = probabilities.log().expand(6, 5).float()
    tokens, logprobs = draw_tokens(logits, torch.ones(6), points)
    assert tokens.tolist() == [1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs, probabilities[tokens].log().float())


def test_the_softmax_is_float32_whatever_dtype_the_temperatures_have() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, points = torch.randn(64, 700, generator=generator), torch.rand(64, generator=generator).double()
    temperatures = torch.full((64,), 0.7)
    expected = draw_tokens(logits, temperatures, points)
    found = draw_tokens(logits, temperatures.double(), points)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def _engine(folder: Path, *, max_rows: int, compute_dtype: str = "float32") -> TorchEngine:
    engine = TorchEngine(compute_dtype=compute_dtype, proof=PROOF, max_rows=max_rows)  # type: ignore[arg-type]
    engine.load(folder, 0)
    return engine


def _requests(folder: Path, *, num_samples: int, max_new_tokens: int) -> list[GenerationRequest]:
    tokenizer = load_tokenizer(folder)
    return [
        GenerationRequest(
            prompt_index=index,
            sample_index=sample,
            prompt_tokens=tuple(tokenizer.encode_prompt(prompt, chat=False)),
            sample_seed=sample_seed(SEED, index, sample),
            max_new_tokens=max_new_tokens,
            temperature=1.0,
        )
        for index, prompt in enumerate(PROMPTS)
        for sample in range(num_samples)
    ]


def _run(engine: TorchEngine, requests: list[GenerationRequest]) -> dict[GenerationRequest, FinishedRow]:
    engine.submit(requests)
    finished = {row.request: row for row in _drain(engine)}
    assert finished.keys() == set(requests)
    return finished


def _drain(engine: TorchEngine) -> list[FinishedRow]:
    finished = []
    while engine.has_work:
        finished += engine.step()
    return finished


def _weight_places(engine: TorchEngine) -> list[int]:
    """Returns the addresses of the weights; packed matrices have no address in torch, so their ids stand for it."""
    loaded = engine._loaded()
    packed = [id(matrix) for layer in loaded.packed.layers for matrix in layer if matrix is not None]
    return [parameter.data_ptr() for parameter in loaded.decoder.parameters()] + packed


@torch.no_grad()
def _naive(
    decoder: Decoder, request: GenerationRequest, end_tokens: frozenset[int]
) -> tuple[list[int], list[float]]:
    """Generates one row alone, computing the whole sequence again for every token."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < request.max_new_tokens and not (tokens and tokens[-1] in end_tokens):
        row = torch.tensor([[*request.prompt_tokens, *tokens]])
        hidden = decoder(row, torch.arange(row.shape[1])[None])[0, -1]
        logprobs_V = (decoder.logits(hidden).double() / request.temperature).log_softmax(-1)
        uniform = uniforms(np.array([request.sample_seed], np.uint64), np.array([len(tokens)], np.uint64))[0]
        token = next(i for i, c in enumerate(logprobs_V.exp().cumsum(-1).tolist()) if c > uniform)
        tokens.append(token)
        logprobs.append(float(logprobs_V[token]))
    return tokens, logprobs


@torch.no_grad()
def _states(decoder: Decoder, row: FinishedRow) -> torch.Tensor:
    prompt = row.request.prompt_tokens
    tokens = torch.tensor([[*prompt, *row.output_tokens]])
    states: torch.Tensor = decoder(tokens, torch.arange(tokens.shape[1])[None])[0, len(prompt) : -1]
    return states


def _write_reference(family: str, folder: Path) -> torch.nn.Module:
    """Writes a random model of transformers with our tokenizer, and returns the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {"num_key_value_heads": 1, "head_dim": 24} if family == "qwen3" else {"num_key_value_heads": 2}
    config = AutoConfig.for_model(
        family,
        vocab_size=3 + len(ALPHABET),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=160,
        max_position_embeddings=256,
        eos_token_id=CharTokenizer.EOS,
        **extra,
    )
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(folder)
    CharTokenizer(ALPHABET).save(folder)
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return loaded


def _make_ends_likely(folder: Path) -> None:
    """Enlarges the end token's embedding: with random weights alone hardly any row would end."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding *= 0.3
    embedding[2] *= 10
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
