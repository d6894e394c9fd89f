"""Clients that read quickly, alone and beside clients that hardly read: the gaps between their events."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from studies.serving_load.client import StreamAnswer, ask
from studies.serving_load.server import KEY, LoadedServer
from studies.serving_load.soak import request_body
from studies.serving_load.statistics import quantile_of

NUM_FAST = 4
NUM_OTHERS = 8
_PAUSE_S = 0.5  # behind each event: far behind what is written


async def beside(server: LoadedServer, slow: bool, num_requests: int, seed: int) -> list[float]:
    """Gaps of `NUM_FAST` clients beside `NUM_OTHERS` that are as quick, or slow: the engine has the same to do."""
    rng, answers = random.Random(seed), list[StreamAnswer]()
    is_over = asyncio.Event()

    def body() -> dict[str, Any]:
        return request_body(server.model, rng, (128,)) | {"ignore_eos": True, "spec": {"drafter": None}}

    async def other() -> None:
        while not is_over.is_set():
            await ask(server.port, body(), KEY, pause_s=_PAUSE_S if slow else 0.0)

    async def fast() -> None:
        for _ in range(num_requests):
            answers.append(await ask(server.port, body(), KEY))

    others = [asyncio.create_task(other()) for _ in range(NUM_OTHERS)]
    await asyncio.gather(*(fast() for _ in range(NUM_FAST)))
    is_over.set()
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return [gap for answer in answers for gap in answer.gaps_s]


async def compare_slow(server: LoadedServer, num_requests: int, turns: int, seed: int) -> dict[str, Any]:
    """The 99th quantile of the fast clients' gaps beside quick and beside slow ones, turn by turn."""
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns):
        for slow in (False, True):
            gaps[slow] += await beside(server, slow, num_requests, seed + turn)
            await server.idle()
    quick, slowed = (quantile_of(gaps[slow], 0.99) for slow in (False, True))
    return {"itl_p99_beside_quick_s": quick, "itl_p99_beside_slow_s": slowed, "ratio": slowed / quick}
