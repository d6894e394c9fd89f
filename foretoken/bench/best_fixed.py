"""The best fixed setting of a run: what an adaptive setting is compared with.

It is chosen after the run among all settings whose number of draft tokens does not change, plain decoding among them.
Chosen from the same noisy figures, it is a little too fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

_Setting = TypeVar("_Setting")


def best_fixed(
    settings: Iterable[_Setting], adapts: Callable[[_Setting], bool], speed: Callable[[_Setting], float]
) -> _Setting | None:
    """The fastest of the settings that do not adapt, the first of equal ones; None where all adapt."""
    return max((setting for setting in settings if not adapts(setting)), key=speed, default=None)
