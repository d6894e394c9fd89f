"""Hundreds of drawn configurations of the native families, compared with transformers; the tests try a few dozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.config_draws import FAMILIES
from tests.model.test_config_keys import compare


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "seed", [*range(100, 125), *(pytest.param(seed, marks=pytest.mark.release) for seed in range(125, 180))]
)
def test_e2_drawn_configurations_give_the_logits_of_transformers(tmp_path: Path, family: str, seed: int) -> None:
    compare(tmp_path, family, seed)
