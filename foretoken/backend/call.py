"""`Backend`: what the HTTP layer asks of an engine, whether it runs in this process or in a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from foretoken.backend.events import Event, ModelInfo
from foretoken.config import SamplingParams, SpecConfig

State = Literal["loading", "ready", "draining", "restarting", "failed"]


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """One HTTP request: `prompts`, or one conversation `messages`; each prompt is answered `params.n` times. What a
    process sends to another one is read with all checks of `SamplingParams` and `SpecConfig`.

    `spec` None: the server's default. `template_options` go to the chat template (white-listed by the HTTP layer).
    `prediction` is the text that the answers are expected to resemble: counted in any case (`AnswerEnded.prediction`)
    and drafted if it stands in `params.prediction` too; it is read as plain text, without special tokens. `trace`:
    every piece says what was drafted for it (`events.RoundEvent`).
    """

    params: SamplingParams
    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] = {}
    spec: SpecConfig | None = None
    prediction: str | None = None
    trace: bool = False


class Generation(Protocol):
    """A call that runs. Iterating gives its events: `Begun`, then pieces and ends of all answers in any order."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Events from the first one on. Ends after every answer ended or failed.

        Raises:
            WorkerDiedError: the engine's process died.
        """

    async def cancel(self) -> None:
        """Free everything that the call holds; without effect after its end. May be called more than once."""


class Backend(Protocol):
    """An engine as the HTTP layer sees it."""

    @property
    def state(self) -> State:
        """Whether calls are taken."""

    @property
    def info(self) -> ModelInfo | None:
        """The served model; None until it is loaded for the first time."""

    async def open(self, call: Call) -> Generation:
        """Check, tokenise and queue a call: all of its answers or none.

        Raises:
            InputError, ContextLengthError, CapacityError: it can never run.
            OverloadedError: too many requests wait.
            UnavailableError: the engine takes no calls now.
            ForetokenError: anything else that the engine refuses.
        """

    async def tokenize(
        self, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text, or of a conversation under the chat template.

        Raises:
            InputError, UnavailableError: see `open`.
        """

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
            InputError, UnavailableError: see `open`.
        """

    async def stats(self) -> dict[str, Any]:
        """`EngineStats.as_dict()` with gauges: `num_running`, `num_waiting`, `kv_cache_usage`, `draft_kv_cache_usage`
        (0 to 1), and `invariants` (blocks free, used and total of every pool).

        Raises:
            UnavailableError: see `open`.
        """
