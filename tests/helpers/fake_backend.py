"""A backend without a model: it answers from a script, so that what HTTP makes of events can be seen alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from foretoken import SpecConfig
from foretoken.backend.call import AnswerEnded, Begun, Call, Event, ModelInfo, Piece, State, TextToEncode, TokenEvent
from tests.helpers.workers import crossed

INFO = ModelInfo(
    name="fake",
    max_model_len=2048,
    vocab_size=4096,
    eos_token_ids=(0,),
    eos_token="<eos>",
    bos_token=None,
    pad_token=None,
    has_tokenizer=True,
    has_chat_template=True,
    default_spec=SpecConfig(),
    max_waiting=64,
)
# `RequestStats.as_dict()` of an answer of two tokens
STATS: dict[str, Any] = {
    "num_steps": 2,
    "num_drafts": 0,
    "num_drafted": 0,
    "num_probed": 0,
    "num_preempted": 0,
    "num_accepted": 0,
    "num_rejected": 0,
    "num_cut": 0,
    "num_emitted": 2,
    "num_prompt_tokens": 3,
    "num_cached_tokens": 0,
    "acceptance_rate": 0.0,
    "estimated_speedup": None,
    "draft_s": 0.0,
    "verify_s": 0.01,
    "prompt_s": 0.01,
    "queued_s": 0.001,
    "ttft_s": 0.02,
    "inter_token_s": 0.01,
    "drafted_by": {},
    "accepted_by": {},
    "draft_failures": {},
    "accepted_per_position": [],
    "rule": "greedy",
    "lossy": False,
    "total_s": 0.03,
    "tokens_per_s": 100.0,
    "disabled_drafters": {},
}


def piece(index: int, text: str, step: int = 0) -> Piece:
    """A piece of one plain token."""
    return Piece(index, text, (TokenEvent(7, text, text.encode(), "plain", None, step),))


def ended(index: int, text: str, reason: str = "stop", num_tokens: int = 2, **stats: Any) -> AnswerEnded:
    """The end of an answer."""
    return AnswerEnded(index, reason, text, num_tokens, STATS | stats)


class FakeGeneration:
    """Gives the events of a script; an exception in it is raised, an `asyncio.Event` awaited."""

    def __init__(self, script: Sequence[Event | Exception | asyncio.Event]) -> None:
        self._script = script
        self.num_cancelled = 0
        self._cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Event]:
        for item in self._script:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, asyncio.Event):
                waits = {asyncio.create_task(item.wait()), asyncio.create_task(self._cancelled.wait())}
                _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in pending:
                    task.cancel()
                if self._cancelled.is_set():
                    yield ended(0, "", "abort")
                    return
            else:
                yield item
                await asyncio.sleep(0)  # a real engine never has everything at once

    async def cancel(self) -> None:
        """See `Generation`."""
        self.num_cancelled += 1
        self._cancelled.set()


class FakeBackend:
    """See `Backend`; keeps the calls and generations that it opened."""

    def __init__(self, script: Sequence[Event | Exception | asyncio.Event] = (), info: ModelInfo = INFO) -> None:
        self.script = script or (Begun(((1, 2, 3),)), piece(0, "Hel"), piece(0, "lo", 1), ended(0, "Hello"))
        self.calls: list[Call] = []
        self.generations: list[FakeGeneration] = []
        self.refusal: Exception | None = None
        self.state: State = "ready"
        self.info: ModelInfo | None = info

    async def open(self, call: Call) -> FakeGeneration:
        """See `Backend`."""
        assert crossed(call, Call) == call  # whatever HTTP lets through reaches a worker unchanged
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal
        self.generations.append(FakeGeneration(self.script))
        return self.generations[-1]

    async def tokenize(self, text: TextToEncode) -> list[int]:
        """See `Backend`."""
        is_chat = text.messages is not None
        whole = str([text.messages, text.tools, text.template_options]) if is_chat else text.prompt or ""
        return list(range(len(whole)))

    async def spell(self, token_ids: Sequence[int]) -> list[str | None]:
        """See `Backend`."""
        return list(map(str, token_ids))

    async def detokenize(self, token_ids: Sequence[int], has_specials: bool = False) -> str:
        """See `Backend`."""
        return "".join(map(chr, token_ids))

    async def stats(self) -> dict[str, Any]:
        """See `Backend`."""
        return {}
