"""Ten thousand random requests through one engine; the tests send a thousand."""

from __future__ import annotations

from pathlib import Path

from tests.engine.test_conservation import check_many_requests, folders

__all__ = ["folders"]  # a fixture
NUM_REQUESTS = 10_000


def test_ten_thousand_requests(folders: dict[str, Path], tmp_path: Path) -> None:
    check_many_requests(folders, tmp_path, NUM_REQUESTS)
