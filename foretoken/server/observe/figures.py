"""The figures of a finished request that history, log and traces share: sums over its answers, never texts."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.server.record import RequestRecord

_MAX_NAME_CHARS = 64
MAX_PLACES = 16
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9._:/-]{{1,{_MAX_NAME_CHARS}}}")


@dataclass(frozen=True)
class RequestFigures:
    """One request; counts and seconds are sums over its answers. None: not known or not defined.

    `request_id` and `slice` are names that clients choose: anything but a short plain name is replaced by its hash.
    """

    request_id: str
    route: str
    model: str
    began_unix_s: float
    duration_s: float
    status: int
    reason: str
    is_stream: bool
    finish_reason: str
    key: str
    slice: str
    drafter: str
    rule: str
    why_plain: str
    num_answers: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_steps: int
    num_drafts: int
    num_drafted: int
    num_accepted: int
    num_rejected: int
    ttft_s: float | None
    inter_token_s: float | None
    inter_token_p99_s: float | None
    tokens_per_s: float | None
    queued_s: float | None
    draft_s: float
    verify_s: float
    prompt_s: float
    wasted_s: float
    estimated_speedup: float | None
    places: tuple[tuple[int, int], ...] = ()  # (drafted, accepted) by place in the draft

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


def figures_of(record: RequestRecord) -> RequestFigures:
    """The figures of a record."""

    def total(name: str) -> Any:  # noqa: ANN401 - a count or seconds
        return sum(stats[name] for stats in record.stats)

    gaps = sorted(record.inter_token_s)
    speedups = [one for stats in record.stats if (one := stats["estimated_speedup"]) is not None]
    decoding_s = sum(gaps)
    return RequestFigures(
        request_id=plain_name(record.request_id),
        route=record.route,
        model=record.model,
        began_unix_s=record.began_unix_s,
        duration_s=record.duration_s,
        status=record.status,
        reason=record.reason,
        is_stream=record.is_stream,
        finish_reason=",".join(sorted(set(record.finish_reasons))),
        key=record.key,
        slice=plain_name(record.slice),
        drafter=record.drafter,
        rule=str(record.stats[0]["rule"]) if record.stats else "",
        why_plain=why_plain(record) or "",
        num_answers=len(record.stats),
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_completion_tokens=record.num_completion_tokens,
        num_steps=total("num_steps"),
        num_drafts=total("num_drafts"),
        num_drafted=total("num_drafted"),
        num_accepted=total("num_accepted"),
        num_rejected=total("num_rejected"),
        ttft_s=record.ttft_s,
        inter_token_s=decoding_s / len(gaps) if gaps else None,
        inter_token_p99_s=quantile(gaps, 0.99),
        tokens_per_s=len(gaps) / decoding_s if decoding_s > 0 else None,
        queued_s=max((stats["queued_s"] for stats in record.stats), default=None),
        draft_s=total("draft_s"),
        verify_s=total("verify_s"),
        prompt_s=total("prompt_s"),
        wasted_s=total("wasted_s"),
        estimated_speedup=sum(speedups) / len(speedups) if speedups else None,
        places=added_places(*(stats["accepted_per_position"] for stats in record.stats)),
    )


def added_places(*every: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """(drafted, accepted) by place in the draft, summed; beyond `MAX_PLACES` nothing is kept."""
    length = min(MAX_PLACES, max(map(len, every), default=0))
    own = [[one[place] for one in every if place < len(one)] for place in range(length)]
    return tuple((sum(drafted for drafted, _ in pairs), sum(accepted for _, accepted in pairs)) for pairs in own)


def why_plain(record: RequestRecord) -> str | None:
    """Why nothing was drafted for an answered request, from a closed set; None where something was drafted, or nothing
    answered.

    "off": no drafter was asked for. "drafter_disabled", "drafter_failed": it failed. "too_short": no step decoded
    beyond the first token. "nothing_proposed": the controller found that drafting does not pay, or lookups found
    nothing.
    """
    if not record.stats or any(stats["num_drafted"] for stats in record.stats):
        return None
    if not record.drafter:
        return "off"
    if any(stats["disabled_drafters"] for stats in record.stats):
        return "drafter_disabled"
    if any(stats["draft_failures"] for stats in record.stats):
        return "drafter_failed"
    if record.num_completion_tokens <= len(record.stats):
        return "too_short"
    return "nothing_proposed"


def plain_name(text: str) -> str:
    """A short plain name as it is; anything else as the beginning of its SHA-256, so that no text gets into files."""
    if not text or _PLAIN_NAME.fullmatch(text):
        return text
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest of the `ordered` values that at least `share` of them do not exceed; None without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None
