"""The arithmetic of the study of Ray Serve; the servers themselves run in it."""

from __future__ import annotations

import pytest

from studies.ray_overhead import compared


def test_a_share_is_of_medians() -> None:
    turns = {
        "serve": [{"tokens_per_s": speed, "address_s": 1.0} for speed in (100.0, 10.0, 110.0)],
        "ray": [{"tokens_per_s": speed, "address_s": 9.0} for speed in (95.0, 90.0, 500.0)],
    }
    found = compared(turns)
    assert found["median"]["serve"] == {"tokens_per_s": 100.0, "address_s": 1.0}
    assert found["share"] == pytest.approx(0.95)
