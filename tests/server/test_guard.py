"""The guard without a network: keys, Host, Origin, CORS and body limits, over an application that echoes its body."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.server.guard import keys as keys_module
from foretoken.server.guard.app import Guard
from foretoken.server.guard.config import GuardConfig, is_loopback
from foretoken.server.guard.keys import KeyRing, key_ring, read_keys, refuse_public_bind
from foretoken.server.record import CALLER_KEY, Caller
from tests.server.asgi import HOST, Reply, ask, scope_of

USER, ADMIN = "user-key-1234", "admin-key-1234"
KEYED = GuardConfig(api_key=USER, admin_key=ADMIN)


def bearer(token: str) -> tuple[bytes, bytes]:
    return (b"authorization", f"Bearer {token}".encode())


class Echo:
    """Reads the whole body and sends it back; `num_calls` counts the requests that came through."""

    def __init__(self) -> None:
        self.num_calls, self.callers, self.num_read = 0, list[Caller](), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_calls += 1
        self.callers.append(scope[CALLER_KEY])
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client left")
            body += message["body"]
            self.num_read = len(body)
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def run(config: GuardConfig, scope: dict[str, Any], *parts: bytes, app: Echo | None = None) -> Reply:
    return asyncio.run(ask(Guard(app or Echo(), config), scope, *parts))


# ---- keys


@pytest.mark.parametrize(
    ("path", "method", "public"),
    [
        ("/", "GET", True),
        ("/health", "GET", True),
        ("/ready", "HEAD", True),
        ("/health", "POST", False),
        ("/health/", "GET", False),
        ("//health", "GET", False),
        ("/Health", "GET", False),
        ("/health/../v1/models", "GET", False),
        ("/metrics", "GET", False),
        ("/v1/models", "OPTIONS", False),
        ("/no/such/route", "DELETE", False),
        ("", "GET", False),
    ],
)
def test_only_listed_paths_need_no_key(path: str, method: str, public: bool) -> None:
    app = Echo()
    reply = run(KEYED, scope_of(method, path), app=app)
    assert (reply.status, app.num_calls) == ((200, 1) if public else (401, 0))
    if not public:
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.headers["x-request-id"]
        assert reply.error["type"] == "authentication_error"
    assert run(KEYED, scope_of(method, path, [HOST, bearer(USER)])).status == 200


def test_metrics_are_public_only_when_asked_for() -> None:
    assert run(GuardConfig(api_key=USER, metrics_public=True), scope_of("GET", "/metrics")).status == 200


@pytest.mark.parametrize("path", ["/admin/drain", "//admin/drain", "/ADMIN", "/./debug/invariants", "/debug "])
def test_admin_routes_need_the_second_key_in_any_spelling(path: str) -> None:
    replies = [run(KEYED, scope_of("GET", path, [HOST, *more])) for more in ([], [bearer(USER)], [bearer(ADMIN)])]
    assert [reply.status for reply in replies] == [401, 403, 200]
    open_ = run(GuardConfig(), scope_of("GET", path))
    assert (open_.status, open_.error["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", USER.encode())],
        [(b"authorization", b"Basic " + USER.encode())],
        [bearer(USER[:-1])],
        [bearer(USER + "x")],
        [bearer(USER.upper())],
        [bearer(USER), bearer(USER)],
        [bearer(USER), (b"x-api-key", USER.encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
    ],
)
def test_anything_but_one_right_key_is_none(headers: list[tuple[bytes, bytes]]) -> None:
    assert run(KEYED, scope_of("GET", "/v1/models", [HOST, *headers])).status == 401


def test_a_key_may_come_as_x_api_key_and_names_the_caller() -> None:
    app = Echo()
    assert run(KEYED, scope_of("GET", "/v1/models", [HOST, (b"x-api-key", USER.encode())]), app=app).status == 200
    assert app.callers == [Caller("default", "default")]
    app = Echo()
    assert run(GuardConfig(), scope_of("GET", "/v1/models"), app=app).status == 200
    assert app.callers == [Caller()]


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []

    def compare(one: bytes, other: bytes) -> bool:
        assert len(one) == len(other) == 32
        compared.append(one == other)
        return one == other

    monkeypatch.setattr(keys_module.secrets, "compare_digest", compare)
    ring = key_ring(KEYED)
    for token, expected in ((USER, [True, False]), (ADMIN, [False, True]), ("wrong", [False, False])):
        compared.clear()
        assert (ring.find(token.encode()) is not None) == any(expected)
        assert compared == expected  # the first hit does not end it


def test_keys_are_not_shown() -> None:
    assert USER not in repr(KEYED)
    assert USER not in repr(vars(key_ring(KEYED)))


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"carol-key-1").hexdigest()
    path.write_text(
        '[alice]\nkey = "alice-key-1"\n'
        '[bob]\nkey = "bob-key-12"\ntenant = "team"\nadmin = true\n'
        f'[carol]\nsha256 = "{digest}"\ntenant = "team"\n'
    )
    ring = key_ring(GuardConfig(keys_file=str(path)))
    found = {token: ring.find(token.encode()) for token in ("alice-key-1", "bob-key-12", "carol-key-1", "x")}
    assert [(one.caller.key, one.caller.tenant, one.is_admin) if one else None for one in found.values()] == [
        ("alice", "alice", False),
        ("bob", "team", True),
        ("carol", "team", False),
        None,
    ]
    assert ring.has_admin
    assert not ring.is_open


@pytest.mark.parametrize(
    "text",
    [
        '[a]\nkey = "short"',
        '[a]\nkey = "with a space in it"',
        "[a]\nkey = 12345678",
        '[a]\nsha256 = "abc"',
        '[a]\nkey = "long-enough"\nsha256 = "00"',
        "[a]\nadmin = true",
        '[a]\nkey = "long-enough"\nrole = "x"',
        '[a]\nkey = "long-enough"\ntenant = "a\\u0000b"',
        '[a]\nkey = "long-enough"\nadmin = 1',
        '[a]\nkey = "long-enough"\n[b]\nkey = "long-enough"',
        'a = "long-enough-secret"',
        'key = "long-enough-secret',
    ],
)
def test_a_malformed_file_of_keys_is_refused_without_its_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        key_ring(GuardConfig(keys_file=str(path)))
    assert "long-enough" not in str(caught.value)
    with pytest.raises(StorageError, match="keys_file"):
        read_keys(tmp_path / "none.toml")


def test_a_public_address_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.evil.com"):
        with pytest.raises(ConfigError, match="--api-key") as caught:
            refuse_public_bind(host, KeyRing(), insecure=False)
        assert caught.value.exit_code == 2
        refuse_public_bind(host, KeyRing(), insecure=True)
        refuse_public_bind(host, key_ring(KEYED), insecure=False)
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1", "unix:/run/foretoken.sock"):
        refuse_public_bind(host, KeyRing(), insecure=False)
        assert is_loopback(host)


# ---- Host and Origin


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        (b"localhost", True),
        (b"LOCALHOST:8000", True),
        (b"127.0.0.1:8000", True),
        (b"[::1]:8000", True),
        (b"app.localhost", True),
        (b"0.0.0.0:8000", True),
        (b"evil.com", False),
        (b"localhost.evil.com", False),
        (b"x/health?", False),
        (b"localhost/health", False),
        (b"localhost:8000:1", False),
        (b"user@localhost", False),
        (b"", False),
        (b"192.168.1.5", False),
    ],
)
def test_on_loopback_only_local_hosts_pass(host: bytes, passes: bool) -> None:
    for path in ("/health", "/v1/models"):
        reply = run(GuardConfig(), scope_of("GET", path, [(b"host", host)]))
        assert reply.status == (200 if passes else 403)
    public = GuardConfig(host="0.0.0.0", api_key=USER, allowed_hosts=("llm.example",))
    named = run(public, scope_of("GET", "/v1/models", [(b"host", b"LLM.example:443"), bearer(USER)]))
    assert named.status == 200
    assert run(public, scope_of("GET", "/health", [(b"host", host)])).status == 403
    assert run(GuardConfig(), scope_of("GET", "/health", [])).status == 403
    assert run(GuardConfig(), scope_of("GET", "/health", [HOST, HOST])).status == 403


@pytest.mark.parametrize(
    ("origin", "own", "listed"),
    [
        (None, True, True),
        (b"http://localhost:8000", True, True),
        (b"http://localhost", False, False),
        (b"https://localhost:8000", True, True),
        (b"http://localhost.evil.com", False, False),
        (b"http://localhost.evil.com:8000", False, False),
        (b"http://evil.com", False, False),
        (b"null", False, False),
        (b"file://", False, False),
        (b"https://app.example", False, True),
        (b"https://app.example:8443", False, False),
        (b"http://app.example", False, False),
        (b"https://app.example.evil.com", False, False),
    ],
)
def test_origins(origin: bytes | None, own: bool, listed: bool) -> None:
    headers = [HOST, *([] if origin is None else [(b"origin", origin)])]
    assert run(GuardConfig(), scope_of("POST", "/v1/completions", headers)).status == (200 if own else 403)
    reply = run(GuardConfig(cors_origins=("https://app.example",)), scope_of("POST", "/v1/completions", headers))
    assert reply.status == (200 if listed else 403)
    by_cors = listed and not own
    assert reply.headers.get("access-control-allow-origin") == ((origin or b"").decode() if by_cors else None)
    assert "access-control-allow-credentials" not in reply.headers


def test_preflights_of_listed_origins_need_no_key() -> None:
    config = GuardConfig(api_key=USER, cors_origins=("https://app.example",))
    asked = [
        HOST,
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"authorization, content-type, bad header"),
    ]
    app = Echo()
    reply = run(config, scope_of("OPTIONS", "/v1/completions", [*asked, (b"origin", b"https://app.example")]), app=app)
    assert (reply.status, reply.body, app.num_calls) == (204, b"", 0)
    assert reply.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert run(config, scope_of("OPTIONS", "/v1/completions", [*asked, (b"origin", b"https://evil.com")])).status == 403
    assert run(config, scope_of("OPTIONS", "/v1/completions", asked)).status == 401
    refused = run(config, scope_of("POST", "/v1/completions", [HOST, (b"origin", b"https://app.example")]))
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"  # the page may read why


def test_rebinding_is_stopped_by_the_host() -> None:
    """A page of evil.com whose name now means this machine: the browser takes it for the same origin."""
    headers = [(b"host", b"evil.com:8000"), (b"origin", b"http://evil.com:8000")]
    assert run(GuardConfig(), scope_of("POST", "/v1/completions", headers)).error["code"] == "host_not_allowed"
    assert run(GuardConfig(cors_origins=("*",)), scope_of("POST", "/v1/completions", headers)).status == 403


# ---- bodies and headers


def test_a_body_is_refused_as_soon_as_it_is_too_long() -> None:
    app, config = Echo(), GuardConfig(max_body_bytes=100)
    announced = run(config, scope_of("POST", "/v1", [HOST, (b"content-length", b"101")]), b"x" * 101, app=app)
    assert (announced.status, app.num_calls) == (413, 0)
    chunked = scope_of("POST", "/v1", [HOST, (b"transfer-encoding", b"chunked")])
    reply = run(config, chunked, *[b"x" * 30] * 10, app=app)
    assert (reply.status, reply.error["code"], app.num_read) == (413, "body_too_large", 90)
    assert [message["type"] for message in reply.messages].count("http.response.start") == 1
    assert run(config, scope_of("POST", "/v1", [HOST]), b"x" * 60, b"y" * 40).body == b"x" * 60 + b"y" * 40


@pytest.mark.parametrize("sizes", [[b"-1"], [b"1e3"], [b""], [b"5", b"6"], [b"9" * 30], ["٣".encode()]])
def test_malformed_lengths_are_refused(sizes: list[bytes]) -> None:
    headers = [HOST, *[(b"content-length", size) for size in sizes]]
    assert run(GuardConfig(), scope_of("POST", "/v1", headers)).status == 400


def test_headers_are_bounded_together_and_in_number() -> None:
    config = GuardConfig(max_header_bytes=1000, max_headers=10)
    assert run(config, scope_of("GET", "/health", [HOST, (b"a", b"b" * 1000)])).status == 431
    assert run(config, scope_of("GET", "/health", [HOST, *[(b"a", b"b")] * 10])).status == 431
    assert run(config, scope_of("GET", "/health", [HOST, *[(b"a", b"b")] * 9])).status == 200
    assert run(config, scope_of("GET", "/" + "x" * 1000)).status == 431


def test_a_slow_body_ends_with_408() -> None:
    async def slow(scope: Any) -> tuple[Reply, Echo]:
        app, reply = Echo(), Reply()
        never = asyncio.get_running_loop().create_future()
        parts = [b"abc"]

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": True}
            return await never

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]

        await Guard(app, GuardConfig(body_timeout_s=0.05))(scope, receive, send)
        return reply, app

    reply, app = asyncio.run(slow(scope_of("POST", "/v1")))
    assert (reply.status, app.num_calls) == (408, 1)


def test_errors_of_the_application_are_its_own() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(ask(Guard(broken, GuardConfig()), scope_of("GET", "/health")))


def test_web_sockets_are_closed_and_the_lifespan_passes() -> None:
    sent: list[Any] = []
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def both() -> None:
        for kind in ("websocket", "lifespan"):
            await Guard(app, KEYED)({"type": kind, "headers": [], "path": "/"}, None, send)  # type: ignore[arg-type]

    asyncio.run(both())
    assert (sent, seen) == (["websocket.close"], ["lifespan"])


@pytest.mark.parametrize(
    "options",
    [
        {"cors_origins": "https://app.example"},
        {"cors_origins": ("app.example",)},
        {"cors_origins": ("https://app.example/",)},
        {"allowed_hosts": ("",)},
        {"max_body_bytes": 0},
        {"header_timeout_s": float("nan")},
        {"keep_alive_s": 0},
    ],
)
def test_wrong_settings_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        GuardConfig(**options)
    assert caught.value.field == next(iter(options))


def test_bodies_have_a_limit_together() -> None:
    """1024 connections with the longest body each would be 32 GB; a small request passes beside them."""
    free, size = 64 << 10, 1 << 20

    async def play() -> None:
        waits, held = asyncio.Event(), list[bytes]()

        async def holding(scope: Any, receive: Any, send: Any) -> None:
            """Reads the body, and answers when it may."""
            body, is_open = b"", True
            while is_open:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body, is_open = body + message["body"], message["more_body"]
            held.append(body)
            if len(body) > free:
                await waits.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        app = Guard(holding, GuardConfig(max_total_body_bytes=3 * size))
        large = [b"x" * (free + size // 2), b"x" * (size // 2)]

        def sent(*parts: bytes) -> asyncio.Task[Reply]:
            return asyncio.create_task(ask(app, scope_of("POST", "/v1"), *parts))

        begun = [sent(*large) for _ in range(3)]
        while len(held) < 3:
            await asyncio.sleep(0)
        further = sent(*large)
        while not further.done() and len(held) == 3:
            await asyncio.sleep(0)
        assert further.done(), "a fourth body is held"
        refused = await further
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "rate_limited", "1")
        assert (await sent(b"y" * free)).status == 200
        waits.set()
        assert [reply.status for reply in await asyncio.gather(*begun)] == [200] * 3
        assert (await sent(*large)).status == 200  # all was given back
        assert (await sent(b"x" * (8 * size))).status == 200  # nobody else is there

    asyncio.run(play())
