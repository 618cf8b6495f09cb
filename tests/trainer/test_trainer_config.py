"""The trainer's part of a run file refuses what makes no sense."""

import pytest
from pydantic import ValidationError

from shoal.trainer.config import TrainerConfig


def test_unknown_key() -> None:
    with pytest.raises(ValidationError, match="learning_rat"):
        TrainerConfig.model_validate({"learning_rat": 1e-4})


def test_delta_must_lie_above_the_clip() -> None:
    with pytest.raises(ValidationError, match=r"delta=1.1 must lie above 1 \+ eps = 1.2"):
        TrainerConfig(delta=1.1)
