"""Generated tasks: rewards, disjoint splits, prompts in the alphabet of every model."""

import pytest

from shoal.model.builtin import ALPHABET
from shoal.tasks import Finite, Outcome, Problem, Split, make_task
from shoal.tasks.procedural import Count, Largest, Sort
from shoal.wire.run_spec import TaskSpec

SPLITS: tuple[Split, Split] = ("train", "eval")
SPECS = [
    TaskSpec(name="add", options={"digits": 3}),
    TaskSpec(name="add", options={"style": "bare"}),
    TaskSpec(name="add", options={"style": "shots"}),
    TaskSpec(name="sort", options={"length": 5}),
    TaskSpec(name="sort", options={"style": "chat"}),
    TaskSpec(name="largest", options={"count": 4, "below": 1000}),
    TaskSpec(name="largest", options={"count": 3, "below": 50, "style": "bare"}),
    TaskSpec(name="count", options={"length": 8}),
    TaskSpec(name="count", options={"length": 5, "alphabet": 2, "style": "bare"}),
    TaskSpec(name="add", budgets=(16, 64), budget_alpha=0.01),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name} {dict(spec.options)}")
def test_problems_depend_on_the_seed_only_and_use_the_alphabet_of_tiny(
    spec: TaskSpec,
) -> None:
    task = make_task(spec)
    prompts: dict[Split, set[str]] = {split: set() for split in SPLITS}
    for split in SPLITS:
        for seed in range(200):
            problem = task.problem(split, seed)
            assert problem == task.problem(split, seed)
            assert set(problem.prompt + problem.answer) <= set(ALPHABET), problem
            assert task.reward(problem, problem.answer, problem.budget or 1).value == 1.0
            prompts[split].add(problem.prompt)
    if not spec.budgets:  # the same question may be asked with two budgets
        assert not prompts["train"] & prompts["eval"]
    assert min(len(found) for found in prompts.values()) > (10 if spec.options.get("alphabet") == 2 else 100)
    assert not isinstance(task, Finite)


PINNED = {
    "largest": Problem("17,159,120,50>", "159"),
    "count": Problem("abaabaca c=", "1"),
}


def test_problems_are_the_same_in_every_release() -> None:
    """All machines of a run must derive the same problems, whatever release they run."""
    for name, problem in PINNED.items():
        assert make_task(TaskSpec(name=name, options={"style": "bare"})).problem("train", 0) == problem


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("907", Outcome.RIGHT),
        ("The largest is 907.", Outcome.RIGHT),
        ("<think>12, 31, 455</think>907", Outcome.RIGHT),
        ("907 is larger than 455", Outcome.WRONG),
        ("90", Outcome.WRONG),
        ("-907", Outcome.WRONG),
        ("<think>907</think>", Outcome.UNPARSEABLE),
        ("the second", Outcome.UNPARSEABLE),
        ("", Outcome.UNPARSEABLE),
    ],
)
def test_largest(text: str, outcome: Outcome) -> None:
    reward = Largest().reward(Problem("12,907,455,31>", "907"), text, 3)
    assert (reward.outcome, reward.value) == (outcome, 1.0 if outcome is Outcome.RIGHT else 0.0)


def test_largest_prompts_of_both_styles() -> None:
    chat, bare = Largest().problem("train", 5), Largest(style="bare").problem("train", 5)
    numbers = [int(word) for word in bare.prompt.removesuffix(">").split(",")]
    assert len(set(numbers)) == 4 and max(numbers) == int(bare.answer) < 1000
    assert chat.prompt == "Which is the largest of {}, {}, {} and {}? Reply with the number only.".format(
        *numbers
    )
    assert chat.answer == bare.answer


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("3", Outcome.RIGHT),
        ("b: 3 times", Outcome.RIGHT),
        ("4", Outcome.WRONG),
        ("three", Outcome.UNPARSEABLE),
    ],
)
def test_count(text: str, outcome: Outcome) -> None:
    assert Count().reward(Problem("abcabbd b=", "3"), text, 1).outcome is outcome


def test_count_prompts_of_both_styles() -> None:
    chat, bare = Count().problem("eval", 1), Count(style="bare").problem("eval", 1)
    word, letter = bare.prompt.removesuffix("=").split(" ")
    assert bare.answer == str(word.count(letter)) == chat.answer
    assert f'the letter "{letter}" occur in "{word}"' in chat.prompt


def test_a_word_is_held_out_with_all_its_letters() -> None:
    task = Count(length=5, alphabet=2, style="bare")
    words = {
        split: {task.problem(split, seed).prompt.split(" ")[0] for seed in range(100)} for split in SPLITS
    }
    assert words["train"] and words["eval"] and not words["train"] & words["eval"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1259", 1.0), ("1, 2, 5, 9", 1.0), ("Sorted: 1 2 9 5.", 0.25), ("125", 0.0), ("1, 2, 5, 9, 9", 0.0)],
)
def test_sort_in_style_chat(text: str, value: float) -> None:
    task = Sort(style="chat")
    assert task.chat
    assert task.reward(Problem("", "1259"), text, 1).value == value


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("largest", {"count": 1}),
        ("largest", {"count": 40}),
        ("largest", {"below": 3}),
        ("largest", {"style": "shots"}),
        ("count", {"length": 2}),
        ("count", {"alphabet": 1}),
        ("count", {"length": 3, "alphabet": 2}),
        ("count", {"letters": 2}),
        ("sort", {"style": "loud"}),
    ],
)
def test_invalid_options_are_errors(name: str, options: dict[str, int | float | str]) -> None:
    with pytest.raises(ValueError, match=name):
        make_task(TaskSpec(name=name, options=options))
