"""What is simulated: drafters, draft budgets and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.control.queue import SchedulerConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.option import same_option
from foretoken.params import is_count

PLAIN, AUTO = "plain", "auto"


@dataclass(frozen=True)
class SimSetting:
    """Which drafters draft (none: plain decoding) and how much (None: the policy chooses, also among drafters)."""

    drafters: tuple[str, ...] = ()
    num_draft: int | None = 0

    @property
    def name(self) -> str:
        """As rows of the bench are called: plain, ngram-5, draft_model-auto; auto for several drafters."""
        if not self.drafters:
            return PLAIN
        if len(self.drafters) > 1:
            return AUTO
        return f"{self.drafters[0]}-{AUTO if self.num_draft is None else self.num_draft}"


def parse_setting(text: str, drafters: Sequence[str] = ()) -> SimSetting:
    """The setting called `text`: plain, auto (all of `drafters`), or a drafter and a number or auto, such as ngram-5.

    Raises:
        ConfigError: none of these.
    """
    drafter, found, number = text.rpartition("-")
    if text == PLAIN:
        return SimSetting()
    if text == AUTO and drafters:
        return SimSetting(tuple(drafters), None)
    if not found or not drafter or not (number == AUTO or is_count(number)):
        raise ConfigError(
            "settings",
            text,
            f"must be {'plain, auto' if drafters else 'plain'}, or a drafter and a number or auto, such as ngram-5 or "
            "draft_model-auto",
        )
    return SimSetting((drafter,), None if number == AUTO else int(number))


@dataclass(frozen=True)
class Limits(SchedulerConfig):
    """Limits of scheduler and cache. `cache_tokens` None: more than is needed; `max_context_tokens` None: no bound."""

    cache_tokens: int | None = field(default=None, metadata=same_option(EngineConfig, "cache_tokens"))
    block_tokens: int = 32
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cache_tokens", "block_tokens", "max_context_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "must be at least 1")

    def footprint_tokens(self, num_tokens: int) -> int:
        """`num_tokens` in whole blocks."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens

    @property
    def capacity_tokens(self) -> float:
        """What all whole blocks hold."""
        return float("inf") if self.cache_tokens is None else self.cache_tokens // self.block_tokens * self.block_tokens
