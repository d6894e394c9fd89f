"""The request log: one line per finished request, of figures alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from foretoken.server.observe.background import FiguresWriter
from foretoken.server.observe.config import LogFormat
from foretoken.server.observe.figures import RequestFigures


class RequestLog(FiguresWriter):
    """A line of every request, on `stream`."""

    def __init__(self, log_format: LogFormat, stream: TextIO | None = None) -> None:
        self._write_line = json_line if log_format == "json" else text_line
        self._stream = sys.stderr if stream is None else stream
        super().__init__("foretoken-request-log")

    def _write(self, batch: Sequence[RequestFigures]) -> int:
        if not batch:
            return 0
        try:
            self._stream.write("".join(f"{self._write_line(figures)}\n" for figures in batch))
            self._stream.flush()
        except (OSError, ValueError):  # a ValueError is a closed stream
            return len(batch)
        return 0


def text_line(figures: RequestFigures) -> str:
    """`id=... route=... status=200 tokens=12+34 ttft_ms=8.1 tokens_per_s=55.1 ...`, without what is not known."""
    return " ".join(f"{name}={_shown(value)}" for name, value in _values(figures).items() if value not in (None, ""))


def json_line(figures: RequestFigures) -> str:
    """The same values as one JSON object."""
    return json.dumps(_values(figures))


def _values(figures: RequestFigures) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(figures.began_unix_s)),
        "id": figures.request_id,
        "route": figures.route,
        "status": figures.status,
        "reason": figures.reason,
        "key": figures.key,
        "prompt_tokens": figures.num_prompt_tokens,
        "cached_tokens": figures.num_cached_tokens,
        "tokens": figures.num_completion_tokens,
        "finish": figures.finish_reason,
        "duration_s": _rounded(figures.duration_s),
        "ttft_s": _rounded(figures.ttft_s),
        "tokens_per_s": _rounded(figures.tokens_per_s),
        "drafter": figures.drafter,
        "acceptance": _rounded(figures.acceptance_rate),
        "speedup": _rounded(figures.estimated_speedup),
        "why_plain": figures.why_plain,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
