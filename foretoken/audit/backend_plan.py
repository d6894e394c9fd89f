"""Options of an audit of another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.audit.plan import MAX_PROMPTS, AuditOptions
from foretoken.measure.asked import BackendSource
from foretoken.option import option, same_option
from foretoken.params import check_temperatures, check_whole


@dataclass(frozen=True)
class BackendAuditOptions:
    """The backend, what its answers are compared with, and the length of the audit.

    Greedy answers are compared with those of `against`, or with the backend's own plain ones where it is None.
    `target` is the model whose logits judge the answers, loaded here with `dtype`, `weights`, `device` and
    `cache_tokens`; None: nothing judges them. `draftings` are kinds of drafting of the backend (None: all). `num_seeds`
    answers are sampled for their first tokens alone. The others are those of `AuditOptions`.
    """

    source: BackendSource
    against: BackendSource | None = None
    target: str | None = None
    draftings: Sequence[str] | None = None
    num_draft: int = 5
    num_prompts: int = field(default=16, metadata=same_option(AuditOptions, "num_prompts"))
    max_tokens: int = field(default=128, metadata=same_option(AuditOptions, "max_tokens"))
    temperatures: tuple[float, ...] = field(default=(0.0, 0.8), metadata=same_option(AuditOptions, "temperatures"))
    seed: int = field(default=0, metadata=same_option(AuditOptions, "seed"))
    num_seeds: int = field(
        default=256, metadata=option("With --backend and --target: first tokens sampled at temperature 1.")
    )
    weights: str = field(default="auto", metadata=same_option(AuditOptions, "weights"))
    dtype: str = field(default="auto", metadata=same_option(AuditOptions, "dtype"))
    device: str = field(default="auto", metadata=same_option(AuditOptions, "device"))
    cache_tokens: int | None = field(default=None, metadata=same_option(AuditOptions, "cache_tokens"))
    alpha: float = 1e-4

    def __post_init__(self) -> None:
        check_whole("num_draft", self.num_draft, low=1, high=256)
        check_whole("num_prompts", self.num_prompts, low=1, high=MAX_PROMPTS)
        check_whole("num_seeds", self.num_seeds, low=1, high=MAX_PROMPTS)
        check_whole("max_tokens", self.max_tokens, low=2)
        check_whole("seed", self.seed, low=0, high=2**62)
        check_temperatures("temperatures", self.temperatures)

    @property
    def sampled(self) -> tuple[float, ...]:
        """Temperatures above 0, each once."""
        return tuple(dict.fromkeys(temperature for temperature in self.temperatures if temperature > 0))
