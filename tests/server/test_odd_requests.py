"""Requests of odd content: giant prompts, broken text, special tokens written out; and what errors say of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from foretoken.backend.local import LocalBackend
from foretoken.errors import ContextLengthError
from foretoken.server.api.app import create_app
from foretoken.server.api.body import read_json
from foretoken.server.api.errors import ApiError, clean, of_exception
from tests.helpers.fake_backend import FakeBackend
from tests.helpers.http import client_of, run
from tests.server.test_validation import CHAT, HELLO, TEXT, Trial, texts, trial

__all__ = ["trial"]  # fixtures


def test_giant_prompt(backend: LocalBackend) -> None:
    """Case 18: token ids, and 2 MB of text."""
    app = create_app(backend)
    context = backend.info.max_model_len
    loops: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            loops.append(time.perf_counter() - began)

    async def ask() -> list[Any]:
        watcher = asyncio.create_task(watch())
        found = []
        async with client_of(app) as client:
            for body in (
                {"prompt": [5] * (context + 1), "max_tokens": 3},
                {"prompt": [5] * (context + 1), "max_tokens": 3, "stream": True},
                {"prompt": "word " * (2 * 10**6 // 5), "max_tokens": 3},
            ):
                response = await client.post(TEXT, json=body)
                found.append((response.status_code, response.json()["error"]))
        watcher.cancel()
        return found

    found = run(ask())
    assert found[0] == found[1]  # streamed or not
    for (status, error), more in zip(found, ("", "", " or more"), strict=True):  # the text is not counted whole
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert (error["n_ctx"], error["max_tokens"]) == (context, 3)
        assert error["n_prompt_tokens"] > context
        # Clients that show the text alone know by these words that the prompt must be shortened.
        assert f"this model's maximum context length is {context} tokens" in error["message"]
        assert f"the prompt has {error['n_prompt_tokens']}{more};" in error["message"]
        assert "context_length_exceeded" in error["message"]
        assert error["message"].startswith(f"{error['param']}: ")
    assert loops  # tokenising left the loop free to turn


def test_invalid_utf8_request(trial: Trial, backend: LocalBackend) -> None:
    """Case 19."""
    trial.refused(TEXT, b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud83d"}', b'{"prompt": "a\\udc00b"}')
    trial.refused(TEXT, b'{"prompt": ["\\ud800"], "stop": "a"}', b'{"prompt": "a", "stop": ["\\udfff"]}')
    app = create_app(backend)

    async def ask() -> list[int]:
        async with client_of(app) as client:
            odd = ["a\0b", "\u202eabc\u202c", "e" + "\u0301" * 10**3, "\U0001f468\u200d\U0001f469"]
            return [(await client.post(TEXT, json={"prompt": text, "max_tokens": 1})).status_code for text in odd]

    assert run(ask()) == [200] * 4


def test_special_tokens_as_text(backend: LocalBackend) -> None:
    """Case 20."""
    llm = backend.engine.llm
    assert llm.tokenizer is not None
    special = llm.tokenizer.token(next(iter(llm.tokenizer.special_ids)))
    assert special
    spelt = [{"role": "user", "content": f"say {special} now, {special}"}]
    ids = llm.encode_chat(spelt)
    assert not set(ids) & llm.tokenizer.special_ids
    assert llm.tokenizer.decode(ids) == llm.render_chat(spelt)
    app = create_app(backend)

    async def ask() -> int:
        async with client_of(app) as client:
            body = {"messages": spelt, "max_tokens": 1, "temperature": 0}
            return int((await client.post(CHAT, json=body)).json()["usage"]["prompt_tokens"])

    assert run(ask()) == len(ids)


def test_template_options_reach_the_template(backend: LocalBackend) -> None:
    app = create_app(backend)

    async def ask(**fields: Any) -> int:
        async with client_of(app) as client:
            response = await client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, **fields})
            return int(response.json()["usage"]["prompt_tokens"])

    plain = run(ask())
    assert run(ask(chat_template_kwargs={"enable_thinking": True})) > plain
    assert run(ask(chat_template_kwargs={"enable_thinking": False})) == plain


SECRETS = (
    "/home/user/models/target/config.json",
    "C:\\Users\\me\\model.gguf",
    "~/.ssh/id",
    "/srv/v1/models",
    "/v1/models/target",
    "0x7f3a9c01beef",
    "10.1.2.3:8000",
)


def test_error_text_clean(trial: Trial) -> None:
    """Case 23."""
    for secret in SECRETS:
        assert secret not in clean(f"cannot read {secret} now")
    assert "a b" in clean("a\nb")
    assert clean("see /v1/models") == "see /v1/models"  # no file, but the remedy
    assert len(clean("é" * 5000).encode()) <= 1024
    for error in (RuntimeError("secret /a/b"), ContextLengthError("prompt", "9 tokens", "x" * 5000)):
        made = of_exception(error, 1)
        assert len(made.detail.encode()) <= 1024
        assert "/a/b" not in made.detail
    marker = "purple-elephant"
    bodies = [texts(stop=[marker] * 9), texts(model=marker), texts(spec={"drafter": marker}), texts(n=marker)]
    bodies += [texts(service_tier=marker), texts(logit_bias={marker: 1}), texts(metadata={"slice": marker * 9})]
    bodies += [texts(spec={marker: 1}), texts(response_format={"type": marker}), texts(spec={"rule": marker})]
    for status, answer in trial.post(TEXT, *bodies):
        assert status in (400, 404)
        assert marker not in answer["error"]["message"]
        assert "Traceback" not in answer["error"]["message"]
    broken = Trial(backend=FakeBackend())
    broken.backend.refusal = RuntimeError(f"secret {SECRETS[0]}")
    ((status, answer),) = broken.post(TEXT, texts())
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert "secret" not in msgspec.json.encode(answer).decode()


def test_strict_reader_takes_what_json_allows() -> None:
    assert read_json(b' {"a": [1, 2.5, null, true, "\\ud83d\\ude00", "x"], "b": {}} ') == {
        "a": [1, 2.5, None, True, "😀", "x"],
        "b": {},
    }
    with pytest.raises(ApiError, match="surrogate"):
        read_json(b'{"\\ud83d": 1}')
