"""Texts that are only tokenised are their caller's too: the threads for it are shared out among tenants."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretoken.backend.call import TextToEncode
from foretoken.backend.local import LocalBackend
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.guard.app import Guard
from foretoken.server.guard.config import GuardConfig
from tests.helpers.fake_backend import INFO, FakeBackend
from tests.server.asgi import ask, scope_of
from tests.server.test_access import headers_for

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Noting(FakeBackend):
    """Keeps the texts that it was to tokenise."""

    def __init__(self) -> None:
        super().__init__(info=msgspec.structs.replace(INFO, fim_tokens=((90,), 91, 92)))
        self.texts: list[TextToEncode] = []

    async def tokenize(self, text: TextToEncode) -> list[int]:
        self.texts.append(text)
        return await super().tokenize(text)


@pytest.mark.parametrize(
    ("is_llama", "path", "body"),
    [
        (False, "/tokenize", {"prompt": "ab"}),
        (False, "/tokenize", CHAT),
        (False, "/v1/messages/count_tokens", CHAT),
        (False, "/v1/completions", {"prompt": "ab", "suffix": "cd"}),
        (True, "/tokenize", {"content": "ab"}),
        (True, "/completion", {"prompt": "ab"}),
        (True, "/completion", {"prompt": [1], "logit_bias": [["ab", 1.0]]}),
        (True, "/infill", {"input_prefix": "ab", "input_suffix": "cd", "prompt": "ef"}),
        (True, "/apply-template", CHAT),
        (True, "/chat/completions/input_tokens", CHAT),
    ],
)
def test_a_text_has_the_tenant_of_its_key(tmp_path: Path, is_llama: bool, path: str, body: dict[str, Any]) -> None:
    file, backend = tmp_path / "keys.toml", Noting()
    file.write_text('[alice]\nkey = "alice-key-123"\n')
    app = Guard(create_app(backend, ApiConfig(llama_cpp=is_llama)), GuardConfig(keys_file=str(file)))
    headers = [*headers_for("alice-key-123"), (b"content-type", b"application/json")]
    asyncio.run(ask(app, scope_of("POST", path, headers), json.dumps({"model": INFO.name} | body).encode()))
    assert backend.texts
    assert {text.tenant for text in backend.texts} == {"alice"}


def test_the_threads_are_told_the_tenant(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    found, in_thread = list[str](), backend.engine.in_thread

    async def noting(call: Any, tenant: str = "") -> Any:
        found.append(tenant)
        return await in_thread(call, tenant)

    monkeypatch.setattr(backend.engine, "in_thread", noting)
    asyncio.run(backend.tokenize(TextToEncode("ab", tenant="alice")))
    assert found == ["alice"]
