"""Options of `foretoken bench speed` and `foretoken bench profile`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from foretoken.backend.drafting import DrafterChoice, parse_drafters
from foretoken.backend.registry import BACKENDS, LOCAL, check_backends
from foretoken.config import NUMERICS, RULES, SpecConfig
from foretoken.engine_config import THREADS, EngineConfig
from foretoken.errors import ConfigError, InputError
from foretoken.field_text import numbers, wholes, wholes_or_auto, words
from foretoken.measure import options as shared
from foretoken.measure.options import (
    ALL,
    DEFAULT_NUMERICS,
    check_price,
    check_slo,
    check_wholes,
    resume_option,
    setting,
)
from foretoken.measure.workload import MAX_PROMPTS, SLICES
from foretoken.measure.write import check_name
from foretoken.option import check_fields, same_option
from foretoken.params import check_temperatures, check_whole

EVERY_KIND = "all"


@dataclass(frozen=True)
class SpeedOptions:
    """What to measure, and where the result is written.

    Plain decoding is always measured, as the baseline. `drafters` are names, optionally with options behind a colon
    (`backend.drafting`), or `all`. `prompts` is a file or folder that replaces the library's texts; `slices` selects
    from them. `chat` sends texts as a user's message through the target's chat template.
    `backends` are the engines that answer: `local` is ours, with `drafters`; of the others `peer_drafters` are the
    drafting methods to run, `peer_num_drafts` their numbers of draft tokens, `peer_lookup_num_drafts` those of n-gram
    lookups.
    Under each of `numerics` everything is measured, with a plain decoding of its own. `warm`: drafters keep what they
    remember from prompt to prompt, but never to a repeat of it; otherwise they are emptied before every answer.

    `out` is a folder for a dated result, `name` the end of its file name. `resume` is a file that keeps each
    answer; what it holds already is not measured again. `threads=None` keeps torch's number.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    draft: str | None = field(default=None, metadata=same_option(SpecConfig, "draft"))
    drafters: tuple[str, ...] = field(default=("draft_model", "ngram"), metadata=shared.DRAFTERS_OPTION)
    num_drafts: tuple[int | Literal["auto"], ...] = setting(
        (3, 5), "Numbers of draft tokens to measure, separated by commas; auto is one of them.", read=wholes_or_auto
    )
    rules: tuple[str, ...] = setting(
        ("auto",), f"Rules to measure, separated by commas: {', '.join(RULES)}.", name="rule", read=words
    )
    allow_lossy: bool = field(default=False, metadata=same_option(SpecConfig, "allow_lossy"))
    slices: tuple[str, ...] = field(default=(ALL,), metadata=shared.SLICES_OPTION)
    prompts: Path | None = field(default=None, metadata=shared.PROMPTS_OPTION)
    chat: bool = field(default=False, metadata=shared.CHAT_OPTION)
    prompts_per_slice: int = setting(2, "Prompts of each slice.")
    max_tokens: int = field(default=128, metadata=shared.MAX_TOKENS_OPTION)
    repeats: int = field(default=3, metadata=shared.REPEATS_OPTION)
    warmup: int = setting(1, "Warm-up answers of each setting.")
    warm: bool = setting(False, "Let drafters remember earlier prompts of a repeat; otherwise each answer is cold.")
    temperatures: tuple[float, ...] = setting((0.0, 0.8), "Temperatures, separated by commas.", read=numbers)
    stop_at_eos: bool = field(default=False, metadata=shared.STOP_AT_EOS_OPTION)
    numerics: tuple[str, ...] = setting(
        (DEFAULT_NUMERICS,),
        "default, strict (no greedy output may differ from plain), or both: default,strict.",
        read=words,
    )
    weights: str = field(default="auto", metadata=same_option(EngineConfig, "weights"))
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    threads: int | None = field(default=None, metadata=THREADS)
    backends: tuple[str, ...] = setting(
        (LOCAL,),
        f"Engines to measure, separated by commas: {', '.join(BACKENDS)}, or the address of a server. llama.cpp's "
        "programs are those in the folder that FORETOKEN_LLAMA_CPP names.",
        read=words,
    )
    peer_drafters: tuple[str, ...] = setting(
        (EVERY_KIND,),
        "Drafting methods of the other engines, by the names of their settings (lookup, ngram-mod, ...); or all.",
        read=words,
    )
    peer_num_drafts: tuple[int, ...] = setting(
        (2, 3, 4, 5, 6, 7, 8), "Numbers of draft tokens for the other engines, separated by commas.", read=wholes
    )
    peer_lookup_num_drafts: tuple[int, ...] = setting(
        (4, 8, 12, 16, 24, 32), "The same for their n-gram lookups, whose draft tokens cost nothing.", read=wholes
    )
    price_per_hour: float | None = field(default=None, metadata=shared.PRICE_OPTION)
    slo_ms: float | None = field(default=None, metadata=shared.SLO_OPTION)
    out: Path | None = field(default=None, metadata=shared.OUT_OPTION)
    resume: Path | None = field(default=None, metadata=resume_option("answer", " with the same options"))
    name: str = field(default="bench", metadata=shared.NAME_OPTION)
    seed: int = field(default=0, metadata=shared.SEED_OPTION)

    def __post_init__(self) -> None:
        counts = {"prompts_per_slice": (1, MAX_PROMPTS), "max_tokens": (2, None), "repeats": (1, None)}
        check_wholes(self, **counts, warmup=(0, None), seed=(0, 2**63))
        check_fields(self)
        check_temperatures("temperatures", self.temperatures)
        from foretoken.verify import resolve  # rules need torch, and help is printed without it

        for rule, temperature in itertools.product(self.rules, self.temperatures):
            resolve(rule, greedy=temperature == 0, seeded=True, allow_lossy=self.allow_lossy)
        if not self.slices:
            raise InputError("slices", self.slices, f"give at least one of {', '.join(SLICES)}, or {ALL}")
        if self.drafters and not self.num_drafts:
            raise InputError("num_drafts", self.num_drafts, "give at least one number of tokens to draft, or 'auto'")
        for name in ("num_drafts", "peer_num_drafts", "peer_lookup_num_drafts"):
            for number in getattr(self, name):
                if number != "auto" or name != "num_drafts":
                    check_whole(name, number, low=1, high=1024)
        for choice in self.choices:
            if choice.required and "draft" in choice.needs and self.draft is None:
                remedy = (
                    f"drafter {choice.name} needs a draft; give its folder, or leave {choice.name} out of the drafters"
                )
                raise ConfigError("draft", None, remedy)
        if not self.numerics or not set(self.numerics) <= set(NUMERICS):
            raise InputError("numerics", ",".join(self.numerics), f"choose from {', '.join(NUMERICS)}")
        if self.warm and self.resume is not None:
            remedy = "what warm drafters remember is not kept; leave one of them out"
            raise InputError("resume", str(self.resume), remedy)
        check_backends(self.backends)
        check_price(self.price_per_hour)
        check_slo(self.slo_ms, self.price_per_hour is not None)
        check_name(self.name)

    @property
    def choices(self) -> tuple[DrafterChoice, ...]:
        """The drafters to measure."""
        return parse_drafters(self.drafters)

    @property
    def num_threads(self) -> int:
        """Threads that every engine of the run gets."""
        import torch

        return self.threads if self.threads is not None else torch.get_num_threads()


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure, in at most about `budget_s`: points that do not fit are left out, and a caveat says so.

    `threads=None` keeps torch's number.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    draft: str | None = field(default=None, metadata=same_option(SpecConfig, "draft"))
    drafters: tuple[DrafterChoice, ...] = field(default=(), metadata=shared.DRAFTERS_OPTION)
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    threads: int | None = field(default=None, metadata=THREADS)
    budget_s: float = 45.0
    seed: int = field(default=0, metadata=shared.SEED_OPTION)

    def __post_init__(self) -> None:
        check_fields(self)
