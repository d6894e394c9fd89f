"""Parameters of a test of which the usual run takes some."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_of(values: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """All values in their order, a tuple for several arguments; those that are not `usual` are left to `make proof`."""
    values = list(values)
    assert set(usual) <= set(values), "a usual value is none of the values"
    rest = {
        value: pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.repeated)
        for value in values
        if value not in usual
    }
    return [rest.get(value, value) for value in values]
