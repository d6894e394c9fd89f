"""Every step of the simulator is the engine's, for more arrivals than the tests take."""

from __future__ import annotations

import pytest

from foretoken.draft.ngram import NgramDrafter
from foretoken.simulate.inputs import Limits, SimSetting
from tests.simulate import test_simulate as plain
from tests.simulate import test_simulate_previews as previews


@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("setting", plain.STEPPED, ids=lambda s: s.name)
@pytest.mark.parametrize("limits", plain.LIMITS.values(), ids=plain.LIMITS)
def test_every_step_is_the_engines(seed: int, setting: SimSetting, limits: Limits) -> None:
    plain.compare(plain.CURVED, plain.mixed_jobs(12, seed), setting, limits)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("preview_s", previews.PREVIEWS_S.values(), ids=previews.PREVIEWS_S)
@pytest.mark.parametrize("setting", previews.STEPPED, ids=lambda s: s.name)
@pytest.mark.parametrize("limits", previews.LIMITS.values(), ids=previews.LIMITS)
def test_every_step_with_previews_is_the_engines(
    seed: int, setting: SimSetting, limits: Limits, preview_s: float
) -> None:
    previews.compare(NgramDrafter(), plain.mixed_jobs(14, seed), setting, limits, preview_s)
