"""What tokens cost on a machine that is paid by the hour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foretoken.measure.report import Table

NEVER = "never in time"
_SECONDS_PER_HOUR = 3600.0


def million_price(price_per_hour: float, seconds_per_token: float) -> float:
    """The price of a million tokens that take so long each."""
    return price_per_hour / _SECONDS_PER_HOUR * seconds_per_token * 1e6


def counted_tokens(num_tokens: int, between_s: float | None, slo_ms: float | None) -> int:
    """The tokens of an answer that a price is divided among: none where `between_s`, the mean time between two of them,
    is longer than `slo_ms` allows. An answer without such a time is within it.
    """
    return 0 if slo_ms is not None and between_s is not None and 1e3 * between_s > slo_ms else num_tokens


@dataclass(frozen=True)
class PriceRow:
    """What a million tokens cost under one setting; `tokens_per_s` counts whole requests, their prompts included. The
    price is None where no answer came in time.

    `place` is the kind of text, or the load, on which settings are compared. `change` is the relative difference to the
    price of plain decoding there; None where plain was not measured.
    """

    place: str
    setting: str
    tokens_per_s: float
    price_per_million_tokens: float | None
    change: float | None


def price_rows(
    price_per_hour: float | None, measured: Iterable[tuple[str, str, float | None]], plain: str | None = None
) -> tuple[PriceRow, ...]:
    """Prices of (place, setting, tokens per second); none without a price, or where the speed is not known.

    `plain` is the setting that others are compared with at the same place.
    """
    if price_per_hour is None:
        return ()
    known = [(place, setting, speed) for place, setting, speed in measured if speed is not None]
    base = {place: speed for place, setting, speed in known if setting == plain and speed}
    found = []
    for place, setting, speed in known:
        price = million_price(price_per_hour, 1 / speed) if speed else None
        change = base[place] / speed - 1 if speed and place in base and setting != plain else None
        found.append(PriceRow(place, setting, speed, price, change))
    return tuple(found)


def price_tables(rows: Iterable[PriceRow], heading: str, note: str, slo_ms: float | None = None) -> tuple[Table, ...]:
    """The table of the prices, none without rows; `heading` says what a place is, `note` what is counted."""
    if slo_ms is not None:
        note += f" Answers with more than {slo_ms:g} ms between two tokens are paid for, and their tokens not counted."
    lines = tuple(
        (
            row.place,
            row.setting,
            f"{row.tokens_per_s:.4g}",
            NEVER if row.price_per_million_tokens is None else f"{row.price_per_million_tokens:.3g}",
            "" if row.change is None else f"{row.change:+.0%}",
        )
        for row in rows
    )
    headings = (heading, "setting", "tokens/s", "per 1M tokens", "against plain")
    return (Table("Price", headings, lines, (note,), justify="ll"),) if lines else ()
