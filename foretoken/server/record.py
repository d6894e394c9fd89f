"""`RequestRecord`: what is known of a finished HTTP request: the one source of logs, metrics and history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class RequestRecord:
    """Figures of one request, never its texts. Times in seconds; `began_unix_s` is wall-clock time.

    `stats` has `RequestStats.as_dict()` of every answer that ended, in order of its index. `status` is the HTTP code
    that was sent, 499 where the client left. `reason` says why it did not succeed: "client", "slow_consumer",
    "queue_deadline", "error" or a rejection; "" if it did. `key` is the name of the API key, never the key.
    `accepted_prediction_tokens` and `rejected_prediction_tokens` are None without a prediction.
    """

    request_id: str
    route: str
    model: str
    began_unix_s: float
    duration_s: float
    status: int
    reason: str = ""
    is_stream: bool = False
    finish_reasons: tuple[str, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    ttft_s: float | None = None
    inter_token_s: tuple[float, ...] = ()  # gaps between pieces, per token
    key: str = ""
    tenant: str = ""
    slice: str = ""
    drafter: str = ""
    stats: tuple[Mapping[str, Any], ...] = ()
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters for traces, by OpenTelemetry name


class RequestObserver(Protocol):
    """Takes in finished requests. Must return at once; what it raises is logged and dropped."""

    def finished(self, record: RequestRecord) -> None:
        """A request ended, however it did."""
