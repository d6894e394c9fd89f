"""Keys over the whole application, and that tenants share nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.backend.local import LocalBackend
from foretoken.engine.stats import EngineStats
from foretoken.engine_config import EngineConfig
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.config import ServerConfig
from foretoken.server.guard.app import PUBLIC_PATHS, ASGIApp, Guard, need_of
from foretoken.server.guard.config import GuardConfig
from foretoken.server.observe.config import ObserveConfig
from foretoken.server.observe.observation import Observation
from foretoken.server.run import compose
from tests.helpers.fake_backend import FakeBackend
from tests.server.asgi import HOST, Reply, ask, scope_of

USER, ADMIN = "user-key-1234", "admin-key-1234"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
TRICKS = (
    "//v1/models",
    "/V1/models",
    "/v1/models/",
    "/../v1/models",
    "/health/../v1/models",
    "/health;/v1/models",
    "/health\\..\\v1\\models",
    "/health\0/v1/models",
    "/health?/v1/models",
    "/ready/",
    "/HEALTH",
    "http://localhost/health",
    "/no/such/route",
)


def whole_app(backend: Any, guard: GuardConfig, api: ApiConfig | None = None) -> ASGIApp:
    """The application as it is served."""
    observe, api = ObserveConfig(request_log="none"), api or ApiConfig()
    config = ServerConfig(EngineConfig("reference:target"), guard=guard, observe=observe, api=api)
    return compose(backend, config).app


def paths_of(app: ASGIApp) -> set[str]:
    """The templates of its routes."""
    described = asyncio.run(ask(app, scope_of("GET", "/openapi.json", headers_for(USER))))
    return {*json.loads(described.body)["paths"], "/", "/metrics", "/openapi.json"}


class StatsBackend(FakeBackend):
    """A backend of a script whose engine has done nothing yet."""

    async def stats(self) -> dict[str, Any]:
        return EngineStats().as_dict()


def headers_for(token: str | None) -> list[tuple[bytes, bytes]]:
    return [HOST, *([] if token is None else [(b"authorization", f"Bearer {token}".encode())])]


def status(app: ASGIApp, method: str, path: str, token: str | None) -> int:
    reply = asyncio.run(ask(app, scope_of(method, path, headers_for(token))))
    if reply.status >= 400:
        assert reply.headers["content-type"].startswith("application/json"), (method, path)
        fields = (
            {"message", "type", "details"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        )
        assert set(reply.error) >= fields
    assert reply.headers["x-request-id"]
    return reply.status


def test_auth_matrix() -> None:
    """Case 71: every route and method with no key, a wrong one, a user's and the operator's."""
    app = whole_app(StatsBackend(), GuardConfig(api_key=USER, admin_key=ADMIN))
    paths = paths_of(app)
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/models",
        "/health",
        "/metrics",
        "/v1/stats",
        "/tokenize",
    } <= paths
    for path in sorted(paths):
        for method in METHODS:
            is_public = path in PUBLIC_PATHS and method in ("GET", "HEAD")
            for token in (None, "wrong-key-1234"):
                assert (status(app, method, path, token) == 401) == (not is_public), (method, path, token)
            for token in (USER, ADMIN):
                assert status(app, method, path, token) not in (401, 403, 500), (method, path, token)


def test_what_answers_get_answers_head() -> None:
    """Probes and proxies ask so; with the same status and headers, llama.cpp's and Ollama's paths too."""
    app = whole_app(StatsBackend(), GuardConfig(), ApiConfig(llama_cpp=True, ollama=True))
    described = asyncio.run(ask(app, scope_of("GET", "/openapi.json", [HOST])))
    reading = [path for path, methods in json.loads(described.body)["paths"].items() if "get" in methods]
    assert {"/v1/stats", "/v1/limits", "/v1/acceptance", "/props", "/slots", "/models", "/api/tags"} <= set(reading)
    for path in [*reading, "/", "/metrics", "/openapi.json", "/v1/models/fake"]:
        get, head = (asyncio.run(ask(app, scope_of(method, path, [HOST]))) for method in ("GET", "HEAD"))
        assert head.status == get.status, path
        assert set(head.headers) == set(get.headers)
    assert "head" not in {method for methods in json.loads(described.body)["paths"].values() for method in methods}


@pytest.mark.parametrize("path", TRICKS)
def test_auth_matrix_of_odd_paths(path: str) -> None:
    """Case 71: no spelling of a path gets around the key, and none that a user has the key for reaches more."""
    app = whole_app(StatsBackend(), GuardConfig(api_key=USER, admin_key=ADMIN))
    assert status(app, "GET", path, None) == 401
    assert status(app, "GET", path, USER) == 404


def test_auth_matrix_of_admin_routes() -> None:
    """Case 71: a user's key opens no admin route, whatever its spelling; nor does a server without an admin key."""
    app = whole_app(StatsBackend(), GuardConfig(api_key=USER, admin_key=ADMIN))
    for path in ("/debug/invariants", "//debug/invariants", "/DEBUG/invariants", "/admin", "/./admin/x"):
        assert [status(app, "GET", path, token) for token in (None, "x" * 12, USER, ADMIN)] == [401, 401, 403, 404]
    for guard in (GuardConfig(), GuardConfig(api_key=USER)):
        app = whole_app(StatsBackend(), guard)
        assert status(app, "GET", "/debug/invariants", USER) == 403
    assert need_of("GET", "/administration") == "key"


