"""What the tests of other engines share: one server of vLLM without speculation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foretoken.model.names import model_folder
from peers.starting import started


@pytest.fixture(scope="session")
def plain_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """vLLM without speculation."""
    with started(
        ["vllm", "serve", str(model_folder("reference:target"))], tmp_path_factory.mktemp("plain") / "log"
    ) as url:
        yield url
