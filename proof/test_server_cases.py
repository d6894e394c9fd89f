"""Cases of the server with the drafters that the tests leave out there."""

from __future__ import annotations

import pytest

from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from tests.server import test_load as load
from tests.server import test_speculation_over_http as over_http
from tests.server.conftest import chat_folder, golden, served_engine, service
from tests.server.drafters import REST
from tests.server.test_load import small_engine

__all__ = ["chat_folder", "golden", "served_engine", "service", "small_engine"]  # fixtures


@pytest.mark.parametrize("drafter", REST)
def test_stop_string_spanning(service: LocalBackend, drafter: str) -> None:
    over_http.test_stop_string_spanning(service, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_max_tokens_inside_run(service: LocalBackend, drafter: str) -> None:
    over_http.test_max_tokens_inside_run(service, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_prediction_api(service: LocalBackend, drafter: str) -> None:
    over_http.test_prediction_api(service, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_padded_chunks_have_one_size(service: LocalBackend, drafter: str) -> None:
    over_http.test_padded_chunks_have_one_size(service, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_mixed_sampling_batch(service: LocalBackend, drafter: str) -> None:
    load.test_mixed_sampling_batch(service, drafter)


@pytest.mark.parametrize("drafter", REST)
def test_kv_exhaustion_preempt(service: LocalBackend, small_engine: AsyncEngine, drafter: str) -> None:
    load.test_kv_exhaustion_preempt(service, small_engine, drafter)
