"""`ApiConfig`: what the operator may set of the HTTP API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foretoken.config import SpecConfig
from foretoken.errors import ConfigError
from foretoken.params import check_flag, check_limits, check_number

MetricsLevel = Literal["none", "summary", "detailed"]
METRICS_LEVELS: tuple[str, ...] = ("none", "summary", "detailed")


@dataclass(frozen=True)
class ApiConfig:
    """Limits and defaults of the HTTP API.

    - `strict`: unknown fields of a request are refused instead of ignored.
    - `max_prompts`: prompts of one request (vLLM's number). `max_choices`: `n`. `max_stop_strings`: as OpenAI.
    - `max_text_chars`: of one stop string. `max_bad_words` entries and `max_bad_word_tokens` tokens of all (vLLM's).
    - `max_logit_bias`: entries of `logit_bias`. `max_logprobs`: alternatives for each token (OpenAI's 20).
    - `max_prompt_logprobs`: prompt tokens times alternatives that one response lists, so that its size is bounded.
    - `max_request_tokens`: answers times `max_tokens` of one request. `max_pending_tokens`: the same over all requests
      that run or wait (None: not limited, the queue's length is).
    - `default_max_tokens`: of a chat request that names none (None: up to the end of the context).
    - `first_token_timeout_s`: longest time in the queue and with the prompt; `request_timeout_s`: longest time in all.
    - `ping_s`: a comment is sent on a stream that was silent for so long, so that no proxy closes it.
    - `granularity`: when a stream's events are sent: "step" (one for each verification), "token", "interval:50" (ms).
    - `stream_buffer_bytes`: unread events after which a slow client is dropped.
    - `obfuscation`: pad the events of streams that do not say whether they want it; `force_obfuscation`: of all.
    - `obfuscation_bucket_bytes`: events are padded to a multiple of it; one verification's tokens fit.
    - `request_metrics`: what `metrics` in responses has. `retry_after_s`: told to clients that are refused for now.
    - `specs`: settings that a request may choose by naming their drafter, beside the default and the lookups.
    - `allow_lossy`: requests may name a rule that changes the target's distribution.
    - `predictions`: `prediction` is drafted; without it such requests are answered without.
    """

    strict: bool = False
    max_prompts: int = 1024
    max_choices: int = 128
    max_stop_strings: int = 4
    max_text_chars: int = 1024
    max_bad_words: int = 128
    max_bad_word_tokens: int = 1024
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    max_prompt_logprobs: int = 100_000
    max_request_tokens: int = 1 << 20
    max_pending_tokens: int | None = None
    default_max_tokens: int | None = None
    first_token_timeout_s: float = 300.0
    request_timeout_s: float = 3600.0
    ping_s: float = 15.0
    granularity: str = "step"
    stream_buffer_bytes: int = 1 << 20
    obfuscation: bool = False
    force_obfuscation: bool = False
    obfuscation_bucket_bytes: int = 2048
    request_metrics: MetricsLevel = "summary"
    retry_after_s: int = 1
    specs: Sequence[SpecConfig] = ()
    allow_lossy: bool = False
    predictions: bool = True

    def __post_init__(self) -> None:
        limits = [name for name, kind in self.__annotations__.items() if kind == "int"]
        check_limits(**{name: getattr(self, name) for name in limits})
        for name in ("max_pending_tokens", "default_max_tokens"):
            if getattr(self, name) is not None:
                check_limits(**{name: getattr(self, name)})
        for name in ("first_token_timeout_s", "request_timeout_s", "ping_s"):
            check_number(name, getattr(self, name), 0.0, 1e9, open_low=True)
        for name in ("strict", "obfuscation", "force_obfuscation", "allow_lossy", "predictions"):
            check_flag(name, getattr(self, name))
        if self.request_metrics not in METRICS_LEVELS:
            raise ConfigError("request_metrics", self.request_metrics, f"choose one of {', '.join(METRICS_LEVELS)}")
        if any(spec.drafter is None for spec in self.specs):
            raise ConfigError("specs", None, "each must name a drafter; plain decoding can always be asked for")
        _ = self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds between the events of a stream; 0: none, an event for each step or token.

        Raises:
            ConfigError: `granularity` is none of the three.
        """
        if self.granularity in ("step", "token"):
            return 0.0
        kind, _, number = self.granularity.partition(":")
        if kind != "interval" or not number.isdecimal() or not 1 <= int(number[:9]) <= 60_000:
            raise ConfigError(
                "granularity", self.granularity, "choose step, token or interval:MS with MS from 1 to 60000"
            )
        return int(number) / 1000
