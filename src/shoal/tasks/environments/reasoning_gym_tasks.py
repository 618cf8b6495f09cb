"""Adapter to reasoning-gym: more than 100 generated tasks with scorers and curricula. `pip install 'shoal-rl[reasoning-gym]'`.

    name = "reasoning-gym"
    options = { dataset = "spell_backward", max_word_len = 5 }

Other options are those of the data set's configuration; a list is written with commas. `level` sets every attribute of the data
set's curriculum to that level, from 0; options of the configuration take precedence.
"""

import ast
import dataclasses
import re
import sys
from typing import Any

from shoal.tasks.environments.hosted import HostedTask
from shoal.tasks.task import check_whole

_FUNCTION = re.compile(r"a?(sin|cos|tan|sec|csc|cot)h?|exp|log|ln|sqrt|pi|Abs")
_SAFE_TEXT = re.compile(r"[\w\s+\-*/^().,]*", re.ASCII)
_EVALUATED = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
"""Modules that evaluate an answer as a Python expression to accept a list."""
_FAULTY = {
    "coin_flip": "the start of an answer, such as 0, scores as the whole",
    "complex_arithmetic": "the answer nan scores as right",
    "game_of_life_halting": "every answer scores as right",
    "puzzle24": "the same expression of other numbers scores as right for every problem",
}
"""Data sets of release 0.1.25 for which one answer earns the full reward on most problems. Training would find it."""


class ReasoningGym(HostedTask):
    """A data set of reasoning-gym."""

    extra = "reasoning-gym"
    distributions = ("reasoning-gym", "sympy")
    selects = "dataset"
    package = "shoal.tasks.environments.reasoning_gym_tasks:ReasoningGymPackage"

    def __init__(
        self,
        *,
        dataset: str,
        style: str = "chat",
        template: str = "",
        level: int = -1,
        packages: str = "",
        **config: bool | int | float | str,
    ) -> None:
        check_whole("reasoning-gym: level", level, least=-1, most=1000)
        options = {"dataset": dataset, "level": level, **config}
        super().__init__(options=options, style=style, template=template, packages=packages)


# -- in the child process ---------------------------------------------------------------------------------


class ReasoningGymPackage:
    """Makes problems with a data set of reasoning-gym."""

    def __init__(self, dataset: str, level: int, **config: Any) -> None:
        from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

        if dataset in _FAULTY:
            raise ValueError(f"the scorer of {dataset} is faulty: {_FAULTY[dataset]}; use another data set")
        if dataset not in self.names():
            raise ValueError(f"no data set {dataset!r}; `shoal tasks show reasoning-gym` lists them")
        kind, config_class = DATASETS[dataset]
        known = {field.name: field for field in dataclasses.fields(config_class)}
        settable = sorted(known.keys() - {"seed", "size"})
        for name in config:
            if name not in settable:
                raise ValueError(f"{dataset} has no option {name!r}; it has: {', '.join(settable)}")
        given = {name: _value(value, known[name]) for name, value in config.items()}
        settings = config_class(seed=0, **given)
        if level >= 0:
            if dataset not in CURRICULA:
                raise ValueError(f"{dataset} has no curriculum; remove level")
            curriculum = create_curriculum(dataset)
            for name, attribute in curriculum.attributes.items():
                curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
            settings = dataclasses.replace(curriculum.generate_configuration({"seed": 0}), **given)
        self._kind, self._settings = kind, settings
        self._dataset = kind(settings)
        _refuse_code()

    @staticmethod
    def names() -> list[str]:
        from reasoning_gym.factory import DATASETS

        return sorted(DATASETS.keys() - {"composite"} - _FAULTY.keys())

    def make(self, seed: int) -> dict[str, Any]:
        entry: dict[str, Any]
        try:
            entry = self._dataset[seed]
        except IndexError:  # four data sets have `size` problems for each seed, the others any number
            entry = self._kind(dataclasses.replace(self._settings, seed=seed))[0]
        return entry

    def score(self, problem: dict[str, Any], answer: str) -> float:
        return float(self._dataset.score_answer(answer, problem))


def _value(value: Any, field: Any) -> Any:
    """Returns an option's value as the configuration needs it: a list from a text with commas."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if not isinstance(value, str) or not isinstance(default, list | tuple):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    kind = type(default[0]) if default and isinstance(default[0], int | float) else str
    return type(default)(kind(part) for part in parts)


def _refuse_code() -> None:
    """Replaces what evaluates an answer as code: otherwise an answer could set its own score."""
    import sympy

    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym.") and name.rpartition(".")[2] in _EVALUATED:
            vars(module)["eval"] = ast.literal_eval
        if name.startswith("reasoning_gym.games.") and hasattr(module, "parse_expr"):
            vars(module)["parse_expr"] = parse_formula
    vars(sympy)["parse_expr"] = parse_formula


def parse_formula(text: str, *arguments: Any, **settings: Any) -> Any:
    """Parses a formula as sympy does, if it consists of numbers, single letters, known functions and operators.

    sympy evaluates the text as Python with all builtins.
    """
    from sympy.parsing.sympy_parser import parse_expr

    names = re.findall(r"[A-Za-z_]\w*", text)
    unknown = any(len(name) > 1 and not _FUNCTION.fullmatch(name) for name in names)
    attribute_or_power = re.search(r"[A-Za-z_)]\s*\.|\*\*\s*\(?\s*\d{4}", text)
    if unknown or attribute_or_power or not _SAFE_TEXT.fullmatch(text):
        raise ValueError(f"not a formula: {text[:80]!r}")
    return parse_expr(text, *arguments, **settings)
