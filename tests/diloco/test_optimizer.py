"""Tests of DiLoCo against a reference implementation, with whole peers in one process."""

import copy
import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_swarm import in_threads, make_peer
from torch import nn
from torch.nn import functional as F

from shoal.diloco import DiLoCo, LocalHub, Outer, PeerAverager, Schedule
from shoal.diloco.outer import first_state, outer_step
from shoal.diloco.rounds import RoundOutcome


def test_example_in_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diloco.md").read_text()
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["optimizer"].outer_state.round == 3


def test_torch_optimizer_is_refused_as_outer() -> None:
    model = small_model()
    sgd: Any = torch.optim.SGD(model.parameters(), lr=0.7)
    averager = make_peer(LocalHub())
    with pytest.raises(ValueError, match=r"outer=SGD: .* use shoal\.diloco\.Outer"):
        DiLoCo(model, inner=adamw(model), outer=sgd, averager=averager)
    averager.leave()


def test_pseudo_gradient_is_freed_before_the_outer_step() -> None:
    """With billions of parameters each vector in main memory takes gigabytes."""
    freed = []

    class Watched(DiLoCo):
        def pseudo_gradient(self) -> np.ndarray[Any, np.dtype[np.float32]]:
            delta_N = super().pseudo_gradient()
            self.delta = weakref.ref(delta_N)
            return delta_N

        def _apply(self, result: Any) -> None:
            freed.append(self.delta() is None)
            super()._apply(result)

    model = small_model()
    optimizer = Watched(
        model, inner=adamw(model), averager=make_peer(LocalHub()), schedule=Schedule(inner_steps=1)
    )
    for step in range(2):
        F.cross_entropy(model(batch(0, step)[0]), batch(0, step)[1]).backward()
        optimizer.step()
    optimizer.close()
    assert freed == [True, True]


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: torch.Tensor = self.head(x)
        return logits


def batch(site: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * site + step)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def inner_step(model: nn.Module, optimizer: Any, site: int, step: int) -> None:
    x, y = batch(site, step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def reference(num_sites: int, rounds: int, inner_steps: int) -> list[torch.Tensor]:
    """Runs the paper's algorithm with torch's own SGD as outer optimizer and none of Shoal's code."""
    shared = small_model()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    sites = [copy.deepcopy(shared) for _ in range(num_sites)]
    inners = [adamw(site) for site in sites]
    for turn in range(rounds):
        for index, (site, inner) in enumerate(zip(sites, inners, strict=True)):
            for step in range(inner_steps):
                inner_step(site, inner, index, turn * inner_steps + step)
        for at, parameter in enumerate(shared.parameters()):
            moved = [parameter.detach() - list(site.parameters())[at].detach() for site in sites]
            parameter.grad = torch.stack(moved).mean(0)
        outer.step()
        for site in sites:
            site.load_state_dict(shared.state_dict())
    return [parameter.detach() for parameter in shared.parameters()]


def train_sites(
    num_sites: int, num_steps: int, schedule: Schedule, make: Callable[[], nn.Module] = small_model
) -> tuple[list[nn.Module], list[DiLoCo]]:
    hub = LocalHub()
    models = [make() for _ in range(num_sites)]
    optimizers = [
        DiLoCo(model, inner=adamw(model), averager=make_peer(hub, min_peers=num_sites), schedule=schedule)
        for model in models
    ]
    for optimizer in optimizers:
        optimizer.join(deadline_s=10)

    def train(site: int) -> None:
        for step in range(num_steps):
            inner_step(models[site], optimizers[site], site, step)

    in_threads([functools.partial(train, site) for site in range(num_sites)])
    in_threads([optimizer.close for optimizer in optimizers])
    return models, optimizers


def test_outer_step_equals_torch_sgd() -> None:
    for nesterov in (True, False):
        parameter = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(1)))
        sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=nesterov)
        state = first_state((parameter.detach().numpy().copy(),))
        for seed in range(5):
            gradient = torch.randn(50, generator=torch.Generator().manual_seed(seed))
            parameter.grad = gradient
            sgd.step()
            state = outer_step(state, gradient.numpy(), Outer(nesterov=nesterov), work=2.0)
        assert np.allclose(state.bases[0], parameter.detach().numpy(), atol=1e-6)
        assert state.round == 5 and state.work == 10.0


