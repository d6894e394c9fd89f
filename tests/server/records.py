"""Records of finished requests, made up."""

from __future__ import annotations

import time
from typing import Any

from foretoken.engine.stats import RequestStats, RoundCounts
from foretoken.server.record import RequestRecord


def stats_of(*rounds: RoundCounts, **fields: Any) -> dict[str, Any]:
    stats = RequestStats(**fields)
    for one in rounds:
        stats.count_round(one)
    return stats.as_dict()


def drafted(num_drafted: int, num_accepted: int, drafter: str = "ngram") -> RoundCounts:
    """A round with a chain of draft tokens."""
    depths = range(1, num_drafted + 1)
    return RoundCounts(depths, [drafter] * num_drafted, range(num_accepted), num_accepted + 1)


def record(**changes: Any) -> RequestRecord:
    """A request that was answered with speculation."""
    values: dict[str, Any] = {
        "request_id": "req-1",
        "route": "/v1/chat/completions",
        "model": "reference",
        "began_unix_s": time.time(),
        "duration_s": 0.5,
        "status": 200,
        "finish_reasons": ("stop",),
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_completion_tokens": 6,
        "ttft_s": 0.1,
        "inter_token_s": (0.01, 0.02, 0.03, 0.02, 0.02),
        "key": "alice",
        "tenant": "alice",
        "drafter": "ngram",
        "stats": (stats_of(drafted(4, 3), drafted(2, 0), draft_s=0.1, verify_s=0.3, wasted_s=0.1),),
    }
    return RequestRecord(**(values | changes))
