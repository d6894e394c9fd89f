"""No kind of drafting lowers what the target finds in its prefix cache; the tests take one of each shape of draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.kv.prefix import PrefixStats
from tests.engine.test_draft_prefix import ALIKE, check_hit_rate, folders, plain_traffic, pytestmark

__all__ = ["folders", "plain_traffic", "pytestmark"]  # fixtures, and warnings that are meant


@pytest.mark.parametrize("name", ALIKE)
def test_speculation_never_lowers_the_hit_rate(
    folders: dict[str, Path], name: str, plain_traffic: tuple[list[list[int]], PrefixStats]
) -> None:
    check_hit_rate(folders, name, plain_traffic)
