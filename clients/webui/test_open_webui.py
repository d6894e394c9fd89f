"""Open WebUI, unmodified, before SmolLM2, in a headless browser: a chat of two turns is typed and answered.

Run with `make open-webui`; OPEN_WEBUI is its program.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, started
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(ROOT))
from tests.server.serving import chromium

START_S, ANSWER_MS = 400, 180_000  # its first start makes a database of some 60 steps
SETTINGS = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "of-this-test",
    "ENABLE_OLLAMA_API": "False",
    "OPENAI_API_KEY": "none",
    "OFFLINE_MODE": "True",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",  # else it fetches a model for embeddings
    "RAG_EMBEDDING_ENGINE": "openai",
    "ANONYMIZED_TELEMETRY": "false",
    "SCARF_NO_ANALYTICS": "true",
}


def text_at(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def answers(url: str) -> bool:
    try:
        return bool(text_at(url))
    except OSError:
        return False


def statuses(server: str) -> dict[str, float]:
    """Requests for chats so far, by the code of their answer."""
    lines = text_at(f"{server}/metrics").splitlines()
    own = [line for line in lines if line.startswith("foretoken_http_requests_total") and "chat/completions" in line]
    return {line.split('code="')[1][:3]: float(line.rpartition(" ")[2]) for line in own}


@pytest.fixture(scope="module")
def server(folder: Path, cache: Path) -> Iterator[str]:
    """SmolLM2 with a template that takes tools, which Open WebUI offers in every chat."""
    with started(folder, cache, "--default-temperature", "0", "--default-max-tokens", "48") as url:
        yield url


@pytest.fixture(scope="module")
def webui(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    data = tmp_path_factory.mktemp("webui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"DATA_DIR": str(data), "OPENAI_API_BASE_URL": f"{server}/v1", "HOME": str(data)}
    with (data / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [os.environ["OPEN_WEBUI"], "serve", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **SETTINGS, **own},
            stdout=log,
            stderr=log,
            cwd=data,
        )
        try:
            url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while not answers(f"{url}/health"):
                is_starting = process.poll() is None and time.monotonic() < until_s
                assert is_starting, (data / "log").read_text()[-3000:]
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def page(webui: str) -> Iterator[Any]:
    """Its first page, without the greeting that a new version shows; a script error fails the test."""
    assert chromium() is not None, "run this with make open-webui"
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        found = browser.new_page(locale="en-US", viewport={"width": 1200, "height": 850})
        found.set_default_timeout(60_000)
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.goto(webui)
        found.get_by_role("button", name="Okay, Let's Go!").click()
        yield found
        browser.close()
    assert errors == []


def ask(page: Any, question: str, turn: int) -> str:
    """The text of answer number `turn`, once it is complete: its button to copy it is shown then."""
    page.click("#chat-input")
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    page.locator(".copy-response-button").nth(turn).wait_for(timeout=ANSWER_MS)
    return str(page.locator(".chat-assistant").nth(turn).inner_text()).strip()


def test_a_chat_of_two_turns(page: Any, server: str) -> None:
    assert ask(page, "Say hello.", 0)
    assert ask(page, "And goodbye.", 1)
    found = statuses(server)
    assert set(found) == {"200"}
    assert found["200"] >= 2
