"""Serve a model folder on a free port of this machine until standard input ends; prints the address once it listens."""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading

import uvicorn

from foretoken import LLM
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.local import LocalService


class _Announced(uvicorn.Server):
    """Prints its address when it listens."""

    async def startup(self, sockets: list | None = None) -> None:  # type: ignore[type-arg]
        await super().startup(sockets)
        port = self.servers[0].sockets[0].getsockname()[1]
        print(f"http://127.0.0.1:{port}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--max-request-tokens", type=int, default=1 << 20)
    args = parser.parse_args()
    config = ApiConfig(max_request_tokens=args.max_request_tokens, default_max_tokens=16)
    with LLM(args.folder, dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        app = create_app(LocalService(engine, "reference"), config)
        settings = uvicorn.Config(app, "127.0.0.1", 0, http="h11", ws="none", log_level="warning")
        server = _Announced(settings)

        def end_with_input() -> None:
            sys.stdin.read()
            server.should_exit = True

        threading.Thread(target=end_with_input, daemon=True).start()
        asyncio.run(server.serve())


if __name__ == "__main__":
    main()
