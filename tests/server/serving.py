"""A headless Chromium for tests, and a server for it to look at."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

FOLDER = Path(__file__).resolve().parents[2] / ".browser"  # where scripts/get_browser.sh puts one
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """The browser to use: $FORETOKEN_CHROMIUM, the one in `FOLDER`, or one of the system."""
    named = os.environ.get("FORETOKEN_CHROMIUM")
    own = FOLDER / "chromium"
    return named or (str(own) if own.is_file() else next(filter(None, map(shutil.which, _NAMES)), None))


@contextmanager
def opened_browser() -> Iterator[Any]:
    """A browser of playwright while the block runs."""
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of `app`, served from a thread while the block runs."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, http="h11", log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        (socket,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
