"""Options of a load measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.backend.drafting import SWEEP
from foretoken.config import SpecConfig
from foretoken.control.queue import BATCHES, SchedulerConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import MODEL, THREADS, EngineConfig
from foretoken.errors import ConfigError, InputError
from foretoken.field_text import wholes, words
from foretoken.measure import options as shared
from foretoken.measure.load.prompts import BATCH_SLICES
from foretoken.measure.options import ALL, DEFAULT_NUMERICS, PLAIN, check_price, check_wholes, resume_option, setting
from foretoken.measure.prompts import read_prompts
from foretoken.measure.workload import MAX_PROMPTS
from foretoken.measure.write import check_result
from foretoken.option import check_fields, option, same_option
from foretoken.params import check_limits, check_share, is_count

MAX_BATCH = 4096  # each request of a batch has a cache of its own
DEFAULT_SETTINGS = (
    *("plain", "ngram-2", "ngram-5", "draft_model-2", "draft_model-5"),
    *("ngram-auto", "draft_model-auto", "auto"),
)
_PROMPT_TOKENS_PER_STEP = 4096  # all prompts of a batch in one step, so that its requests begin to decode together


@dataclass(frozen=True)
class LoadOptions:
    """What to measure under load, on which engine.

    `prompts` is a file or folder of prompts that replaces the library's. A cell answers `prompts_per_slice` requests,
    or a whole batch where that is more; prompts are cut to `prompt_tokens`.

    The engine's limits are those of `foretoken.LLM`. By default a step takes all prompts of a batch, and batch and
    cache have room for the largest one. `min_tokens_to_speculate` and `max_speculating_requests` are `RoutingRules`,
    for settings with an adaptive number of draft tokens. Under `numerics="strict"` no greedy answer may differ from
    plain's. `resume` is a file that keeps each turn; what it holds already is not measured again.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    draft: str | None = field(default=None, metadata=same_option(SpecConfig, "draft"))
    batches: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16, 32), "Batch sizes, separated by commas; each is measured on every slice.", read=wholes
    )
    slices: tuple[str, ...] = setting(
        ("code", "edit", "chat", "random"), "Kinds of text of the batches, or those of --prompts; or all.", read=words
    )
    settings: tuple[str, ...] = setting(
        DEFAULT_SETTINGS,
        "Settings, separated by commas: plain, DRAFTER-N, DRAFTER-auto, auto, auto-slices, sweep.",
        read=words,
    )
    prompts: Path | None = field(default=None, metadata=shared.PROMPTS_OPTION)
    prompt_tokens: int = setting(64, "Tokens that prompts are cut to.")
    cache_tokens: int | None = field(
        default=None,
        metadata=option(
            "Tokens that the key/value cache holds; without it, enough for the largest batch.", group=MODEL
        ),
    )
    cache_reserve: float = field(
        default=SchedulerConfig.cache_reserve, metadata=same_option(EngineConfig, "cache_reserve")
    )
    max_batch_size: int | None = field(
        default=None, metadata=option("Requests that run at once; without it, the largest batch.", group=BATCHES)
    )
    max_prompt_tokens: int = field(
        default=_PROMPT_TOKENS_PER_STEP, metadata=same_option(EngineConfig, "max_prompt_tokens")
    )
    max_step_tokens: int | None = field(default=None, metadata=same_option(EngineConfig, "max_step_tokens"))
    min_tokens_to_speculate: int = field(
        default=RoutingRules.min_tokens_to_speculate, metadata=same_option(RoutingRules, "min_tokens_to_speculate")
    )
    max_speculating_requests: int | None = field(
        default=None, metadata=same_option(RoutingRules, "max_speculating_requests")
    )
    prompts_per_slice: int = setting(2, "Prompts of each slice; at least a batch.")
    max_tokens: int = field(default=48, metadata=shared.MAX_TOKENS_OPTION)
    repeats: int = field(default=2, metadata=shared.REPEATS_OPTION)
    warmup: int = setting(1, "Warm-up turns of each setting and batch size.")
    numerics: str = field(default=DEFAULT_NUMERICS, metadata=same_option(EngineConfig, "numerics"))
    weights: str = field(default="auto", metadata=same_option(EngineConfig, "weights"))
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    threads: int | None = field(default=None, metadata=THREADS)
    price_per_hour: float | None = field(default=None, metadata=shared.PRICE_OPTION)
    out: Path | None = field(default=None, metadata=shared.OUT_OPTION)
    resume: Path | None = field(default=None, metadata=resume_option("turn", " with the same options"))
    name: str = field(default="batches", metadata=shared.NAME_OPTION)
    seed: int = field(default=0, metadata=shared.SEED_OPTION)

    def __post_init__(self) -> None:
        counts = {"prompt_tokens": (1, None), "prompts_per_slice": (1, MAX_PROMPTS), "max_tokens": (4, None)}
        check_wholes(self, **counts, repeats=(1, None), warmup=(0, None), seed=(0, 2**63))
        if not self.batches or not all(1 <= batch <= MAX_BATCH for batch in self.batches):
            raise InputError("batches", self.batches, f"give batch sizes from 1 to {MAX_BATCH}, separated by commas")
        if not self.settings:
            raise InputError("settings", self.settings, "name at least one; plain is always measured")
        check_fields(self)
        self._check_slices(self.slices)
        if not self.slices:
            raise InputError("slices", self.slices, f"give at least one of {', '.join(BATCH_SLICES)}")
        limits = {"max_prompt_tokens": self.max_prompt_tokens, "max_step_tokens": self.max_step_tokens}
        check_limits(cache_tokens=self.cache_tokens, **limits)
        if self.max_batch_size is not None:
            check_limits(max_batch_size=self.max_batch_size)
        check_share("cache_reserve", self.cache_reserve)
        self._check_routing()
        check_price(self.price_per_hour)
        check_result(self.out, self.name)

    @property
    def routing(self) -> RoutingRules:
        """When a request is decoded without drafting."""
        return RoutingRules(
            min_tokens_to_speculate=self.min_tokens_to_speculate, max_speculating_requests=self.max_speculating_requests
        )

    def _check_slices(self, names: Sequence[str]) -> None:
        """The library has prompts of these slices."""
        unknown = [name for name in names if name not in BATCH_SLICES]
        if self.prompts is None and unknown:
            raise InputError("slices", unknown[0], f"choose from {', '.join(BATCH_SLICES)}")

    def _check_routing(self) -> None:
        """Routing rules are valid, and at least one setting follows them."""
        neutral = RoutingRules()
        fixed = (name in (PLAIN, SWEEP) or is_count(name.rpartition("-")[2]) for name in self.settings)
        if self.routing == neutral or not all(fixed):
            return
        names = ("min_tokens_to_speculate", "max_speculating_requests")
        name = next(name for name in names if getattr(self, name) != getattr(neutral, name))
        remedy = (
            "applies to settings with an adaptive number of draft tokens; add one, such as ngram-auto, or leave it out"
        )
        raise ConfigError(name, getattr(self, name), remedy)


def slice_names(words: Sequence[str], prompts: Path | None) -> tuple[str, ...]:
    """The slices that `words` name; `all` means those of the file of prompts, or `BATCH_SLICES`."""
    if ALL not in words:
        return tuple(words)
    return BATCH_SLICES if prompts is None else tuple(dict.fromkeys(prompt.slice for prompt in read_prompts(prompts)))
