"""The seeded draw inside vLLM's worker, with stand-ins for the few names that it imports from vLLM."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal import toploc
from shoal.rollout.engine.sampling import draw_tokens
from shoal.wire.seeded_draw import uniforms

SEEDS = [5, 6, 7]
TEMPERATURES = [1.0, 0.7, 1.3]


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, imported without vLLM."""
    module = ModuleType("vllm.v1.sample.logits_processor")
    module.BatchUpdate = module.LogitsProcessor = object  # type: ignore[attr-defined]
    module.MoveDirectionality = SimpleNamespace(SWAP="swap")  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "shoal.rollout.engine.vllm_side", raising=False)
    imported = importlib.import_module("shoal.rollout.engine.vllm_side")
    monkeypatch.setitem(sys.modules, "shoal.rollout.engine.vllm_side", imported)  # removed after the test
    return imported


def test_tokens_and_logprobs_equal_those_of_torch_engine(side: Any) -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    draw = side.SeededDraw(None, torch.device("cpu"), False)
    added: list[tuple[int, SimpleNamespace, None, list[int]]] = [
        (line, SimpleNamespace(extra_args={"shoal": (line, seed, temperature)}), None, [])
        for line, (seed, temperature) in enumerate(zip(SEEDS, TEMPERATURES, strict=True))
    ]
    draw.update_state(SimpleNamespace(removed=[], added=added, moved=[]))
    side._STATES.newest_BH = torch.zeros(3, 4)
    found = draw.apply(logits.clone())
    points = uniforms(np.array(SEEDS, dtype=np.uint64), np.zeros(3, dtype=np.uint64))
    tokens, logprobs = draw_tokens(logits, torch.tensor(TEMPERATURES), torch.from_numpy(points))
    assert found.argmax(-1).tolist() == tokens.tolist()
    assert torch.equal(found.amax(-1), logprobs)
    assert torch.isinf(found).sum() == found.numel() - 3


class _Batch:
    """Rows of vLLM's batch, each with its states: what vLLM would feed to SeededDraw step by step."""

    def __init__(self, side: Any, num_rows: int, num_tokens: int) -> None:
        self.states_RTH = torch.randn(num_rows, num_tokens, 160, generator=torch.Generator().manual_seed(2))
        self.outputs: list[list[int]] = [[] for _ in range(num_rows)]
        self.places: list[int] = []
        self._side, self._draw = side, side.SeededDraw(None, torch.device("cpu"), False)

    def run(self, rows: list[int]) -> None:
        """Makes these rows the batch."""
        added = [
            (place, SimpleNamespace(extra_args={"shoal": (row, row, 1.0)}), None, self.outputs[row])
            for place, row in enumerate(rows)
        ]
        self._draw.update_state(SimpleNamespace(removed=list(range(8)), added=added, moved=[]))
        self.places = rows

    def step(self) -> None:
        counts = [len(self.outputs[row]) for row in self.places]
        states = [
            self.states_RTH[row, max(count - 1, 0)] for row, count in zip(self.places, counts, strict=True)
        ]
        self._side._STATES.newest_BH = torch.stack(states)
        self._draw.update_state(None)
        self._draw.apply(torch.zeros(len(self.places), 300))
        for row in self.places:
            self.outputs[row].append(1)


def _watch(side: Any) -> None:
    worker = side.WorkerExtension()
    hook = SimpleNamespace(register_forward_pre_hook=lambda _: None)
    worker.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(logits_processor=hook))
    worker.shoal_watch(128, 32)


def test_states_are_folded_while_rows_run_and_survive_preemption(side: Any) -> None:
    _watch(side)
    batch = _Batch(side, 3, 100)
    for rows, steps in (([0, 1, 2], 37), ([0, 2], 6), ([2], 3), ([1, 0], 3), ([0, 1, 2], 40)):
        batch.run(rows)
        for _ in range(steps):
            batch.step()
    counts = [len(outputs) for outputs in batch.outputs]
    proofs = side.WorkerExtension().shoal_prove(list(enumerate(counts)))
    states = [row[: count - 1] for row, count in zip(batch.states_RTH, counts, strict=True)]
    assert proofs == toploc.build_proofs(states, topk=128, segment_tokens=32)
    assert side._STATES.rows == {}


def test_memory_for_states_does_not_grow_with_the_rows(side: Any) -> None:
    _watch(side)
    batch, sizes = _Batch(side, 2, 400), set()
    batch.run([0, 1])
    for _ in range(300):
        batch.step()
        sizes.add(side._STATES.num_bytes)
    (num_bytes,) = sizes
    per_row = (32 + 8) * 160 * 2  # one segment and 8 states, in bfloat16
    assert num_bytes <= 2 * (2 + 1) * per_row


def test_other_releases_of_vllm_are_refused_with_those_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.rollout.engine import vllm_engine

    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type="cpu")  # type: ignore[attr-defined]
    package = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    for release, works in (("0.25.1", True), ("0.32.0+cpu", True), ("0.33.0", False), ("0.25.0", False)):
        package.__version__ = release  # type: ignore[attr-defined]
        if works:
            vllm_engine.check_installed("cpu")
            continue
        with pytest.raises(ValueError, match=r"releases that work: 0\.25\.1, 0\.32\.0"):
            vllm_engine.check_installed("cpu")
