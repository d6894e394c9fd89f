"""Parameters of a test of which the usual run takes some."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_of(
    values: Iterable[Any], usual: Collection[Any], rest: pytest.MarkDecorator = pytest.mark.repeated
) -> list[Any]:
    """All values in their order, a tuple for several arguments; those that are not `usual` are marked `rest`: left to
    `make proof`, or with `pytest.mark.release`, in proof/, to `make proof-release`.
    """
    values = list(values)
    assert set(usual) <= set(values), "a usual value is none of the values"
    marked = {
        value: pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=rest)
        for value in values
        if value not in usual
    }
    return [marked.get(value, value) for value in values]
