"""What is asked of a backend, and how it answers: `Call`, the events of an answer, and the two protocols.

Events are values that msgspec can write and read, so that they can cross a process boundary. A call is one prompt or
several, each with `n` answers; answer `choice` of prompt `p` has index `p * n + choice`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from foretoken.config import SamplingParams, SpecConfig


class Alternative(msgspec.Struct, frozen=True, array_like=True):
    """One of the most probable tokens at a position. `data` are its bytes, None where the tokenizer does not tell."""

    token_id: int
    text: str
    data: bytes | None
    logprob: float


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """One emitted token, or one of the prompt (`kind` "prompt").

    `text` is what the token writes alone (a token with a part of a character writes U+FFFD; `data` are its bytes).
    `drafter`, `kind`, `step` and `probability` are its provenance (`core.TokenOrigin`). `logprob` and `rank` are None
    unless log-probabilities were asked for.
    """

    token_id: int
    text: str
    data: bytes | None
    kind: str
    drafter: str | None = None
    step: int = 0
    probability: float | None = None
    logprob: float | None = None
    rank: int | None = None
    top: tuple[Alternative, ...] = ()


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The call was checked, tokenised and queued; always the first event. One list of prompt tokens for each prompt."""

    prompt_ids: tuple[tuple[int, ...], ...]


class RoundEvent(msgspec.Struct, frozen=True, array_like=True):
    """What was drafted for one answer in one step, and its outcome (`Call.trace`).

    `time_s` counts from the request's arrival. `token_ids`, `texts` and `parents` (-1: the last emitted token) describe
    the draft, `probabilities` the chance of each to be accepted, None where the rule did not compute it. `num_planned`
    tokens might have been drafted. `why` says why nothing, or not all, was drafted or accepted; "" if all was.
    """

    step: int
    time_s: float
    draft_s: float
    verify_s: float
    batch_size: int
    num_planned: int
    drafter: str | None
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float | None, ...]
    num_accepted: int
    why: str


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """What one step added to one answer: text that cannot be taken back, and tokens. `round` only with `Call.trace`."""

    index: int
    text: str
    tokens: tuple[TokenEvent, ...]
    round: RoundEvent | None = None


class AnswerEnded(msgspec.Struct, frozen=True, tag="ended"):
    """One answer is complete. `finish_reason` is "stop", "length" or "abort"; `stats` is `RequestStats.as_dict()`.

    `prompt` has the prompt's tokens with their log-probabilities where those were asked for; () otherwise.
    `prediction` counts the tokens of `SamplingParams.prediction`: those at places that the answer followed, each place
    once, and all others; None without a prediction.
    """

    index: int
    finish_reason: str
    text: str
    num_tokens: int
    stats: dict[str, Any]
    prompt: tuple[TokenEvent, ...] = ()
    prediction: tuple[int, int] | None = None


class AnswerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """One answer failed; the others of the call go on. `error` is the name of a class in `foretoken.errors`; if that is
    an `InputError`, `field` is the parameter that could not be honoured and `message` the remedy.
    """

    index: int
    error: str
    message: str
    field: str = ""


Event = Begun | Piece | AnswerEnded | AnswerFailed


class ModelInfo(msgspec.Struct, frozen=True):
    """What is known of the served model once it is loaded.

    `tool_style` is how its chat template lets it write calls (`local.tool_style`), None where it takes no tools.
    `template_roles` are the roles of messages that its chat template names.
    `fim_tokens` are those before prefix, suffix and middle of a text that is filled in, None without such.
    `advised_sampling`: see `model.advised`.
    `missing_draft` is the draft that could not be loaded: the engine answers without it. None where nothing is missing.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    has_tokenizer: bool
    has_chat_template: bool
    default_spec: SpecConfig
    max_waiting: int
    max_batch_size: int = 1
    num_parameters: int | None = None
    tool_style: str | None = None
    template_roles: tuple[str, ...] = ()
    fim_tokens: tuple[tuple[int, ...], int, int] | None = None
    missing_draft: str | None = None
    advised_sampling: Mapping[str, float] = {}


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


class TextToEncode(msgspec.Struct, frozen=True):
    """The text `prompt`, or the conversation `messages` under the chat template, up to where its answer begins; see
    `Call`. `tenant` is whose it is: see `SamplingParams.tenant`. `must_fit`: see `LLM.encode_prompt`.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    add_special_tokens: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] = {}
    tenant: str = ""
    must_fit: bool = False

    @classmethod
    def of(cls, call: Call) -> TextToEncode:
        """The conversation of a call."""
        return cls(
            messages=call.messages, tools=call.tools, template_options=call.template_options, tenant=call.params.tenant
        )


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

    async def tokenize(self, text: TextToEncode) -> list[int]:
        """Token ids of a text.

        Raises:
            InputError, UnavailableError: see `open`; ContextLengthError: the same, of a text that must fit the context.
        """

    async def spell(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's own spelling of each id, None for one without a token.

        Raises:
            InputError, UnavailableError: see `open`.
        """

    async def detokenize(self, token_ids: Sequence[int], has_specials: bool = False) -> str:
        """The text of token ids; `has_specials`: with special tokens as they are spelt.

        Raises:
            InputError, UnavailableError: see `open`.
        """

    async def stats(self) -> dict[str, Any]:
        """`EngineStats.as_dict()` with gauges: `num_running`, `num_waiting`, `kv_cache_usage`, `draft_kv_cache_usage`
        (0 to 1), and `invariants` (blocks free, used and total of every pool).

        Raises:
            UnavailableError: see `open`.
        """
