"""Runs with several tasks and several evaluations: which lease poses what, the figures of each, and what the ledger proves."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_swarm import CONFIG, SPEC, Node, SmallSwarm

from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.rules.difficulty import (
    MIN_WEIGHT,
    choose_attempts,
    next_rate,
    problem_numbers,
    weight,
)
from shoal.tasks import make_task
from shoal.wire.codes import CorruptData
from shoal.wire.lease import Lease
from shoal.wire.ledger import LedgerEvent
from shoal.wire.page_data import Snapshot
from shoal.wire.run_spec import EvalSpec, OwnSampling, RunSpec, TaskSpec
from shoal.wire.seeded_draw import choose_task, problem_seeds

SHIPPED_NOISE = Path(__file__).parents[3] / "runs/calibration/smollm2-135m-bf16-on-cpu.json"
SORT = TaskSpec(name="sort", options={"length": 4}, weight=3.0)
ADD = TaskSpec(
    name="add",
    label="sums",
    sampling=OwnSampling(temperature=0.6, max_new_tokens=5, samples_per_prompt=4),
    weight=1.0,
)
MIXED = SPEC.model_copy(
    update={
        "task": SORT,
        "more_tasks": (ADD,),
        "evals": (
            EvalSpec(task=SORT, every=4, prompts=2, samples=2),
            EvalSpec(
                task=ADD.model_copy(update={"label": "cold", "sampling": OwnSampling(temperature=0.25)}),
                every=2,
                prompts=3,
                samples=5,
            ),
        ),
    }
)
# One lease per epoch: every secret is revealed as soon as its lease ended.
ONE_LEASE = CONFIG.model_copy(update={"leases_per_epoch": 1, "groups_per_step": 8})


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[SmallSwarm]:
    swarm = SmallSwarm(tmp_path / "run", ONE_LEASE, MIXED)
    yield swarm
    swarm.close()


def finish_evaluation(swarm: SmallSwarm, node: Node, **evidence: float) -> list[Lease]:
    """Has a node do held-out work until it gets train work; returns the held-out leases."""
    done: list[Lease] = []
    while (lease := node.lease()).purpose == "eval":
        node.deliver(lease)
        swarm.claim()
        swarm.verdict(lease, rewards=(1.0,) * lease.num_rows, evidence=evidence)
        done.append(lease)
    return done


def train(swarm: SmallSwarm, node: Node, leases: int) -> list[Lease]:
    done = []
    for _ in range(leases):
        lease = swarm.work(node)
        assert lease.purpose == "train"
        done.append(lease)
    return done


def tampered(events: list[LedgerEvent], lease: Lease, **changes: object) -> list[LedgerEvent]:
    """Returns the events with the issue of a lease changed."""
    return [
        event.model_copy(update={"body": event.body | changes})
        if event.type == "lease.issued" and event.body["lease_id"] == lease.lease_id
        else event
        for event in events
    ]


def test_the_seed_of_a_train_lease_draws_its_task(mixed: SmallSwarm) -> None:
    mixed.start()
    node = mixed.proven_node()
    finish_evaluation(mixed, node)
    for lease in train(mixed, node, 4):
        spec = (SORT, ADD)[choose_task(lease.seed, [3.0, 1.0])]
        assert lease.task == spec
        assert lease.sampling.samples_per_prompt == (4 if spec is ADD else 2)
        assert lease.sampling.max_new_tokens == (5 if spec is ADD else 8)
        assert lease.sampling.temperature == (0.6 if spec is ADD else 1.0)
        seeds = problem_seeds(
            lease.seed, run="small", purpose="train", chunk=0, num_prompts=len(lease.prompts)
        )
        assert lease.prompts == tuple(make_task(spec).problem("train", seed).prompt for seed in seeds)
    titles = {event.body["task"] for event in mixed.events("lease.issued")}
    assert titles <= {"sort", "sums", "cold"}


def test_tasks_are_drawn_by_weight() -> None:
    drawn = Counter(choose_task(f"{number:064x}", [3.0, 1.0, 0.5]) for number in range(4500))
    assert [abs(drawn[place] - share) < 150 for place, share in enumerate((3000, 1000, 500))] == [True] * 3


def test_the_ledger_proves_the_task_of_every_lease(mixed: SmallSwarm) -> None:
    mixed.start()
    node = mixed.proven_node()
    finish_evaluation(mixed, node)
    leases = train(mixed, node, 3)
    events = mixed.ledger()
    books = replay(events)
    assert [books.leases[lease.lease_id].task for lease in leases] == [lease.task.title for lease in leases]
    other = "sums" if leases[0].task.title == "sort" else "sort"
    with pytest.raises(CorruptData, match=f"is of task '{other}', its seed draws"):
        replay(tampered(events, leases[0], task=other))
    with pytest.raises(CorruptData, match="is of task 'third', the terms have"):
        replay(tampered(events, leases[0], task="third"))


def test_a_batch_and_the_page_have_figures_of_each_task(mixed: SmallSwarm) -> None:
    mixed.start()
    node = mixed.proven_node()
    finish_evaluation(mixed, node)
    counts: Counter[str] = Counter()
    while mixed.stats().ready_groups < 8:
        counts[mixed.work(node).task.title] += 1
    batch = mixed.batch(0)
    assert sum(one.groups for one in batch.tasks.values()) == len(batch.groups) == 8
    for title in ("sort", "sums"):
        own = [group for group in batch.groups if group.task == title]
        figures = batch.tasks[title]
        assert figures.groups == len(own)
        assert figures.reward_mean == (0.5 if own else None)
        assert figures.accepted_groups == 2 * counts[title]
        assert figures.accepted_rollouts == 2 * counts[title] * (2 if title == "sort" else 4)
    assert batch.accepted_rollouts == sum(one.accepted_rollouts for one in batch.tasks.values())
    (formed,) = mixed.events("batch.formed")
    assert formed.body["tasks"]["sort"]["groups"] == batch.tasks["sort"].groups
    page = Snapshot.parse(mixed.public.get("/v1/page").raise_for_status().content)
    assert [(task.label, task.weight, task.temperature) for task in page.terms.tasks] == [
        ("sort", 0.75, 1.0),
        ("sums", 0.25, 0.6),
    ]
    assert [(one.label, one.every, one.temperature) for one in page.terms.evals] == [
        ("sort", 4, 1.0),
        ("cold", 2, 0.25),
    ]
    assert page.terms.task == "sort, sums"


def test_each_evaluation_has_its_own_interval_samples_and_temperature(mixed: SmallSwarm) -> None:
    mixed.start()
    node = mixed.proven_node()
    held = finish_evaluation(mixed, node, right=4, passed=1, majority=1)
    assert {
        (lease.task.title, lease.sampling.samples_per_prompt, lease.sampling.temperature) for lease in held
    } == {
        ("sort", 2, 1.0),
        ("cold", 5, 0.25),
    }
    views = {view.task: view for view in mixed.stats().evaluations}
    assert views["cold"].complete and views["cold"].samples == 5 and views["cold"].rollouts == 15
    assert views["cold"].pass_at_1 == 8 / 15  # two chunks with 4 right answers each
    assert (views["cold"].pass_at_k, views["cold"].majority) == (2 / 3, 2 / 3)
    for version in (1, 2):
        mixed.announce(version)
    held = finish_evaluation(mixed, mixed.proven_node())
    assert {lease.task.title for lease in held} == {"cold"}, "sort is evaluated every fourth version"
    completed = [
        (event.body["version"], event.body["task"]) for event in mixed.events("evaluation.completed")
    ]
    assert completed == [(0, "cold"), (0, "sort"), (2, "cold")]


def test_the_run_ends_when_every_evaluation_of_the_last_version_is_complete(mixed: SmallSwarm) -> None:
    mixed.start()
    for version in range(1, 5):
        mixed.announce(version)
    node, done = mixed.proven_node(), []
    while not mixed.stats().finished:
        lease = node.deliver()
        mixed.claim()
        mixed.verdict(lease, rewards=(1.0,) * lease.num_rows)
        done.append(lease)
        mixed.reopen()  # after a crash, the coordinator knows what is done
    last = {(lease.policies[0].version, lease.task.title) for lease in done}
    assert {(4, "sort"), (4, "cold")} <= last
    assert all(view.complete for view in mixed.stats().evaluations if view.version == 4)


def test_two_tasks_with_the_same_name_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"two entries of \[\[task\]\] are called 'sort'; give one of them another label"
    ):
        RunSpec.model_validate_json(MIXED.model_copy(update={"more_tasks": (SORT,)}).model_dump_json())
    twice = (MIXED.evals[0], MIXED.evals[0])
    with pytest.raises(ValueError, match=r"two entries of \[\[eval\]\] are called 'sort'"):
        RunSpec.model_validate_json(MIXED.model_copy(update={"evals": twice}).model_dump_json())


def test_a_calibrated_run_has_measured_temperatures_only() -> None:
    noise = json.loads(SHIPPED_NOISE.read_bytes())
    own = {"compute_dtype": noise["compute_dtype"], "noise": noise, "evals": ()}
    terms = json.loads(MIXED.model_dump_json()) | own
    with pytest.raises(
        ValueError, match=r"measured at temperature 1, task 'sums' has 0\.6; calibrate this run file"
    ):
        RunSpec.model_validate_json(json.dumps(terms))


# -- difficulty sampling ----------------------------------------------------------------------------------


@pytest.fixture
def difficult(tmp_path: Path) -> Iterator[SmallSwarm]:
    rows = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(40)]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = TaskSpec(name="qa", options={"path": str(data)}, difficulty=True)
    swarm = SmallSwarm(tmp_path / "run", ONE_LEASE, SPEC.model_copy(update={"task": task}))
    yield swarm
    swarm.close()


def test_problems_that_are_solved_sometimes_weigh_most() -> None:
    assert weight(None) == weight(0.5) == 1.0
    assert weight(0.0) == weight(1.0) == MIN_WEIGHT
    assert weight(0.25) == pytest.approx(0.75)
    assert next_rate(None, [1.0, 0.0]) == 0.5
    assert next_rate(0.5, [1.0, 1.7]) == 0.75, "a reward above 1 counts as 1"
    rates = dict.fromkeys(range(10), 1.0) | {3: 0.5}
    drawn: Counter[int] = Counter()
    for number in range(200):
        seed = f"{number:064x}"
        (attempt,) = choose_attempts(seed, 1, 10, rates.get)
        (problem,) = (
            seed % 10
            for seed in problem_seeds(
                seed, run="r", purpose="train", chunk=0, num_prompts=1, attempts=(attempt,)
            )
        )
        drawn[problem] += 1
    assert drawn[3] > 70, "1 of 10 problems has 1.0 of a total weight of 1.9"


def test_the_ledger_repeats_every_choice_of_difficulty_sampling(difficult: SmallSwarm) -> None:
    difficult.start()
    node = difficult.proven_node()
    leases = [difficult.work(node, rewards=(1.0, 0.0, 1.0, 1.0)) for _ in range(4)]
    events = difficult.ledger()
    replay(events)
    bodies = {event.body["lease_id"]: event.body for event in events if event.type == "lease.issued"}
    for lease in leases:
        assert bodies[lease.lease_id]["attempts"] == list(lease.attempts)
        assert bodies[lease.lease_id]["num_problems"] == difficult.coordinator.num_problems("qa")
    first = bodies[leases[0].lease_id]
    shifted = ([attempt + by for attempt in leases[0].attempts] for by in range(1, 100))
    wrong = next(
        attempts
        for attempts in shifted
        if problem_numbers(leases[0].seed, attempts, first["num_problems"]) != first["problems"]
    )
    with pytest.raises(CorruptData, match="has problems that its seed and attempts do not give"):
        replay(tampered(events, leases[0], attempts=wrong))
    with pytest.raises(CorruptData, match="has problems that its seed and attempts do not give"):
        replay(tampered(events, leases[0], problems=[number + 1 for number in first["problems"]]))
    # A coordinator that chooses other attempts, leaves them out, or counts the problems otherwise for one lease.
    last, size = leases[-1], bodies[leases[-1].lease_id]["num_problems"]
    others = [attempt + 1 for attempt in last.attempts]
    numbers = problem_numbers(last.seed, others, size)
    with pytest.raises(CorruptData, match="the pass rates give"):
        replay(tampered(events, last, attempts=others, problems=numbers))
    with pytest.raises(
        CorruptData, match="has 0 attempts for 2 prompts of task 'qa', whose difficulty is true"
    ):
        replay(tampered(events, last, attempts=[], problems=[]))
    numbers = problem_numbers(last.seed, last.attempts, size - 1)
    with pytest.raises(CorruptData, match=f"has {size - 1} problems of task 'qa', earlier ones {size}"):
        replay(tampered(events, last, problems=numbers, num_problems=size - 1))


def test_a_node_that_lets_a_lease_go_gets_the_same_problems_again(difficult: SmallSwarm) -> None:
    difficult.start()
    node, other = difficult.proven_node(), difficult.proven_node()
    first = node.lease()
    difficult.clock.ahead_s += difficult.config.lease_s + 1
    difficult.tick()
    difficult.relay_up()
    for _ in range(2):  # the pass rates change meanwhile
        difficult.work(other, rewards=(0.0, 0.0, 1.0, 1.0))
    with difficult.coordinator.transaction() as tx:
        from shoal.swarm.coordinator.membership.nodes import NODES

        tx.update(NODES, node.id, lapses=0)
    again = node.lease()
    assert (again.unit, again.seed) == (first.lease_id, first.seed)
    count = len(again.prompts)
    assert (again.prompts, again.attempts) == (first.prompts[:count], first.attempts[:count])
    difficult.work(node)
    events = difficult.ledger()
    replay(events)
    with pytest.raises(CorruptData, match="repeats work that was not leased by difficulty"):
        replay(tampered(events, first, purpose="eval", attempts=[], problems=[]))


def test_a_task_without_end_cannot_be_sampled_by_difficulty(tmp_path: Path) -> None:
    endless = SORT.model_copy(update={"difficulty": True})
    with pytest.raises(
        ValueError, match="task 'sort': difficulty = true needs a task with a known number of problems"
    ):
        SmallSwarm(tmp_path / "run", ONE_LEASE, SPEC.model_copy(update={"task": endless}))
