"""C8: a cache that no memory could hold is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import foretoken.model.open
from foretoken import LLM
from foretoken.errors import CapacityError, InputError
from foretoken.kv.limit import largest_cache_bytes
from foretoken.kv.pool import KVPool
from foretoken.model.open import open_model
from tests.helpers.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("tokens", [10**14, 2**63, 10**30])
def test_c8_an_absurd_cache_is_refused_with_the_largest_possible(llama: Path, tokens: int) -> None:
    most = (largest_cache_bytes(torch.device("cpu")) or 0) // (2 * 3 * 2 * 12 * 4)
    with pytest.raises(
        InputError,
        match=rf"cache_tokens=.*a token takes 576 bytes, and the memory of this machine .* at most {most:,} of them",
    ):
        LLM(llama, cache_tokens=tokens)


def test_c8_the_limit_itself_is_allowed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foretoken.model.open, "largest_cache_bytes", lambda _device: 64 * 576 + 575)
    assert open_model(llama, "float32", "cpu", cache_tokens=64).capacity_tokens == 64
    with pytest.raises(InputError, match="at most 64 of them"):
        open_model(llama, "float32", "cpu", cache_tokens=65)
    assert open_model(llama, "float32", "cpu").capacity_tokens == 32  # the default is at most half of it


def test_c8_where_the_system_says_nothing_the_size_is_taken(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foretoken.model.open, "largest_cache_bytes", lambda _device: None)
    assert open_model(llama, "float32", "cpu", cache_tokens=96).capacity_tokens == 96


def test_c8_memory_that_runs_out_all_the_same_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", refuse)
    with pytest.raises(
        CapacityError, match=r"no memory for a cache of 1,048,576 tokens \(2\.0 GiB\); give a smaller cache_tokens"
    ):
        KVPool(2, 2, 1 << 20, 64, torch.float32, torch.device("cpu"))
