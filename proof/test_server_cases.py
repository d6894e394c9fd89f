"""Cases of the server with the drafters that the tests leave out there."""

from __future__ import annotations

import pytest

from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from tests.server import test_load as load
from tests.server import test_request_spec as request_spec
from tests.server import test_speculation_over_http as over_http
from tests.server.conftest import backend, chat_folder, golden, served_engine
from tests.server.drafters import REST
from tests.server.test_load import small_engine

__all__ = ["backend", "chat_folder", "golden", "served_engine", "small_engine"]  # fixtures


@pytest.mark.parametrize("drafter", REST)
def test_stop_string_spanning(backend: LocalBackend, drafter: str) -> None:
    over_http.test_stop_string_spanning(backend, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_max_tokens_inside_run(backend: LocalBackend, drafter: str) -> None:
    over_http.test_max_tokens_inside_run(backend, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_prediction_api(backend: LocalBackend, drafter: str) -> None:
    over_http.test_prediction_api(backend, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_padded_chunks_have_one_size(backend: LocalBackend, drafter: str) -> None:
    request_spec.test_padded_chunks_have_one_size(backend, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_mixed_sampling_batch(backend: LocalBackend, drafter: str) -> None:
    load.test_mixed_sampling_batch(backend, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_kv_exhaustion_preempt(backend: LocalBackend, small_engine: AsyncEngine, drafter: str) -> None:
    load.test_kv_exhaustion_preempt(backend, small_engine, drafter)
