"""`ObserveConfig`: what is measured, logged and kept of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foretoken.engine_config import OBSERVATION
from foretoken.errors import ConfigError
from foretoken.option import Settings, check_fields
from foretoken.params import check_flag, check_number, check_whole

LogFormat = Literal["text", "json", "none"]
LOG_FORMATS: tuple[str, ...] = ("text", "json", "none")
MIB = 1 << 20

_setting = Settings(OBSERVATION)


@dataclass(frozen=True)
class ObserveConfig:
    """Metrics, history, request log and traces. Other `slices` count as "other", since clients choose them; `tracing`
    needs the extra `otel`.
    """

    metrics_alias: str | None = _setting(None, "vllm: also expose the metrics that vLLM has, under its names.")
    # Several scrapers at once ask the engine once.
    stats_max_age_s: float = _setting(0.25, "Scrapes within this many seconds return the same counters.")
    slices: tuple[str, ...] = _setting(
        (), "A slice of requests that gets its own label in metrics; may be given several times.", repeats=True
    )
    history: str | None = _setting(None, "A SQLite file for the figures of finished requests, never their texts.")
    history_max_age_days: float = _setting(90.0, "Days that a request stays in the history.")
    # About a million requests.
    history_max_bytes: int = _setting(256 * MIB, "Largest size of the history file.")
    request_log: LogFormat = _setting("text", "One line per request on standard error: {choices}.", choices=LOG_FORMATS)  # noqa: RUF009
    tracing: bool = _setting(False, "Send OpenTelemetry traces and metrics, as the OTEL_* variables say.")

    def __post_init__(self) -> None:
        if self.metrics_alias not in (None, "vllm"):
            raise ConfigError("metrics_alias", self.metrics_alias, "choose vllm, or leave it out")
        check_fields(self)
        slices: Sequence[str] = self.slices
        if isinstance(slices, str) or not all(isinstance(one, str) for one in slices):
            raise ConfigError("slices", slices, "must be a list of names")
        object.__setattr__(self, "slices", tuple(slices))
        check_number("stats_max_age_s", self.stats_max_age_s, low=0.0, high=3600.0)
        check_number("history_max_age_days", self.history_max_age_days, low=0.0, high=36_500.0, open_low=True)
        check_whole("history_max_bytes", self.history_max_bytes, low=MIB)
        check_flag("tracing", self.tracing)
