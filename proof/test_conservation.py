"""Ten thousand random requests through one engine; the tests send a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_conservation import check_many_requests, folders

__all__ = ["folders"]  # a fixture
NUM_REQUESTS = [3_000, pytest.param(10_000, marks=pytest.mark.release)]


@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
def test_ten_thousand_requests(folders: dict[str, Path], tmp_path: Path, num_requests: int) -> None:
    check_many_requests(folders, tmp_path, num_requests)
