"""What a run file may change when its run is resumed, and the settings that the ledger records for it."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.cli.run.overrides import overridden_text
from shoal.cli.run.runfile import RunFile

FIXED_SECTIONS = ("task", "eval", "sampling", "proof", "tolerances", "admitted_weights", "needs")
"""Sections that decide what a rollout is and how it is judged. Work of two definitions must not be mixed."""
FIXED = frozenset(
    {
        "run.name",
        "run.model",
        "run.compute_dtype",
        "run.calibration",
        "run.uncalibrated",
        "trainer.kl",
        "trainer.seed",
        "trainer.supervised_steps",
        "trainer.supervised_learning_rate",
        "trainer.lora_rank",
        "trainer.lora_alpha",
        "trainer.diloco",
        "coordinator.database",
        "coordinator.store",
    }
)
"""Single keys with the same effect, or that only the beginning of a run uses."""
_RECORDED = (
    "groups_per_step",
    "prompts_per_lease",
    "max_prompts_per_lease",
    "lease_s",
    "eval_every",
    "eval_prompts",
    "eval_samples",
)


def changes_between(began: Path, now: Path, overrides: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Returns the keys that differ, each with both values; None stands for a key that is not set.

    `overrides` are those of --set, which change the file `now`.
    """
    texts = (began.read_text(encoding="utf-8"), overridden_text(now, overrides))
    before, after = (_flat(tomllib.loads(text)) for text in texts)
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def check_changes(changes: dict[str, tuple[Any, Any]], began: Path, now: Path) -> None:
    """Raises ValueError for a change that a run cannot take."""
    for key, (before, after) in changes.items():
        section = key.partition(".")[0]
        if key in FIXED or section in FIXED_SECTIONS or key.startswith("trainer.diloco"):
            raise ValueError(
                f"{now}: {key} is {after!r}, but the run began with {before!r} ({began}), and it cannot change within a run; "
                'put it back, or start another run from this one: model = "out/NAME/trainer/versions/vN"'
            )


def describe_changes(changes: dict[str, tuple[Any, Any]]) -> str:
    """Returns the changes in one line."""
    words = (f"{key} {_shown(before)} -> {_shown(after)}" for key, (before, after) in changes.items())
    return ", ".join(words)


def recorded_settings(file: RunFile) -> dict[str, Any]:
    """Returns the settings that the ledger records besides the public terms, so that a change of them can be seen there."""
    coordinator = {name: getattr(file.coordinator, name) for name in _RECORDED}
    return {
        "trainer": file.trainer.model_dump(mode="json", exclude={"metrics"}, exclude_none=True),
        "coordinator": coordinator,
    }


def _shown(value: Any) -> str:
    return "its default" if value is None else str(value)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= (
            _flat(value, f"{name}.") if isinstance(value, dict) and name != "task.options" else {name: value}
        )
    return found
