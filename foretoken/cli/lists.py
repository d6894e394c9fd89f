"""Options that hold several values, separated by commas."""

from __future__ import annotations

from foretoken.errors import ConfigError


def words(field: str, text: str) -> tuple[str, ...]:
    """Split a comma-separated list.

    Raises:
        ConfigError: it is empty.
    """
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ConfigError(field, text, "name at least one, several separated by commas; or leave it out")
    return found


def whole(field: str, word: str) -> int:
    """A whole number.

    Raises:
        ConfigError: something else.
    """
    try:
        return int(word)
    except ValueError:
        raise ConfigError(field, word, "must be whole numbers separated by commas") from None


def number(field: str, word: str) -> float:
    """A number.

    Raises:
        ConfigError: something else.
    """
    try:
        return float(word)
    except ValueError:
        raise ConfigError(field, word, "must be numbers separated by commas") from None
