"""E1 and E2 on the real model over HTTP: neither a cached prompt nor company in the batch changes an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from foretoken import LLM, SpecConfig
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server.api.app import create_app
from tests.helpers.http import client_of, run

ASKED = (
    "What is the capital of France, and which river runs through it?",
    "Write a Python function that reverses a list of numbers in place.",
    "Summarise in one sentence: the meeting was moved from Monday to Thursday because two people are ill.",
)


def _body(number: int, temperature: float) -> dict[str, Any]:
    drafter = (None, "ngram", "suffix")[number % 3]
    # A seed gives the same text whatever was drafted under this rule alone; `suffix` remembers earlier answers.
    spec = {"drafter": drafter, "rule": "coupled" if drafter and temperature else "auto"}
    return {
        "messages": [{"role": "user", "content": f"{number}. {ASKED[number % len(ASKED)]}"}],
        "max_tokens": 12,
        "temperature": temperature,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "cache_salt": f"salt {number}",
        "spec": spec,
    }


def _answer(body: dict[str, Any]) -> tuple[str, Any, int]:
    """Text, log-probabilities and cached prompt tokens of a response."""
    choice = body["choices"][0]
    details = body["usage"].get("prompt_tokens_details") or {}
    return choice["message"]["content"], choice["logprobs"], details.get("cached_tokens", 0)


def test_e1_e2_cold_cached_and_together(smollm2_file: Path) -> None:
    bodies = [_body(number, temperature) for number in range(3) for temperature in (0.0, 1.0)]
    llm = LLM(smollm2_file, SpecConfig("auto"), cache_tokens=4096, profile="off")
    with llm, AsyncEngine(llm) as engine:
        app = create_app(LocalBackend(engine, "smollm2"))

        async def ask(together: bool) -> list[tuple[str, Any, int]]:
            async with client_of(app) as client:
                waiting = [client.post("/v1/chat/completions", json=body) for body in bodies]
                responses = await asyncio.gather(*waiting) if together else [await one for one in waiting]
            assert all(response.status_code == 200 for response in responses), responses[0].text
            return [_answer(response.json()) for response in responses]

        cold = run(ask(together=False))
        cached = run(ask(together=False))
        together = run(ask(together=True))
    assert cold[0][2] == 0
    assert all(num_cached >= 16 for *_, num_cached in cached)
    assert [answer[:2] for answer in cached] == [answer[:2] for answer in cold]
    assert [answer[:2] for answer in together] == [answer[:2] for answer in cold]