def test_refused_requests_count_with_their_codes() -> None:
    backend = StatsBackend()
    observation = Observation(backend, ObserveConfig(request_log="none"))
    app = observation.around(Guard(create_app(backend), GuardConfig(api_key=USER)))
    for token in (None, USER, USER):
        status(app, "GET", "/v1/models", token)
    counted = {tuple(s.labels.values()): s.value for s in _samples(observation, "foretoken_http_requests_total")}
    assert counted == {("other", "GET", "401"): 1, ("/v1/models", "GET", "200"): 2}


def test_a_body_that_is_refused_half_way_is_no_client_that_left() -> None:
    backend = StatsBackend()
    observation = Observation(backend, ObserveConfig(request_log="none"))
    app = create_app(backend, observers=observation.observers)
    headers = [HOST, (b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    small = observation.around(Guard(app, GuardConfig(max_body_bytes=100)))
    reply = asyncio.run(ask(small, scope_of("POST", "/v1/completions", headers), *[b"x" * 60] * 3))
    assert reply.status == 413
    assert [s.labels["code"] for s in _samples(observation, "foretoken_http_requests_total")] == ["413"]
    assert _samples(observation, "foretoken_requests_aborted_total") == []


def _samples(observation: Observation, name: str) -> list[Any]:
    families = observation.metrics._registry.collect()
    return [sample for family in families for sample in family.samples if sample.name == name]


# ---- tenants


PROMPT = (
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def lines(self):\n"
    "        with open(self.path) as file:\n            for line in file:\n                yield line\n\n\n"
    "class Writer:\n    def __init__(self, path):\n"
)


def test_salt_isolation(backend: LocalBackend, tmp_path: Path) -> None:
    """Case 60: what one tenant sent neither speeds up nor warms another one's requests."""
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[{name}]\nkey = "{name}-key-123"\n' for name in ("alice", "bob", "carol")))
    app = Guard(create_app(backend), GuardConfig(keys_file=str(path)))

    def run(key: str, **more: Any) -> tuple[int, int, int]:
        """Cached prompt tokens, drafted and accepted tokens of an answer."""
        body = {
            "model": "reference",
            "prompt": PROMPT,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "spec": {"drafter": "suffix", "num_draft": 4},
        }
        headers = [*headers_for(f"{key}-key-123"), (b"content-type", b"application/json")]
        reply = asyncio.run(_whole(app, headers, json.dumps(body | more).encode()))
        assert reply.status == 200, reply.body
        answer = json.loads(reply.body)
        spec = answer["foretoken"]["spec"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, spec["num_drafted"], spec["num_accepted"]

    fresh = run("carol")  # nobody has sent anything yet
    assert fresh[0] == 0
    first = run("alice")
    learnt = run("alice")
    assert first == fresh
    assert learnt[0] > 0
    assert learnt[2] > first[2]  # the store of finished answers drafts the whole answer now
    assert run("bob") == fresh
    assert run("alice", cache_salt="another") == fresh
    assert run("alice", cache_salt="another")[0] > 0
    assert run("alice", cache_salt="bob") == fresh
    assert run("bob", cache_salt="another") == fresh


async def _whole(app: ASGIApp, headers: list[tuple[bytes, bytes]], body: bytes) -> Reply:
    """An answer whose client waits for it."""
    reply, waiting = Reply(), [body]

    async def receive() -> dict[str, Any]:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # it never leaves

    async def send(message: dict[str, Any]) -> None:
        reply.status = message.get("status", reply.status)
        reply.body += message.get("body", b"")

    await app(scope_of("POST", "/v1/completions", headers), receive, send)
    return reply
