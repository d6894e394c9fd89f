"""C8: a cache that no memory could hold is refused before anything is allocated."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
import torch

import foretoken.model.open
from foretoken import LLM
from foretoken.errors import CapacityError, InputError
from foretoken.kv.pool import KVPool, largest_cache_bytes
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
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(
        CapacityError, match=r"no memory for a cache of 1,048,576 tokens \(2\.0 GiB\); give a smaller cache_tokens"
    ):
        KVPool(2, 2, 1 << 20, 64, torch.float32, torch.device("cpu"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux")
def test_a_token_takes_the_memory_of_its_slots_and_not_of_large_pages() -> None:
    pool = KVPool(4, 16, 1 << 14, 64, torch.float32, torch.device("cpu"))  # 4 MB for each head of a layer
    keys = torch.ones(1, 16, 64)
    before = _resident_bytes()
    for layer in range(4):
        pool.write(layer, torch.tensor([5]), keys, keys)
    assert _resident_bytes() - before < 16 * 2**20  # a large page for each: 256 MB


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
