"""The seeded draw inside vLLM's worker, with stand-ins for the few names that it imports from vLLM."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal import toploc
from shoal.model.stop_strings import stopped_after
from shoal.model.tokenizer import CharTokenizer
from shoal.rollout.engine.sampling import draw_tokens
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import uniforms

SEEDS = [5, 6, 7]
TEMPERATURES = [1.0, 0.7, 1.3]
TOKENIZER = CharTokenizer("ab#")


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


def _start(side: Any) -> Any:
    """Gives the module a store of rows, as shoal_watch does, and returns it."""
    side._STORE = side.RowStore(ProofSpec(), TOKENIZER, torch.device("cpu"))
    return side._STORE


def _row(number: int, seed: int, temperature: float, stop: tuple[str, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(extra_args={"shoal": (number, seed, temperature, stop)})


def test_tokens_and_logprobs_equal_those_of_torch_engine(side: Any) -> None:
    store = _start(side)
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    draw = side.SeededDraw(None, torch.device("cpu"), False)
    added: list[tuple[int, SimpleNamespace, None, list[int]]] = [
        (place, _row(place, seed, temperature), None, [])
        for place, (seed, temperature) in enumerate(zip(SEEDS, TEMPERATURES, strict=True))
    ]
    draw.update_state(SimpleNamespace(removed=[], added=added, moved=[]))
    store.newest_BH = torch.zeros(3, 160)
    found = draw.apply(logits.clone())
    points = uniforms(np.array(SEEDS, dtype=np.uint64), np.zeros(3, dtype=np.uint64))
    tokens, logprobs = draw_tokens(logits, torch.tensor(TEMPERATURES), torch.from_numpy(points))
    assert found.argmax(-1).tolist() == tokens.tolist()
    answers = store.finish([(number, 1) for number in range(3)])
    stored = [np.frombuffer(one, np.float32).tolist() for _, one in answers]
    assert stored == [[one] for one in logprobs.tolist()]


def test_logits_without_states_are_refused(side: Any) -> None:
    store = _start(side)
    draw = side.SeededDraw(None, torch.device("cpu"), False)
    added: list[tuple[int, SimpleNamespace, None, list[int]]] = [
        (place, _row(place, place, 1.0), None, []) for place in range(2)
    ]
    draw.update_state(SimpleNamespace(removed=[], added=added, moved=[]))
    for states in (None, torch.zeros(1, 160)):
        store.newest_BH = states
        with pytest.raises(RuntimeError, match="2 logits from"):
            draw.apply(torch.zeros(2, 300))


class _Batch:
    """Rows of vLLM's batch, each with its states: what vLLM would feed to SeededDraw step by step."""

    def __init__(self, side: Any, num_rows: int, num_tokens: int, stop: tuple[str, ...] = ()) -> None:
        self.states_RTH = torch.randn(num_rows, num_tokens, 160, generator=torch.Generator().manual_seed(2))
        self.outputs: list[list[int]] = [[] for _ in range(num_rows)]
        self.places: list[int] = []
        self._store, self._stop = _start(side), stop
        self._draw = side.SeededDraw(None, torch.device("cpu"), False)

    def run(self, rows: list[int]) -> None:
        """Makes these rows the batch."""
        added = [
            (place, _row(row, row, 1.0, self._stop), None, self.outputs[row])
            for place, row in enumerate(rows)
        ]
        self._draw.update_state(SimpleNamespace(removed=list(range(8)), added=added, moved=[]))
        self.places = rows

    def move(self, source: int, target: int, direction: str) -> None:
        self._draw.update_state(SimpleNamespace(removed=[], added=[], moved=[(source, target, direction)]))
        places = self.places
        places[source], places[target] = places[target], places[source]

    def step(self, text: str = "a") -> list[int]:
        """Runs one step, in which every row draws the newest token of `text`. Returns what vLLM would take."""
        counts = [len(self.outputs[row]) for row in self.places]
        states = [
            self.states_RTH[row, max(count - 1, 0)] for row, count in zip(self.places, counts, strict=True)
        ]
        self._store.newest_BH = torch.stack(states)
        self._draw.update_state(None)
        logits = torch.full((len(self.places), 300), -1e9)
        logits[:, TOKENIZER.encode_prompt(text, chat=False)[-1]] = 0.0
        taken: list[int] = self._draw.apply(logits).argmax(-1).tolist()
        for row, token in zip(self.places, taken, strict=True):
            self.outputs[row].append(token)
        return taken


def test_states_are_folded_while_rows_run_and_survive_preemption(side: Any) -> None:
    batch = _Batch(side, 3, 100)
    for rows, steps in (([0, 1, 2], 37), ([0, 2], 6), ([2], 3), ([1, 0], 3), ([0, 1, 2], 40)):
        batch.run(rows)
        for _ in range(steps):
            batch.step()
        if len(rows) > 1:
            batch.move(0, 1, "swap")
            batch.step()
    counts = [len(outputs) for outputs in batch.outputs]
    answers = side.WorkerExtension().shoal_finish(list(enumerate(counts)))
    states = [row[: count - 1] for row, count in zip(batch.states_RTH, counts, strict=True)]
    assert [proof for proof, _ in answers] == toploc.build_proofs(states, topk=128, segment_tokens=32)
    assert [len(logprobs) // 4 for _, logprobs in answers] == counts
    assert side._STORE.lines == {}


@pytest.mark.parametrize("length", range(24, 48))
def test_a_row_ends_soon_after_a_stop_string_and_is_proven_up_to_it(side: Any, length: int) -> None:
    """Whatever its length, the states of the segment in which the answer ends are still there."""
    batch = _Batch(side, 1, 100, stop=("##",))
    batch.run([0])
    end = min(TOKENIZER.end_tokens)
    text = "a" * (length - 2) + "##" + "b" * 20
    for count in range(1, len(text) + 1):
        (token,) = batch.step(text[:count])
        if token == end:
            break
    assert length < len(batch.outputs[0]) <= length + 9
    assert stopped_after(batch.outputs[0], ("##",), TOKENIZER.decode) == length
    ((proof, _),) = side.WorkerExtension().shoal_finish([(0, length)])
    assert [proof] == toploc.build_proofs([batch.states_RTH[0, : length - 1]], topk=128, segment_tokens=32)


def test_memory_for_states_does_not_grow_with_the_rows(side: Any) -> None:
    batch, sizes = _Batch(side, 2, 400), set()
    batch.run([0, 1])
    for _ in range(300):
        batch.step()
        sizes.add(side._STORE._ring_LAH.nbytes)
    (num_bytes,) = sizes
    per_row = (32 + 8) * 160 * 2  # one segment and 8 states, in bfloat16
    assert num_bytes == (1 + side.MORE_LINES) * per_row


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
