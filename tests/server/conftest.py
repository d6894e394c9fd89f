"""What tests of the server share: one small engine, applications over it, and the checks after every test.

LEAK0: no request, block, task, thread or file handle is left. The canary: a fixed prompt still gets the tokens and the
log-probabilities that it got first.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams, SpecConfig, registry
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.model.names import model_folder
from tests.helpers.http import Serving
from tests.server.synthetic import SYNTHETIC

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CANARY = "def read(self):\n"


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference target with a chat template."""
    source, folder = model_folder("reference:target"), tmp_path_factory.mktemp("chat") / "target"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(source / name, folder / name)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def served_engine(chat_folder: Path) -> Iterator[AsyncEngine]:
    """One engine for all tests of the server; plain unless a request says otherwise."""
    llm = LLM(str(chat_folder), SpecConfig(), dtype="float32", profile="off", cache_tokens=8192, max_batch_size=8)
    with llm, AsyncEngine(llm, max_waiting=32) as engine:
        _warm_up(engine)
        yield engine


@pytest.fixture(scope="session")
def golden(served_engine: AsyncEngine) -> list[tuple[int, float]]:
    """What the canary got first."""
    return _canary(served_engine)


@pytest.fixture
def backend(
    served_engine: AsyncEngine, golden: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalBackend]:
    """The shared engine as a backend; LEAK0 and the canary follow every test that uses it."""
    monkeypatch.setitem(registry.ADDED, "synthetic", SYNTHETIC)
    before = _held()
    yield LocalBackend(served_engine, "reference")
    _leak0(served_engine, before)
    assert _canary(served_engine) == golden, "the canary's answer has changed"


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Serves applications on loopback ports until the test ends."""
    servers = Serving()
    yield servers
    servers.close()


def _canary(engine: AsyncEngine) -> list[tuple[int, float]]:
    answer = engine.submit(CANARY, SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True, tenant="canary")).result()
    assert answer.logprobs is not None
    return [(one.token_id, one.logprob) for one in answer.logprobs]


def _warm_up(engine: AsyncEngine) -> None:
    """Threads and the process of chat templates are started by the first requests that need them."""

    async def all_threads() -> None:
        await asyncio.gather(*(engine.in_thread(lambda: time.sleep(0.01)) for _ in range(8)))

    asyncio.run(all_threads())
    engine.llm.encode_chat([{"role": "user", "content": "a"}])


def _held() -> tuple[set[str], int]:
    """Names of threads, and the number of open file handles."""
    return {thread.name for thread in threading.enumerate()}, len(os.listdir("/proc/self/fd"))


def _leak0(engine: AsyncEngine, before: tuple[set[str], int]) -> None:
    """Soon nothing is held."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        names, num_handles = _held()
        if not engine.llm.engine.has_work and names <= before[0] | _lasting(names) and num_handles <= before[1]:
            break
        time.sleep(0.01)
    names, num_handles = _held()
    scheduler = engine.llm.engine.scheduler
    assert not scheduler.waiting, "requests wait"
    assert not scheduler.running, "requests run"
    assert names <= before[0] | _lasting(names), "threads are left"
    assert num_handles <= before[1], "file handles are left"


def _lasting(names: set[str]) -> set[str]:
    """Threads of the engine, which it keeps."""
    return {name for name in names if name.startswith("foretoken-")}