def test_sites_match_a_reference_implementation() -> None:
    models, _ = train_sites(3, 15, Schedule(inner_steps=5, deadline_s=30))
    expected = reference(3, rounds=3, inner_steps=5)
    for model in models:
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert torch.allclose(parameter, wanted, atol=1e-5)
    flat = [torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in models]
    assert torch.equal(flat[0], flat[1]) and torch.equal(flat[0], flat[2])


def test_one_site_with_outer_rate_one_equals_the_inner_optimizer() -> None:
    model = small_model()
    optimizer = DiLoCo(
        model,
        inner=adamw(model),
        averager=make_peer(LocalHub()),
        outer=Outer(lr=1.0, momentum=0.0, nesterov=False),
        schedule=Schedule(inner_steps=3, deadline_s=10),
    )
    plain = small_model()
    inner = adamw(plain)
    for step in range(9):
        inner_step(model, optimizer, 0, step)
        inner_step(plain, inner, 0, step)
    optimizer.close()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_streaming_sites_keep_one_outer_state() -> None:
    schedule = Schedule(inner_steps=8, fragments=2, overlap_steps=2, mix=0.5, deadline_s=30)
    _, optimizers = train_sites(2, 26, schedule, Deep)
    assert [optimizer.outer_state.round for optimizer in optimizers] == [6, 6]
    assert optimizers[0].outer_state.digest() == optimizers[1].outer_state.digest()


def test_overlapped_round_mixes_in_the_steps_taken_meanwhile() -> None:
    model = small_model()
    schedule = Schedule(inner_steps=3, overlap_steps=2, mix=0.25, deadline_s=10)
    optimizer = DiLoCo(model, inner=adamw(model), averager=make_peer(LocalHub()), schedule=schedule)
    for step in range(4):
        inner_step(model, optimizer, 0, step)
    x, y = batch(0, 4)
    F.cross_entropy(model(x), y).backward()
    twin = copy.deepcopy(model)
    for parameter, source in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.grad = source.grad
    inner = adamw(twin)
    inner.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    inner.step()
    optimizer.step()
    optimizer.close()
    own = torch.cat([p.detach().reshape(-1) for p in twin.parameters()]).numpy()
    expected = np.float32(0.25) * own + np.float32(0.75) * optimizer.outer_state.bases[0]
    assert optimizer.outer_state.round == 1
    assert np.allclose(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy(), expected)


def test_new_site_joins_in_step_with_the_swarm() -> None:
    hub = LocalHub()
    schedule = Schedule(inner_steps=4, deadline_s=30)
    model = small_model()
    first = DiLoCo(model, inner=adamw(model), averager=make_peer(hub), schedule=schedule)
    for step in range(6):
        inner_step(model, first, 0, step)
    other = small_model(seed=7)
    second = DiLoCo(other, inner=adamw(other), averager=make_peer(hub), schedule=schedule)
    assert second.join(deadline_s=10)
    assert (second.steps, second.phase) == (6, 2)
    assert second.outer_state.digest() == first.outer_state.digest()

    def go_on(model: nn.Module, optimizer: DiLoCo, site: int) -> None:
        for step in range(6, 8):
            inner_step(model, optimizer, site, step)

    in_threads([functools.partial(go_on, model, first, 0), functools.partial(go_on, other, second, 1)])
    assert second.outer_state.round == 2 and second.outer_state.digest() == first.outer_state.digest()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    in_threads([first.close, second.close])


def test_site_that_joins_from_a_newcomer_counts_the_same_steps() -> None:
    """Otherwise it ends the run early, and the others wait for it in the last round."""
    hub, schedule = LocalHub(), Schedule(inner_steps=4, deadline_s=30)
    models = [small_model(seed=seed) for seed in range(3)]
    first, second, third = (
        DiLoCo(model, inner=adamw(model), averager=make_peer(hub), schedule=schedule) for model in models
    )
    for step in range(6):
        inner_step(models[0], first, 0, step)
    assert second.join(deadline_s=10)
    first.close()
    assert third.join(deadline_s=10)
    assert (third.steps, third.phase) == (second.steps, second.phase) == (6, 2)
    in_threads([second.close, third.close])


