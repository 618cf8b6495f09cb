"""Tests of the benchmark's stacked workers against single workers and the peers' own exchange."""

import argparse
import asyncio
import json
import lzma
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from local_swarm import mean_of_chunks

from shoal.diloco.averaging.reducer import chunk_bounds
from shoal.diloco.codec import CODECS, CodecName, encode
from shoal.diloco.outer import Outer, first_state, outer_step
from shoal.diloco.site.language import next_token_loss
from shoal.diloco.transport.stream import Stream
from shoal.model.load_model import empty_decoder
from shoal.model.shape import Rope, Shape

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from curves import Comparison, Plan, Run, mean_received, runs_left, write_records
from stacked import Llama, Stack, losses

from diloco import ShapedStream, Uplink

LLAMA = Llama(hidden=16, layers=2, heads=2, ffn=24, sequence=8)
TEXT = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8))
NAMES = {
    "embed": lambda name: ["model.embed_tokens.weight"],
    "norm": lambda name: ["model.norm.weight"],
    "norm1": lambda name: _of_layer(name, "input_layernorm"),
    "norm2": lambda name: _of_layer(name, "post_attention_layernorm"),
    "qkv": lambda name: _of_layer(name, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": lambda name: _of_layer(name, "self_attn.o_proj"),
    "gate_up": lambda name: _of_layer(name, "mlp.gate_proj", "mlp.up_proj"),
    "down": lambda name: _of_layer(name, "mlp.down_proj"),
}
"""The decoder's parameters that each stacked parameter contains."""
STARTS_SWB = torch.from_numpy(np.random.default_rng(1).integers(0, 3900, (12, 4, 3)))


def stack(workers: list[int], **options: object) -> Stack:
    weights_N = LLAMA.first_weights(0)
    return Stack(
        LLAMA,
        weights_N.expand(len(workers), -1).clone(),
        text=TEXT,
        starts_SWB=STARTS_SWB,
        worker_K=workers,
        rates_S=torch.full((12,), 1e-2),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("codec", CODECS)
def test_exchange_equals_the_peers_own_bit_for_bit(codec: CodecName) -> None:
    deltas = np.random.default_rng(2).standard_normal((4, 300_001), np.float32)
    expected = np.empty_like(deltas[0])
    for start, end in chunk_bounds(0, len(expected)):
        coded = [encode(codec, delta[start:end]) for delta in deltas]
        expected[start:end] = mean_of_chunks(codec, coded, [1.0] * 4, end - start)
    assert np.array_equal(mean_received(codec, torch.from_numpy(deltas)).numpy(), expected)


def test_stacked_model_equals_the_decoder() -> None:
    shape = Shape(
        vocab_size=256,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=24,
        rope=Rope(),
        norm_eps=1e-5,
        tied_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        max_positions=9,
    )
    decoder, weights_N = empty_decoder(shape), LLAMA.first_weights(0)
    with torch.no_grad():
        for name, values in LLAMA.views(weights_N[None]).items():
            targets = [decoder.get_parameter(each) for each in NAMES[name.split(".")[-1]](name)]
            for target, part in zip(targets, values[0].chunk(len(targets)), strict=True):
                target.copy_(part)
    tokens_BT = TEXT[:18].view(2, 9).long()
    ours = losses(LLAMA, LLAMA.views(weights_N[None]), tokens_BT[None])
    assert ours.item() == pytest.approx(next_token_loss(decoder, tokens_BT).item(), abs=1e-5)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_worker_in_a_stack_learns_as_if_alone() -> None:
    together, alone = stack([0, 1, 2, 3]), stack([2])
    for _ in range(5):
        together.step()
        alone.step()
    assert torch.allclose(together.weights[2], alone.weights[0], atol=1e-5)
    assert not torch.allclose(together.weights[2], together.weights[1], atol=1e-3)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_data_parallel_rows_stay_equal() -> None:
    rows = stack([0, 1, 2, 3], mean_of=[slice(0, 4)])
    for _ in range(3):
        rows.step()
    assert all(torch.equal(rows.weights[0], rows.weights[at]) for at in range(1, 4))


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("name", ["2:int8", "4:fp32:2:1", "2:fp32@0.5,0.8"])
def test_outer_steps_of_a_run_equal_the_optimizers(name: str) -> None:
    workers = stack([0, 1, 2, 3])
    run = Run(Plan.read(name), slice(0, 4), workers)
    columns = run.columns
    state = first_state(tuple(_read(run.base, parts) for parts in columns))
    for step in range(1, 9):
        workers.step()
        plan = run.plan
        if not plan.overlap and step % plan.every == 0:
            deltas = np.stack([state.bases[0] - _read(row, columns[0]) for row in workers.weights])
            mean_N = mean_received(plan.codec, torch.from_numpy(deltas)).numpy()
            outer = Outer(lr=plan.outer.lr, momentum=plan.outer.momentum)
            state = outer_step(state, mean_N, outer, work=1.0)
        if run.after_step(step):
            workers.refresh()
    if run.plan.overlap:
        assert run.rounds == 3  # the fourth, started at step 8, completes one step later
    else:
        assert run.rounds == 4
        assert np.allclose(run.base.numpy(), state.bases[0], atol=1e-7)


def test_workers_that_miss_a_round_keep_their_weights() -> None:
    workers = stack([0, 1, 2, 3])
    run = Run(Plan.read("1:fp32!drop0.5"), slice(0, 4), workers, num_steps=8, seed=3)
    workers.weights += torch.arange(4.0)[:, None]
    run.after_step(1)
    shared = [torch.equal(row, run.base) for row in workers.weights]
    assert 0 < sum(shared) < 4
    # The average is over those who took part alone.
    took_part = torch.arange(4.0)[torch.tensor(shared)]
    expected = took_part.mean() * 0.7 * 1.9
    assert torch.allclose(run.base, LLAMA.first_weights(0) + expected, atol=1e-5)


@pytest.mark.parametrize(("name", "first", "second"), [("1:fp32!from2", 2, 4), ("1:fp32!to1", 4, 1)])
def test_pool_grows_or_shrinks_half_way(name: str, first: int, second: int) -> None:
    run = Run(Plan.read(name), slice(0, 4), stack([0, 1, 2, 3]), num_steps=8)
    assert [int(run._choose_workers(step).sum()) for step in (1, 4, 5, 8)] == [first, first, second, second]


@pytest.mark.parametrize(("name", "kept"), [("2:fp32:1:1:0", 0.0), ("2:fp32:1:1", 0.5)])
def test_overlapped_round_keeps_a_share_of_a_workers_own_weights(name: str, kept: float) -> None:
    workers = stack([0, 1, 2, 3])
    run = Run(Plan.read(name), slice(0, 4), workers, num_steps=8)
    workers.weights += torch.arange(4.0)[:, None]
    own = workers.weights.clone()
    assert not run.after_step(2) and run.after_step(3)
    assert torch.allclose(workers.weights, kept * own + (1 - kept) * run.base, atol=1e-5)


def test_uneven_workers_read_their_own_part_and_others_all_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.xz").write_bytes(lzma.compress(bytes(100_000)))
    options = argparse.Namespace(
        runs=["8x2:fp32", "4x2:fp32!uneven"],
        preset="0.1m",
        sequence=8,
        bf16=False,
        text=tmp_path / "text.xz",
        max_text=100_000,
        eval_samples=4,
        device="cpu",
        steps=200,
        warm_steps=0,
        batch=2,
        seed=0,
    )
    starts_SWB = Comparison(options)._starts()
    share = 98_000 // 4
    for worker in range(4):
        own = starts_SWB[:, 8 + worker]
        assert share * worker <= own.min() and own.max() + 9 <= share * (worker + 1)
    assert all(starts_SWB[:, worker].max() > 3 * share for worker in range(8))


def test_repeated_command_trains_only_the_runs_that_did_not_end(tmp_path: Path) -> None:
    options = argparse.Namespace(json=tmp_path / "a.json", seed=1, steps=8, preset="0.1m")
    options.runs = ["2:fp32", "2:int8"]
    assert runs_left(options) == ["2:fp32", "2:int8"]
    ended, killed = (Run(Plan.read(name), slice(0, 4), stack([0, 1, 2, 3])) for name in options.runs)
    ended.points, killed.points = [(4, 3.0), (8, 2.0)], [(4, 3.0)]
    write_records(options, [ended, killed])
    assert runs_left(options) == ["2:int8"]
    killed.points = [(4, 3.0), (8, 2.5)]
    write_records(options, [killed])
    assert runs_left(options) == []
    assert len(json.loads(options.json.read_text())) == 2
    options.seed = 2
    assert runs_left(options) == options.runs


def test_frames_on_a_link_with_losses_arrive_in_order() -> None:
    """The first frame loses pieces and is delayed, the second is not; closing does not discard what is under way."""

    class Losses(Uplink):
        delays = [0.05, 0.0, 0.01]  # noqa: RUF012

        def delay_s(self, num_bytes: int) -> float:
            return self.delays.pop(0)

    async def exchange() -> list[bytes]:
        ours, theirs = socket.socketpair()
        receiver = Stream(*await asyncio.open_connection(sock=theirs))
        sender = ShapedStream(Stream(*await asyncio.open_connection(sock=ours)), Losses(1e9))
        for payload in (b"one", b"two", b"three"):
            await sender.send(payload)
        sender.close()
        try:
            return [bytes(await receiver.receive()) for _ in range(3)]
        finally:
            receiver.close()

    assert asyncio.run(exchange()) == [b"one", b"two", b"three"]


def test_a_lost_piece_costs_a_timeout_and_a_round_trip() -> None:
    assert Uplink(1e6, latency_s=0.1).delay_s(1 << 20) == 0.1
    lossy = Uplink(1e6, latency_s=0.1, loss=1.0).delay_s(3 * (16 << 10))
    assert lossy == pytest.approx(0.1 + 3 * (0.2 + 0.2))


def test_unknown_condition_is_refused_with_the_grammar() -> None:
    with pytest.raises(ValueError, match="!dropP"):
        Plan.read("100:fp32!often")


def _of_layer(name: str, *modules: str) -> list[str]:
    return [f"model.layers.{name.split('.')[1]}.{module}.weight" for module in modules]


def _read(row_N: torch.Tensor, parts: list[slice]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return torch.cat([row_N[part] for part in parts]).numpy().copy()
