"""litellm, as `openai/` and as `hosted_vllm/`."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest
from conftest import MODEL

MESSAGES = [{"role": "user", "content": "A function that adds."}]
ROUTES = ["openai", "hosted_vllm"]


def options(base_url: str, route: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model": f"{route}/{MODEL}", "api_base": base_url, "api_key": "none", "messages": MESSAGES}
    return found | {"temperature": 0, "max_tokens": 12, "num_retries": 0}


@pytest.mark.parametrize("route", ROUTES)
def test_completion_and_stream_agree(base_url: str, route: str) -> None:
    whole: Any = litellm.completion(**options(base_url, route))
    stream: Any = litellm.completion(**options(base_url, route), stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == (
        whole.choices[0].message.content
    )
    assert whole.usage.completion_tokens == 12


@pytest.mark.parametrize("route", ROUTES)
def test_a_forced_call(base_url: str, route: str) -> None:
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "switch", "parameters": schema}}
    choice = {"type": "function", "function": {"name": "switch"}}
    found: Any = litellm.completion(**(options(base_url, route) | {"max_tokens": 60}), tools=[tool], tool_choice=choice)
    assert found.choices[0].message.tool_calls[0].function.name == "switch"


def test_errors_keep_their_kind(base_url: str) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**(options(base_url, "openai") | {"temperature": -1}))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**(options(base_url, "openai") | {"model": "openai/another"}))


def test_leaving_a_stream(base_url: str, server: str) -> None:
    """litellm closes the connection; the server then has nothing left to do for it."""

    async def leave() -> None:
        stream: Any = await litellm.acompletion(**(options(base_url, "openai") | {"max_tokens": 1000}), stream=True)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave())
    whole: Any = litellm.completion(**options(base_url, "openai"))
    assert whole.choices[0].message.content
