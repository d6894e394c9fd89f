"""What the server says of itself, and the envelope on everything else."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter

from foretoken.backend.call import State
from foretoken.errors import UnavailableError
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import CODES
from tests.helpers.fake_backend import FakeBackend
from tests.helpers.http import Records, client_of, run


def fetch(app: Any, *requests: tuple[str, str], **options: Any) -> list[Any]:
    """The responses to (method, path) pairs."""

    async def send() -> list[Any]:
        async with client_of(app) as client:
            return [await client.request(method, path, **options) for method, path in requests]

    return run(send())


@pytest.mark.parametrize(
    ("state", "health", "ready", "code"),
    [
        ("ready", 200, 200, None),
        ("loading", 200, 503, "loading"),
        ("draining", 200, 503, "draining"),
        ("restarting", 503, 503, "restarting"),
        ("failed", 503, 503, "engine_failed"),
    ],
)
def test_health_and_readiness_follow_the_backend(state: State, health: int, ready: int, code: str | None) -> None:
    fake = FakeBackend()
    fake.state = state
    app = create_app(fake)
    found = fetch(app, ("GET", "/health"), ("GET", "/ready"), ("GET", "/v1/models"))
    assert [response.status_code for response in found] == [health, ready, 200]
    heads = fetch(app, ("HEAD", "/health"), ("HEAD", "/ready"), ("HEAD", "/v1/models"))
    assert [(one.status_code, one.headers["content-length"]) for one in heads] == [
        (one.status_code, one.headers["content-length"]) for one in found
    ]
    if ready == 503:
        assert found[1].json()["error"]["code"] == code
        assert found[1].json()["error"]["type"] == "unavailable_error"
        assert int(found[1].headers["retry-after"]) >= 1
        (refused,) = fetch(app, ("POST", "/v1/completions"), json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, code)
        assert not fake.calls


def test_before_the_first_load_there_is_no_model() -> None:
    fake = FakeBackend()
    fake.info = None
    models, limits, ready = fetch(create_app(fake), ("GET", "/v1/models"), ("GET", "/v1/limits"), ("GET", "/ready"))
    pages = {"has_more": False, "first_id": None, "last_id": None}  # Anthropic's
    assert models.json() == {"object": "list", "data": [], **pages}
    assert "max_model_len" not in limits.json()
    assert ready.status_code == 503


def test_a_prompt_cannot_be_repeated_while_the_engine_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, records = FakeBackend(), Records()

    async def gone(*_: Any, **__: Any) -> str:
        raise UnavailableError("the engine is being restarted")

    monkeypatch.setattr(fake, "detokenize", gone)
    app = create_app(fake, observers=[records])
    (refused,) = fetch(app, ("POST", "/v1/completions"), json={"prompt": [1, 2], "echo": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "restarting")
    assert "retry-after" in refused.headers
    assert "x-should-retry" not in refused.headers
    assert [record.reason for record in records.all] == ["restarting"]


def test_limits_are_those_in_force() -> None:
    (response,) = fetch(create_app(FakeBackend(), ApiConfig(max_choices=7)), ("GET", "/v1/limits"))
    limits = response.json()
    assert (limits["max_choices"], limits["max_model_len"], limits["max_waiting"]) == (7, 2048, 64)
    assert set(limits["error_codes"]) == set(CODES)
    assert "ngram" in limits["drafters"]
    assert "draft_model" not in limits["drafters"]


def test_everything_else_has_the_envelope() -> None:
    app = create_app(FakeBackend())
    places = [("GET", "/nowhere"), ("POST", "/v1/embeddings"), ("GET", "/v1/completions"), ("GET", "/v1/models/other")]
    for response, status in zip(fetch(app, *places), (404, 404, 405, 404), strict=True):
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] in CODES
        assert response.headers["content-type"] == "application/json"


def test_the_error_of_a_route_that_does_not_exist_says_what_is_not_offered() -> None:
    (embeddings, without_v1) = fetch(create_app(FakeBackend()), ("POST", "/v1/embeddings"), ("POST", "/embeddings"))
    for response in (embeddings, without_v1):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "route_not_found")
        assert "OpenAI's begin with v1" in error["message"]
        assert "embeddings" in error["message"]


def test_a_route_that_breaks_has_the_envelope_too() -> None:
    router = APIRouter()

    @router.get("/broken")
    async def broken() -> None:
        raise RuntimeError("secret")

    (response,) = fetch(create_app(FakeBackend(), routers=[router]), ("GET", "/broken"))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert response.headers["x-should-retry"] == "false"
    assert "secret" not in response.text


def test_a_request_keeps_its_name() -> None:
    records = Records()
    app = create_app(FakeBackend(), observers=[records])
    for given, kept in (("mine-1", True), ("not a name", False), ("x" * 200, False)):
        (response,) = fetch(app, ("POST", "/v1/completions"), json={"prompt": "a"}, headers={"x-request-id": given})
        name = response.headers["x-request-id"]
        assert (name == given) is kept
        assert response.json()["id"] == f"cmpl-{name}"
        assert records.all[-1].request_id == name


def test_the_description_names_every_field() -> None:
    (response,) = fetch(create_app(FakeBackend()), ("GET", "/openapi.json"))
    described = response.json()
    assert "/v1/chat/completions" in described["paths"]
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "prediction", "spec", "speculative.n_max", "logit_bias", "service_tier"} <= set(fields)
    assert "422" not in described["paths"]["/v1/chat/completions"]["post"]["responses"]
