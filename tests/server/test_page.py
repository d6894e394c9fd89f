"""The page: one document, nothing loaded from elsewhere, a policy that fits it, and the numbers that it reads."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from foretoken import LLM
from foretoken.backend.local import LocalBackend
from foretoken.config import RULES
from foretoken.engine.async_engine import AsyncEngine
from foretoken.errors import UnavailableError
from foretoken.registry import known_drafters
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.exchange import Api
from foretoken.server.page.page import (
    SCRIPTS,
    content_policy,
    document,
    drafter_groups,
    page_router,
    script,
    stats_router,
)


def get(app: FastAPI, path: str) -> httpx2.Response:
    async def run() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return await client.get(path)

    return asyncio.run(run())


def app_with(*routers: Any) -> FastAPI:
    app = FastAPI()
    for router in routers:
        app.include_router(router)
    return app


def api_of(backend: Any) -> Api:
    return Api(backend, ApiConfig(), ())


@pytest.fixture(scope="module")
def backend() -> Iterator[LocalBackend]:
    with LLM("reference:target", dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        yield LocalBackend(engine, "reference")


def test_the_page_is_one_document_with_its_policy() -> None:
    answer = get(app_with(page_router()), "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == content_policy()
    assert answer.text == document()
    assert "/*{" not in answer.text


def test_the_policy_allows_the_script_and_the_style_that_are_there_and_no_others() -> None:
    policy = dict(part.split(" ", 1) for part in content_policy().split("; "))
    html = document()
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (found,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in content_policy()


def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup() -> None:
    html = document()
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html) == []
    assert re.findall(r"<[^>]+\s(?:on\w+|style)=", html.split("<script")[0]) == []
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "localStorage",
    ):
        assert word not in html, word


def test_every_file_of_the_page_is_in_it_once() -> None:
    from importlib import resources

    files = {one.name for one in resources.files("foretoken.server.page").iterdir() if one.name.endswith(".js")}
    assert files == set(SCRIPTS)
    assert not re.search(r"^(?:import|export) ", script(), flags=re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function\*?|const|class) (\w+)", script(), flags=re.MULTILINE)
    assert len(names) == len(set(names)), "two files of the page use one name"


def test_a_file_imports_only_what_comes_before_it() -> None:
    from importlib import resources

    seen: list[str] = []
    for name in SCRIPTS:
        text = resources.files("foretoken.server.page").joinpath(name).read_text()
        needed = re.findall(r'^import .* from "\./(.*)";$', text, flags=re.MULTILINE)
        assert set(needed) <= set(seen), name
        assert len(needed) == len(re.findall(r"^import ", text, flags=re.MULTILINE))
        seen.append(name)


def test_every_field_has_a_label() -> None:
    body = document().split("<script")[0]
    for field in re.findall(r"<(?:input|select|textarea)[^>]*>", body):
        identity = re.search(r'id="([^"]+)"', field)
        is_inside = re.search(rf"<label[^>]*>(?:(?!</label>).)*{re.escape(field)}", body, flags=re.DOTALL)
        assert is_inside or (identity and f'<label for="{identity[1]}"' in body), field


def test_stats_have_the_model_and_the_counters(backend: LocalBackend) -> None:
    found = get(app_with(stats_router(api_of(backend))), "/v1/stats").json()
    assert found["state"] == "ready"
    assert found["model"]["name"] == "reference"
    assert found["model"]["has_chat_template"] is False
    assert found["engine"]["num_emitted"] == 0
    assert {"num_running", "num_waiting", "drafted_by", "accepted_by", "target_s"} <= set(found["engine"])
    assert found["rules"] == list(RULES)
    assert "ngram" in found["drafters"]
    assert "draft_model" not in found["drafters"]  # this server has no draft


def test_stats_of_a_backend_that_is_not_ready(backend: LocalBackend) -> None:
    class Loading:
        state, info = "loading", None

        async def stats(self) -> dict[str, Any]:
            raise UnavailableError("loading")

    found = get(app_with(stats_router(api_of(Loading()))), "/v1/stats").json()
    assert (found["state"], found["model"], found["engine"]) == ("loading", None, None)


def test_every_drafter_has_a_colour() -> None:
    groups = drafter_groups()
    assert set(groups) == set(known_drafters())
    assert (groups["draft_model"], groups["ngram"], groups["predicted"]) == ("model", "lookup", "prediction")
    for name in {*groups.values(), "grammar", "residual", "bonus"}:
        assert f".tok.{name} " in document(), name
