"""Drafts change no row: tokens, log-probs and proofs are those of feeding token by token, bit for bit."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from shoal.model.builtin import create_model
from shoal.model.tokenizer import CharTokenizer
from shoal.rollout.engine import block_pool, draft_model, kv_slots, scheduler, torch_engine
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.drafting import (
    DraftCounts,
    Drafting,
    DraftRow,
    DraftSettings,
    NgramIndex,
    PromptLookup,
)
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec

Rows = dict[GenerationRequest, FinishedRow]

PROOF = ProofSpec(segment_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model whose rows end now and then, and repeat themselves enough for prompt lookup."""
    folder = tmp_path_factory.mktemp("models") / "v0"
    create_model("tiny", folder, seed=11)
    write_scaled(folder, folder, ends=4.0, others=0.6)
    return folder


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model that is nearly the same: its draws are often the same, but not always."""
    small = tmp_path_factory.mktemp("models") / "small"
    create_model("tiny", small, seed=11)
    write_scaled(folder, small, ends=1.0, others=1.3)
    return small


def write_scaled(source: Path, target: Path, *, ends: float, others: float) -> None:
    """Writes weights with larger or smaller embeddings: of the end token, and of all tokens."""
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding *= others
    embedding[2] *= ends
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def requests(num: int = 6, new_tokens: int = 40, **more: Any) -> list[GenerationRequest]:
    """Returns rows of which every second one repeats itself, since its temperature is low."""
    return [
        GenerationRequest(
            prompt_index=index // 2,
            sample_index=index % 2,
            prompt_tokens=tuple(range(3, 8 + 9 * (index // 2))),
            sample_seed=index,
            max_new_tokens=new_tokens - 3 * index,
            temperature=1.0 if index % 2 else 0.02,
            **more,
        )
        for index in range(num)
    ]


def make_engine(folder: Path, draft: str | None = None, *, rows: int = 8, **more: Any) -> TorchEngine:
    settings = None if draft is None else DraftSettings(source=draft, rows=rows)
    options: dict[str, Any] = {"compute_dtype": "float32", "max_rows": 6} | more
    engine = TorchEngine(proof=PROOF, draft=settings, **options)
    engine.load(folder, 0)
    return engine


def draft_counts(engine: TorchEngine) -> DraftCounts:
    assert engine._drafting is not None
    return engine._drafting.counts


def drain(engine: TorchEngine, rows: Sequence[GenerationRequest]) -> Rows:
    engine.submit(rows)
    found: Rows = {}
    while engine.has_work:
        found |= {row.request: row for row in engine.step()}
    assert found.keys() == set(rows)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("source", ["lookup", "model"])
def test_drafts_change_no_token_logprob_or_proof(folder: Path, small: Path, source: str, dtype: str) -> None:
    expected = drain(make_engine(folder, compute_dtype=dtype), requests())
    assert {row.finish for row in expected.values()} == {Finish.EOS, Finish.LENGTH}
    engine = make_engine(folder, "lookup" if source == "lookup" else str(small), compute_dtype=dtype)
    assert drain(engine, requests()) == expected
    counts = draft_counts(engine)
    assert 0 < counts.accepted < counts.proposed


def test_drafts_are_used_while_few_rows_run_and_after_a_swap(
    folder: Path, small: Path, tmp_path: Path
) -> None:
    create_model("tiny", tmp_path / "v1", seed=12)
    engine = make_engine(folder, str(small), rows=2, max_rows=4)
    assert drain(engine, requests()) == drain(make_engine(folder, max_rows=4), requests())
    first = draft_counts(engine).steps
    assert 0 < first < 60
    engine.load(tmp_path / "v1", 1)
    swapped = drain(engine, requests(3))
    assert swapped == drain(make_engine(tmp_path / "v1", max_rows=4), requests(3))
    assert draft_counts(engine).steps > first


@pytest.mark.parametrize("source", ["lookup", "model"])
def test_preempted_rows_and_stop_strings_end_as_without_drafts(
    folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    plain = drain(make_engine(folder), requests(4))
    decode = make_engine(folder).tokenizer.decode
    words = sorted({decode(row.output_tokens[9:11]) for row in plain.values() if len(row.output_tokens) > 20})
    rows = requests(4, stop=tuple(words))
    expected = drain(make_engine(folder), rows)
    assert Finish.STOP in {row.finish for row in expected.values()}
    settings = "lookup" if source == "lookup" else str(small)
    assert drain(make_engine(folder, settings), rows) == expected
    for module in (block_pool, draft_model, kv_slots, scheduler):
        monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(
        torch_engine, "fit_blocks", lambda shape, size, **_: size._replace(blocks=size.least_blocks + 2)
    )
    engine = make_engine(folder, settings)
    found = drain(engine, rows)
    assert engine._scheduler.num_preempted > 0
    for (
        row,
        done,
    ) in found.items():  # prompts of preempted rows are computed beside others, which rounds them otherwise
        assert (done.output_tokens, done.finish, done.proof) == (
            expected[row].output_tokens,
            expected[row].finish,
            expected[row].proof,
        )
        np.testing.assert_allclose(done.logprobs, expected[row].logprobs, atol=1e-5)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_beside_others(folder: Path, compute_dtype: str) -> None:
    together = drain(make_engine(folder, compute_dtype=compute_dtype), requests(6, 20))
    for max_rows in (1, 3):
        assert (
            drain(make_engine(folder, compute_dtype=compute_dtype, max_rows=max_rows), requests(6, 20))
            == together
        )


def test_a_draft_model_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "other", seed=1)
    CharTokenizer("abc").save(tmp_path / "other")
    with pytest.raises(ValueError, match="its tokenizer is not that of the model; use a small model"):
        make_engine(folder, str(tmp_path / "other"))


def test_a_draft_model_with_fewer_tokens_drafts_what_it_can(folder: Path, tmp_path: Path) -> None:
    """Qwen2.5's models have the same tokenizer, and vocabularies that are padded to different sizes."""
    small, num_tokens = tmp_path / "small", 40
    create_model("tiny", small, seed=11)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:num_tokens].clone()
    save_file(tensors, small / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": num_tokens}))
    expected = drain(make_engine(folder), requests())
    assert max(token for row in expected.values() for token in row.output_tokens) >= num_tokens
    engine = make_engine(folder, str(small))
    assert drain(engine, requests()) == expected
    assert draft_counts(engine).proposed > 0


def test_lookup_proposes_what_followed_the_longest_known_run() -> None:
    index = NgramIndex([1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3])
    assert index.propose(3) == [4, 9, 2]  # 1 2 3 is longer than the more recent 2 3
    index.extend([5, 2, 3])
    assert index.propose(2) == [5, 2]  # the latest occurrence that has something after it
    assert NgramIndex([1, 2]).propose(3) == [] == NgramIndex([]).propose(3)
    assert NgramIndex([8, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]  # a loop is continued
    assert NgramIndex([4, 5, 4, 5]).propose(0) == []


def test_lookup_keeps_one_index_per_row_and_forgets_ended_rows() -> None:
    source, (first, second) = PromptLookup(), requests(2)
    drawn = np.array([3, 4], dtype=np.int64)
    rows = [DraftRow(0, first, drawn, 2), DraftRow(1, second, drawn[:1], 2)]
    assert source.propose(rows) == [[5, 6], []]
    assert source.propose([rows[0]._replace(drawn=np.array([3, 4, 6, 7], dtype=np.int64))]) == [[3, 4]]
    assert list(source._rows) == [0]


def test_a_draft_grows_with_what_was_accepted_and_leaves_room_for_one_draw() -> None:
    class Echo:
        def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
            return [[1] * row.num for row in rows]

    drafting = Drafting(Echo(), max_rows=2, max_tokens=7)
    row = requests(1, 12)[0]

    def length(num_drawn: int) -> int:
        return int(drafting.drafts([(0, row, np.zeros(num_drawn, dtype=np.int64))]).shape[1])

    assert [length(1), length(2), length(5), length(9), length(11)] == [7, 2, 4, 2, 0]
    assert drafting.counts == DraftCounts(steps=4, proposed=15, accepted=6)
