"""`ApiConfig`: what the operator may set of the HTTP API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foretoken.config import SpecConfig
from foretoken.errors import ConfigError
from foretoken.option import Settings, check_fields
from foretoken.params import TEMPERATURES, check_flag, check_limits, check_number, check_whole

MetricsLevel = Literal["none", "summary", "detailed"]
METRICS_LEVELS: tuple[str, ...] = ("none", "summary", "detailed")
SAMPLING_DEFAULTS = ("model", "openai")

_setting = Settings("Requests")


@dataclass(frozen=True)
class ApiConfig:
    """Limits and defaults of the HTTP API. Beside what the options say:

    - `max_prompts`, `max_bad_words`, `max_bad_word_tokens` are vLLM's, `max_stop_strings`, `max_logprobs` OpenAI's.
    - `max_pending_tokens` (None: not limited, the queue's length is): a length that nobody named is cut to it and to
      `max_request_tokens`, and counts in full until the answer ends: set `default_max_tokens` beside it.
    - `first_token_timeout_s`: with the time for the prompt. `ping_s`: so that no proxy closes a silent stream.
    - `granularity`: "step" is one event for each verification, whose tokens fit into `obfuscation_bucket_bytes`.
    - `specs`: settings that a request may choose by naming their drafter, beside the default and the lookups.
    - `allow_lossy`: requests may name a rule that changes the target's distribution.
    - `sampling_defaults`: of requests that name neither a temperature nor another of `params.ADVISED_FIELDS`.
    - `llama_cpp`: llama.cpp's own routes, and OpenAI's without `/v1`.
    """

    strict: bool = _setting(False, "Refuse unknown fields of a request instead of ignoring them.")
    max_prompts: int = _setting(1024, "Most prompts of one request.")
    max_choices: int = _setting(128, "Largest n of a request.")
    max_stop_strings: int = _setting(4, "Most stop strings of a request.")
    max_text_chars: int = _setting(1024, "Longest stop string, in characters.")
    max_bad_words: int = _setting(128, "Most bad_words of a request.")
    max_bad_word_tokens: int = _setting(1024, "Most tokens of all bad_words of a request.")
    max_logit_bias: int = _setting(1024, "Most entries of logit_bias.")
    max_logprobs: int = _setting(20, "Most alternatives listed for each token.")
    max_prompt_logprobs: int = _setting(100_000, "Most prompt tokens times alternatives in one response.")
    max_request_tokens: int = _setting(1 << 20, "Most answers times max_tokens of one request.")
    max_pending_tokens: int | None = _setting(
        None, "The same over all requests that run or wait; without it, no limit."
    )
    default_max_tokens: int | None = _setting(
        None, "Longest answer of a chat request that sets no length; without it, up to the end of the context."
    )
    default_temperature: float | None = _setting(
        None, "Temperature of requests that set none; without it, that of --sampling-defaults."
    )
    default_seed: int | None = _setting(
        None, "Seed of requests that set none, so that equal requests get equal answers."
    )
    first_token_timeout_s: float = _setting(300.0, "Seconds until the first token, including the time in the queue.")
    request_timeout_s: float = _setting(3600.0, "Seconds for a whole request.")
    ping_s: float = _setting(15.0, "Seconds without an event after which a stream sends a comment.")
    granularity: str = _setting("step", "When a stream's events are sent: step, token, or interval:MS.")
    stream_buffer_bytes: int = _setting(1 << 20, "Unread bytes after which a slow client is dropped.")
    obfuscation: bool = _setting(
        False, "Pad the events of streams that leave it open; on where other machines can reach the address."
    )
    force_obfuscation: bool = _setting(False, "Pad the events of every stream.")
    obfuscation_bucket_bytes: int = _setting(2048, "Padded events have a multiple of this size.")
    request_metrics: MetricsLevel = _setting(  # noqa: RUF009
        "summary", "Content of the field metrics of a response: {choices}.", choices=METRICS_LEVELS
    )
    retry_after_s: int = _setting(1, "Seconds that refused clients should wait.")
    specs: Sequence[SpecConfig] = ()
    allow_lossy: bool = False
    predictions: bool = _setting(True, "Draft from the prediction of requests that have one.")
    sampling_defaults: str = _setting(
        "model",
        "Sampling of requests that set none: model, what the checkpoint recommends; openai, temperature 1.",
        choices=SAMPLING_DEFAULTS,
    )
    ollama: bool = _setting(False, "Also offer Ollama's interface, under /api.")
    llama_cpp: bool = _setting(False, "Also offer llama.cpp's interface, and accept any model name, as llama.cpp does.")
    metrics: bool = _setting(True, "Offer /metrics.")
    slots: bool = _setting(True, "Offer /slots of llama.cpp's interface.")

    def __post_init__(self) -> None:
        limits = [name for name, kind in self.__annotations__.items() if kind == "int"]
        check_limits(**{name: getattr(self, name) for name in limits})
        for name in ("max_pending_tokens", "default_max_tokens"):
            if getattr(self, name) is not None:
                check_limits(**{name: getattr(self, name)})
        if self.default_temperature is not None:
            check_number("default_temperature", self.default_temperature, *TEMPERATURES)
        if self.default_seed is not None:
            check_whole("default_seed", self.default_seed, low=0, high=2**64 - 1)
        for name in ("first_token_timeout_s", "request_timeout_s", "ping_s"):
            check_number(name, getattr(self, name), 0.0, 1e9, open_low=True)
        for name in [name for name, kind in self.__annotations__.items() if kind == "bool"]:
            check_flag(name, getattr(self, name))
        check_fields(self)
        if any(spec.drafter is None for spec in self.specs):
            raise ConfigError("specs", None, "each must name a drafter; plain decoding can always be asked for")
        _ = self.interval_s

    @property
    def interval_s(self) -> float:
        """Seconds between the events of a stream; 0: none.

        Raises:
            ConfigError: `granularity` is none of the three.
        """
        if self.granularity in ("step", "token"):
            return 0.0
        kind, _, number = self.granularity.partition(":")
        if kind != "interval" or not number.isdecimal() or not 1 <= int(number[:9]) <= 60_000:
            remedy = "choose step, token or interval:MS with MS from 1 to 60000"
            raise ConfigError("granularity", self.granularity, remedy)
        return int(number) / 1000
