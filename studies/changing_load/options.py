"""What to measure on a load that changes."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.errors import InputError
from foretoken.measure.load.options import MAX_BATCH, LoadOptions
from foretoken.params import check_number, is_count


@dataclass(frozen=True)
class LoadPhase:
    """A part of a changing load: a number of concurrent requests, and their slice."""

    batch: int
    slice: str


MIXED = (
    LoadPhase(1, "code"),
    LoadPhase(16, "random"),
    LoadPhase(4, "edit"),
    LoadPhase(32, "chat"),
    LoadPhase(2, "json"),
)


def parse_phases(text: str) -> tuple[LoadPhase, ...]:
    """The phases of a load written as 1:code,16:random; `mixed` names the built-in one.

    Raises:
        InputError: anything else.
    """
    if text == "mixed":
        return MIXED
    pairs = [part.strip().partition(":") for part in text.split(",") if part.strip()]
    if not pairs or not all(is_count(batch) and int(batch) and slice_ for batch, _, slice_ in pairs):
        raise InputError("load", text, "must be mixed, or BATCH:SLICE separated by commas, such as 1:code,16:random")
    return tuple(LoadPhase(int(batch), slice_) for batch, _, slice_ in pairs)


@dataclass(frozen=True)
class ChangingLoadOptions(LoadOptions):
    """A load measurement with `phases` in place of batches and slices.

    Each phase has as many requests as plain decoding answers in `phase_s` seconds.
    """

    phases: tuple[LoadPhase, ...] = MIXED
    phase_s: float = 4.0
    name: str = "load"

    def __post_init__(self) -> None:
        super().__post_init__()
        most = max(phase.batch for phase in self.phases)
        if most > MAX_BATCH:
            raise InputError("load", most, f"at most {MAX_BATCH} requests at a time")
        self._check_slices([phase.slice for phase in self.phases])
        check_number("phase_s", self.phase_s, low=0.0, high=1e6, open_low=True)
