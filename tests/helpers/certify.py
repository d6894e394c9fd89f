"""Servers and sessions for tests of `certify`: a small model that takes tools, plain and with drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken import LLM, SpecConfig
from foretoken.backend.answering import SERVED, Drafting
from foretoken.backend.http import HttpBackend, ServerAddress
from foretoken.backend.local import LocalBackend
from foretoken.backend.requesting import requester_of
from foretoken.engine.async_engine import AsyncEngine
from foretoken.measure.certify.asking import Asker, CertifySession
from foretoken.measure.certify.options import CertifyOptions
from foretoken.measure.workload import Prompt
from foretoken.model.names import model_folder
from foretoken.server.api.app import create_app
from tests.server.serving import served

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools[0].function.name }}</tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = (
    "def a():\n    return 1\n\n\ndef b():\n    return 1\n\n\ndef c():\n",
    "import os\nimport sys\nimport os\nimport",
    "class A:\n    def read(self):\n        return self.read()\n\n    def write(self",
    '{"name": "one", "value": 1, "name": "two", "value":',
)
DRAFTED = SpecConfig("draft_model", draft="reference:draft", num_draft=4, rule="rejection")


def chat_folder(folder: Path) -> Path:
    """The reference target with a chat template that takes tools."""
    source = model_folder("reference:target")
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(source / name, folder / name)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    return folder


@contextmanager
def server_of(folder: Path, spec: SpecConfig = DRAFTED) -> Iterator[str]:
    """The address of our server on a model, which drafts by `spec`."""
    llm = LLM(str(folder), spec, dtype="float32", profile="off", cache_tokens=16384, max_batch_size=32)
    with (
        llm,
        AsyncEngine(llm, max_waiting=1024) as engine,
        served(create_app(LocalBackend(engine, "reference"))) as url,
    ):
        yield url


@contextmanager
def asker(label: str, url: str, plain: bool = False) -> Iterator[Asker]:
    """A side at an address."""
    backend = HttpBackend(ServerAddress(url))
    try:
        yield Asker(label, requester_of(backend, Drafting() if plain else Drafting(SERVED)))
    finally:
        backend.close()


def session_of(a: Asker, b: Asker, **options: Any) -> CertifySession:
    """Both sides with a few prompts."""
    usual: dict[str, Any] = {"effect": 0.4, "max_tokens": 32}
    chosen = CertifyOptions("http://a", "http://b", **usual | options)
    prompts = [Prompt(str(number), "code", text) for number, text in enumerate(PROMPTS[: chosen.num_prompts])]
    return CertifySession(chosen, a, b, prompts, 5, conversations=True)
