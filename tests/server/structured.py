"""A server over the reference target whose template takes tools, without a socket."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from foretoken import LLM
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "A function that adds."}]
SWITCH: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"enum": ["low", "high"]}},
    "required": ["on", "level"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "switch", "parameters": SWITCH}}


class Server:
    """An application without a socket."""

    def __init__(self, backend: LocalBackend, config: ApiConfig | None = None) -> None:
        self.backend = backend
        self.app = create_app(backend, config)

    def post(self, path: str, body: object) -> httpx2.Response:
        return asyncio.run(self.posted(path, body))

    async def posted(self, path: str, body: object) -> httpx2.Response:
        content = body if isinstance(body, str) else json.dumps(body)
        transport = httpx2.ASGITransport(self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await client.post(path, content=content, headers={"content-type": "application/json"})

    def chat(self, **fields: Any) -> Any:
        body = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 60, **fields}
        reply = self.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        return events_of(reply) if fields.get("stream") else reply.json()


def events_of(reply: httpx2.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    folder = tmp_path_factory.mktemp("model") / "reference"
    shutil.copytree(ROOT / "tests/reference/target", folder)
    shutil.copy(ROOT / "clients/chat_template.jinja", folder)
    with LLM(str(folder), dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        yield engine


@pytest.fixture
def server(engine: AsyncEngine) -> Server:
    return Server(LocalBackend(engine, "reference"))
