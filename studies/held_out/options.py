"""Options of the study of held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from foretoken.errors import InputError
from foretoken.measure.options import ALL
from foretoken.params import check_number, check_whole

FORCED, GREEDY, SAMPLED = WAYS = ("forced", "greedy", "sampled")


@dataclass(frozen=True)
class HeldOutOptions:
    """What to measure. `settings` are DRAFTER-NUMBER, as in `foretoken bench load`; `prompts` a file or folder that
    replaces the library's texts, `temperature` that of sampled answers.
    """

    target: str
    draft: str | None = None
    settings: tuple[str, ...] = ("ngram-5", "suffix-5", "recycling-5", "draft_model-5")
    slices: tuple[str, ...] = (ALL,)
    prompts: Path | None = None
    prompts_per_slice: int = 10
    max_tokens: int = 128
    ways: tuple[str, ...] = WAYS
    temperature: float = 0.8
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("prompts_per_slice", self.prompts_per_slice, low=1)
        check_whole("max_tokens", self.max_tokens, low=2)
        check_number("temperature", self.temperature, low=0.01, high=100.0)
        for way in self.ways:
            if way not in WAYS:
                raise InputError("ways", way, f"choose from {', '.join(WAYS)}")
