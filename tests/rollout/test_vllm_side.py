"""The seeded draw inside vLLM's worker, with stand-ins for the few names that it imports from vLLM."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

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
