"""What HTTP costs: tokens per second of 16 streams through the server, and of the same requests through the library.

Both run in a process of their own, turn by turn, so that what else the machine does meets both.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from foretoken import LLM, AsyncEngine, SamplingParams, SpecConfig
from studies.serving_load.client import ask
from studies.serving_load.server import KEY, LoadedServer
from studies.serving_load.soak import request_body

NUM_STREAMS = 16
MAX_TOKENS = 200


def bodies(model: str, seed: int, rounds: int) -> list[dict[str, Any]]:
    """The requests of one measurement, alike for both sides."""
    rng = random.Random(seed)
    found = [request_body(model, rng, (MAX_TOKENS,)) for _ in range(NUM_STREAMS * rounds)]
    return [{**body, "ignore_eos": True, "spec": {"drafter": None}} for body in found]


async def through_http(server: LoadedServer, requests: Sequence[dict[str, Any]]) -> float:
    """Tokens per second of the server."""

    async def one(body: dict[str, Any]) -> int:
        answer = await ask(server.port, body, KEY)
        if answer.error:
            raise RuntimeError(f"a request failed: {answer.error}")
        return answer.num_tokens

    return await _tokens_per_s(requests, one)


async def through_library(engine: AsyncEngine, requests: Sequence[dict[str, Any]]) -> float:
    """Tokens per second of the library, streamed like the server's."""

    async def one(body: dict[str, Any]) -> int:
        params = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            seed=body["seed"],
            ignore_eos=True,
            tenant=body["cache_salt"],
        )
        count = 0
        async for piece in engine.stream(body["prompt"], params, SpecConfig()):
            count += len(piece.token_ids)
        return count

    return await _tokens_per_s(requests, one)


async def _tokens_per_s(requests: Sequence[dict[str, Any]], one: Any) -> float:  # noqa: ANN401 - a coroutine function
    waiting, count = list(requests), 0

    async def stream() -> None:
        nonlocal count
        while waiting:
            num_tokens = await one(waiting.pop())
            count += num_tokens

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_STREAMS):
            tasks.create_task(stream())
    return count / (time.perf_counter() - began_s)


class LibraryProcess:
    """The library in a process of its own, which measures when it is asked to."""

    def __init__(self, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "studies.serving_load.cost", *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def measure(self, seed: int, rounds: int) -> float:
        """Tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([seed, rounds]) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the library ended")
        return line


def compare(server: LoadedServer, library: LibraryProcess, turns: int, rounds: int, seed: int) -> dict[str, Any]:
    """Both, turn by turn; the cost is the median over the turns."""
    found: list[dict[str, float]] = []
    for turn in range(turns + 1):
        requests = bodies(server.model, seed + turn, rounds)
        http = asyncio.run(through_http(server, requests))
        direct = library.measure(seed + turn, rounds)
        if turn:  # the first warms both up
            found.append({"http_tokens_per_s": http, "library_tokens_per_s": direct, "cost": 1 - http / direct})
    return {"num_streams": NUM_STREAMS, "turns": found, "cost_median": median(one["cost"] for one in found)}


def main() -> None:
    """The process of the library: a line of JSON for each measurement, until the input ends."""
    dtype, cache_tokens = sys.argv[1], int(sys.argv[2])
    with (
        LLM("reference:target", dtype=dtype, profile="off", cache_tokens=cache_tokens) as llm,
        AsyncEngine(llm) as engine,
    ):
        print("ready", flush=True)
        for line in sys.stdin:
            seed, rounds = json.loads(line)
            print(asyncio.run(through_library(engine, bodies("", seed, rounds))), flush=True)


if __name__ == "__main__":
    main()
