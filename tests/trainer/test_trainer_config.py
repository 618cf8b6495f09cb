"""The `[trainer]` table of a run file rejects settings that contradict each other."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from shoal.trainer.config import RECIPES, TrainerConfig


def test_unknown_key() -> None:
    with pytest.raises(ValidationError, match="learning_rat"):
        TrainerConfig.model_validate({"learning_rat": 1e-4})


def test_delta_must_be_above_the_clip() -> None:
    with pytest.raises(ValidationError, match=r"delta=1.1 must be above 1 \+ eps = 1.2"):
        TrainerConfig(delta=1.1)


def test_a_run_file_replaces_the_defaults_of_a_loss() -> None:
    assert TrainerConfig(loss="dapo").recipe == RECIPES["dapo"]
    assert TrainerConfig(loss="gspo", advantage="mean").recipe == replace(RECIPES["gspo"], advantage="mean")
    assert TrainerConfig(eps=0.1).recipe.eps_high == 0.1, "eps alone sets both sides of a symmetric clip"
    assert TrainerConfig(loss="dapo", eps=0.1).recipe.eps_high == 0.28


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction": "mask"}, 'correction="mask" needs behaviour="recompute"'),
        ({"correction_band": [1.5, 2.0]}, "must contain 1"),
        (
            {"metrics": ["tensorbord"]},
            "unknown sink 'tensorbord'; use tensorboard, wandb, trackio, mlflow, prometheus",
        ),
        ({"metrics": ["prometheus"]}, "unknown sink 'prometheus'; use"),
        ({"loss": "dapo", "delta": 1.25}, r"delta=1.25 must be above 1 \+ eps = 1.28"),
    ],
)
def test_contradicting_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate_json(json.dumps(settings))


def test_known_metrics_are_accepted() -> None:
    sinks = ("tensorboard", "wandb", "prometheus:9400", "prometheus:0.0.0.0:9400")
    assert TrainerConfig(metrics=sinks).metrics == sinks
