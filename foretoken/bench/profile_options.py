"""Options of `foretoken bench profile`."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.backend.drafting import DrafterChoice
from foretoken.bench.speed_options import SpeedOptions
from foretoken.option import check_fields, same_option


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure, in at most about `budget_s`: points that do not fit are left out, and a caveat says so.

    `threads=None` keeps torch's number.
    """

    target: str = field(metadata=same_option(SpeedOptions, "target"))
    draft: str | None = field(default=None, metadata=same_option(SpeedOptions, "draft"))
    drafters: tuple[DrafterChoice, ...] = field(default=(), metadata=same_option(SpeedOptions, "drafters"))
    dtype: str = field(default="auto", metadata=same_option(SpeedOptions, "dtype"))
    device: str = field(default="auto", metadata=same_option(SpeedOptions, "device"))
    threads: int | None = field(default=None, metadata=same_option(SpeedOptions, "threads"))
    budget_s: float = 45.0
    seed: int = field(default=0, metadata=same_option(SpeedOptions, "seed"))

    def __post_init__(self) -> None:
        check_fields(self)