def test_peer_that_claims_many_steps_does_not_end_the_run_of_a_newcomer() -> None:
    """The digest of a state binds its round, not the step that its sender names."""
    hub, schedule = LocalHub(), Schedule(inner_steps=4, deadline_s=30)
    models = [small_model(seed=seed) for seed in range(2)]
    liar, newcomer = (
        DiLoCo(model, inner=adamw(model), averager=make_peer(hub), schedule=schedule) for model in models
    )
    for step in range(6):
        inner_step(models[0], liar, 0, step)
    liar.averager.progress(phase=2, step=10**9)
    assert newcomer.join(deadline_s=10)
    assert newcomer.outer_state.digest() == liar.outer_state.digest()
    assert newcomer.steps <= 3 * schedule.interval
    in_threads([liar.close, newcomer.close])


def test_site_that_joins_during_a_round_takes_part_in_it_and_in_the_last_one() -> None:
    hub, last_step = LocalHub(), 8
    models = [small_model(), small_model(seed=7)]
    first, second = (
        DiLoCo(
            model,
            inner=adamw(model),
            averager=make_peer(hub, min_peers=2),
            schedule=Schedule(inner_steps=4, deadline_s=60),
        )
        for model in models
    )

    def finish(site: int, optimizer: DiLoCo) -> None:
        while optimizer.steps < last_step:
            inner_step(models[site], optimizer, site, optimizer.steps)

    def join_and_finish() -> None:
        until_s = time.monotonic() + 30
        while (first.steps, first.phase) != (4, 0):  # it is in its first round
            assert time.monotonic() < until_s, "the first site has not reached its round within 30 s"
            time.sleep(0.01)
        second.join(deadline_s=10)
        assert (second.steps, second.phase) == (3, 3)
        finish(1, second)

    in_threads([functools.partial(finish, 0, first), functools.partial(join_and_finish)])
    assert (first.outer_state.round, second.outer_state.round) == (2, 2)
    assert first.outer_state.digest() == second.outer_state.digest()
    in_threads([first.close, second.close])


def test_optimizer_resumes_from_its_state_dict() -> None:
    schedule = Schedule(inner_steps=4, deadline_s=10)

    def fresh() -> tuple[nn.Module, DiLoCo]:
        model = small_model()
        return model, DiLoCo(model, inner=adamw(model), averager=make_peer(LocalHub()), schedule=schedule)

    model, optimizer = fresh()
    for step in range(6):
        inner_step(model, optimizer, 0, step)
    kept, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    for step in range(6, 10):
        inner_step(model, optimizer, 0, step)
    again, resumed = fresh()
    again.load_state_dict(weights)
    resumed.load_state_dict(kept)
    for step in range(6, 10):
        inner_step(again, resumed, 0, step)
    assert resumed.outer_state.digest() == optimizer.outer_state.digest()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    optimizer.close()
    resumed.close()


def test_bfloat16_rounding_gives_no_pseudo_gradient() -> None:
    model = small_model().to(torch.bfloat16)
    optimizer = DiLoCo(
        model, inner=adamw(model), averager=make_peer(LocalHub()), schedule=Schedule(inner_steps=2)
    )
    state = first_state((optimizer.outer_state.bases[0] + np.float32(1e-4),))
    optimizer.outer_state = state
    optimizer._fragments[0].write(state.bases[0])
    assert not optimizer.pseudo_gradient().any()
    optimizer.close()


def test_gradient_scaler_and_lr_scheduler_work_with_it() -> None:
    model = small_model()
    optimizer = DiLoCo(
        model,
        inner=adamw(model),
        averager=make_peer(LocalHub()),
        schedule=Schedule(inner_steps=2, deadline_s=10),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        for micro in range(2):
            x, y = batch(micro, step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y) / 2
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rates.step()
    assert optimizer.outer_state.round == 2
    assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)
    optimizer.close()


def test_site_without_others_continues_alone() -> None:
    ended: list[RoundOutcome] = []
    model = small_model()
    averager: PeerAverager = make_peer(LocalHub(), min_peers=2)
    optimizer = DiLoCo(
        model, inner=adamw(model), averager=averager, schedule=Schedule(inner_steps=2, deadline_s=0.5)
    )
    optimizer.on_round = lambda report: ended.append(report.result.outcome)
    for step in range(2):
        inner_step(model, optimizer, 0, step)
    optimizer.close()
    assert ended == [RoundOutcome.LOCAL] and optimizer.outer_state.round == 1


def test_invalid_schedule_is_refused() -> None:
    options: list[dict[str, Any]] = [
        {"inner_steps": 5, "fragments": 2},
        {"inner_steps": 4, "overlap_steps": 4},
        {"mix": 1.0},
    ]
    for wrong in options:
        with pytest.raises(ValueError):
            Schedule(**wrong)
