"""A clock that tells nonsense: what is chosen by measured times then differs from run to run."""

from __future__ import annotations

import time

import numpy as np
import pytest


def jitter(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Let `time.perf_counter` run on by anything between a microsecond and a second from one reading to the next."""
    rng, now = np.random.default_rng(seed), [time.perf_counter()]

    def reading() -> float:
        now[0] += 10.0 ** rng.uniform(-6, 0)
        return now[0]

    patch.setattr(time, "perf_counter", reading)
