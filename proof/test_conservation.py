"""Ten thousand random requests through one engine; the tests send a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_conservation import check_many_requests, folders

__all__ = ["folders"]  # a fixture


@pytest.mark.release
def test_ten_thousand_requests(folders: dict[str, Path], tmp_path: Path) -> None:
    check_many_requests(folders, tmp_path, 10_000)
