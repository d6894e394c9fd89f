"""What tokens cost on a machine that is paid by the hour."""

from __future__ import annotations

_SECONDS_PER_HOUR = 3600.0


def million_price(price_per_hour: float, seconds_per_token: float) -> float:
    """The price of a million tokens that take so long each."""
    return price_per_hour / _SECONDS_PER_HOUR * seconds_per_token * 1e6
