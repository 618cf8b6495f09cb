"""The trainer's part of a run file refuses what makes no sense."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from shoal.trainer.config import RECIPES, TrainerConfig


def test_unknown_key() -> None:
    with pytest.raises(ValidationError, match="learning_rat"):
        TrainerConfig.model_validate({"learning_rat": 1e-4})


def test_delta_must_lie_above_the_clip() -> None:
    with pytest.raises(ValidationError, match=r"delta=1.1 must lie above 1 \+ eps = 1.2"):
        TrainerConfig(delta=1.1)


def test_a_loss_brings_its_own_settings_and_a_file_replaces_them() -> None:
    assert TrainerConfig(loss="dapo").recipe == RECIPES["dapo"]
    assert TrainerConfig(loss="gspo", advantage="mean").recipe == replace(RECIPES["gspo"], advantage="mean")
    assert TrainerConfig(eps=0.1).recipe.eps_high == 0.1, (
        "eps alone means both sides of a clip that has equal ones"
    )
    assert TrainerConfig(loss="dapo", eps=0.1).recipe.eps_high == 0.28


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"correction": "mask"}, 'correction="mask" needs behaviour="recompute"'),
        ({"correction_band": [1.5, 2.0]}, "must lie around 1"),
        ({"metrics": ["tensorbord"]}, "'tensorbord' is none of tensorboard, wandb, prometheus:PORT"),
        ({"metrics": ["prometheus"]}, "'prometheus' is none of"),
        ({"loss": "dapo", "delta": 1.25}, r"delta=1.25 must lie above 1 \+ eps = 1.28"),
    ],
)
def test_what_does_not_fit_together(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainerConfig.model_validate_json(json.dumps(settings))


def test_metrics_that_are_known() -> None:
    TrainerConfig(metrics=("tensorboard", "wandb", "prometheus:9400", "prometheus:0.0.0.0:9400"))
