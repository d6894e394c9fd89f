"""What a user may set: frozen dataclasses that check themselves.

Every field is honoured exactly or refused by name. Fields that the public interface fixes but that this version does
not implement yet are refused when they are set to anything but their neutral value.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from foretoken.errors import ConfigError, InputError

DRAFTERS: tuple[str, ...] = ("draft_model", "ngram")
RULES: tuple[str, ...] = ("auto", "greedy", "rejection")

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, under the OpenAI names.

    Temperature 0 takes the most likely token (lowest id on ties). The filters apply in the order temperature, top_k,
    top_p, min_p, as in transformers. `seed=None` draws a fresh seed for each request.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif self.stop is None or isinstance(self.stop, list | tuple):
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        else:
            raise InputError("stop", self.stop, "must be a text or a list of texts")
        _whole("max_tokens", self.max_tokens, low=1)
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _whole("top_k", self.top_k, low=0)
        if self.seed is not None:
            _whole("seed", self.seed, low=0, high=2**64 - 1)
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InputError("stop", text, "each stop string must be a text of at least one character")
        self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "n": 1}
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise InputError(name, getattr(self, name), f"not supported yet; leave it at {value}")
        for name, absent in (("logit_bias", not self.logit_bias), ("logprobs", self.logprobs is None)):  # logprobs=0 asks for the token's own
            if not absent:
                raise InputError(name, getattr(self, name), "not supported yet; leave it out")

    @property
    def greedy(self) -> bool:
        """Whether the target's law is a point: the argmax."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop


@dataclass(frozen=True)
class SpecConfig:
    """Who drafts, how much, and which rule decides.

    `drafter=None` is plain decoding. `draft` is the draft model's folder or hub id. `num_draft="auto"` leaves the
    number to the engine.
    """

    drafter: str | None = None
    draft: str | None = None
    num_draft: int | Literal["auto"] = "auto"
    rule: str = "auto"
    allow_lossy: bool = False

    def __post_init__(self) -> None:
        if self.drafter is not None and self.drafter not in DRAFTERS:
            raise ConfigError("drafter", self.drafter, f"choose one of {', '.join(DRAFTERS)}, or None for plain decoding")
        if self.rule not in RULES:
            raise ConfigError("rule", self.rule, f"choose one of {', '.join(RULES)}")
        if self.num_draft != "auto":
            _whole("num_draft", self.num_draft, low=0, high=1024)
        if self.draft is not None and self.drafter != "draft_model":
            raise ConfigError("draft", self.draft, f"only drafter='draft_model' takes a draft, not drafter={self.drafter!r}")


def from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Build a config from a mapping; an unknown key is an error that names the nearest known one.

    Raises:
        ConfigError: unknown key.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(key, value, f"unknown option of {kind.__name__}; {hint}")
    return kind(**values)


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise InputError(name, value, "must be a finite number")
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InputError(name, value, f"must lie in {bracket}{low:g}, {high:g}]")


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(name, value, "must be a whole number")
    if value < low or (high is not None and value > high):
        raise InputError(name, value, f"must be at least {low}" + ("" if high is None else f" and at most {high}"))
