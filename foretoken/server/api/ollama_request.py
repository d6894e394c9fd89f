"""The bodies of `/api/chat`, `/api/generate` and `/api/show`, and the requests that they stand for."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from foretoken.server.api.body import ListOf, RequestPart
from foretoken.server.api.errors import invalid, unsupported
from foretoken.server.api.forms import ResponseFormat, json_form
from foretoken.server.api.messages import ends_open
from foretoken.server.api.schemas import (
    MAX_WHOLE,
    ChatRequest,
    CompletionRequest,
    Number,
    OwnNames,
    Penalty,
    RepetitionPenalty,
    SamplingFields,
    Share,
    ShortText,
    Stop,
    Temperature,
    Whole,
    wrong_shape,
)
from foretoken.server.api.tools import ToolList


def _as_format(value: object) -> object:
    """ "json", "" for free text, or a schema; checked here: errors of a union name its branches."""
    if value in (None, "", "json") or isinstance(value, dict):
        return value
    raise wrong_shape('must be "json" or a JSON schema')


Format = Annotated[
    str | dict[str, Any] | None,
    BeforeValidator(_as_format),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"enum": ["", "json"]}, {"type": "object"}]}),
]


class OllamaOptions(BaseModel):
    """`options`: how tokens are drawn. Those that say how a model is loaded are taken and have no effect."""

    model_config = ConfigDict(strict=True, extra="allow")

    num_predict: Annotated[int, Field(ge=-2, le=MAX_WHOLE)] | None = None
    temperature: Temperature | None = None
    top_k: Whole | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Stop = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # without effect
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_thread: Any = None
    main_gpu: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    low_vram: Any = None
    numa: Any = None
    penalize_newline: Any = None
    repeat_last_n: Any = None
    # refused where they would change what is drawn
    mirostat: Number | None = None
    typical_p: Number | None = None
    tfs_z: Number | None = None


# Options that are called as fields of a request are.
_SAME_NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


class OllamaFields(SamplingFields):
    """What `/api/chat` and `/api/generate` share."""

    own_names: ClassVar[OwnNames] = {
        **{name: (f"options.{name}",) for name in _SAME_NAMES},
        "max_tokens": ("options.num_predict",),
        "repetition_penalty": ("options.repeat_penalty",),
        "response_format": ("format",),
        "logprobs": ("top_logprobs",),
    }

    options: OllamaOptions | None = None
    format: Format = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    keep_alive: Any = None  # without effect: the model stays

    @property
    def is_stream(self) -> bool:
        """Ollama streams unless told otherwise."""
        return self.stream is not False


class OllamaChat(OllamaFields):
    """The body of `/api/chat`."""

    messages: ListOf[dict[str, Any]] = Field(default_factory=list)
    tools: ToolList | None = None

    @property
    def is_load(self) -> bool:
        """Whether nothing is asked: the client wants the model to be loaded."""
        return not self.messages


class OllamaGenerate(OllamaFields):
    """The body of `/api/generate`."""

    own_names: ClassVar[OwnNames] = {**OllamaFields.own_names, "messages": ("prompt",)}

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[Any] | None = None
    images: list[Any] | None = None

    @property
    def is_load(self) -> bool:
        """See `OllamaChat`."""
        return not self.prompt and not self.suffix


class ShowRequest(RequestPart):
    """The body of `/api/show`; `name` is the earlier name of `model`."""

    model: ShortText | None = None
    name: ShortText | None = None


def as_chat(body: OllamaChat) -> ChatRequest:
    """The chat request that `/api/chat` answers.

    Raises:
        ApiError: a message or an option that does not exist here.
    """
    return _chat(body, _messages(body.messages), body.tools)


def as_prompted_chat(body: OllamaGenerate) -> ChatRequest:
    """The chat request that `/api/generate` answers where the chat template is used.

    Raises:
        ApiError: see `as_chat`.
    """
    _refuse_features(body)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _chat(body, [*system, {"role": "user", "content": body.prompt}], None)


def as_completion(body: OllamaGenerate) -> CompletionRequest:
    """The completion request that `/api/generate` answers where it is not: `raw`, or `suffix`. Raises as `as_chat`."""
    _refuse_features(body)
    if body.system:
        raise unsupported("system", "is not written where the chat template is not used; write it into prompt")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    made = {"prompt": [body.prompt], "suffix": body.suffix or None, "logprobs": logprobs}
    return CompletionRequest.model_construct(**_shared(body) | made)


def _chat(body: OllamaFields, messages: list[dict[str, Any]], tools: ToolList | None) -> ChatRequest:
    think = body.think
    options = {} if think is None else {"enable_thinking": bool(think), "thinking": bool(think)}
    made = {
        "messages": messages,
        "continue_final_message": ends_open(messages),
        "tools": tools,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "reasoning_effort": think if isinstance(think, str) else None,
        "chat_template_kwargs": options,
    }
    return ChatRequest.model_construct(**_shared(body) | made)


def _shared(body: OllamaFields) -> dict[str, Any]:
    """Fields of `SamplingFields` with what `options` and `format` say in their place."""
    if (body.n or 1) > 1:
        raise unsupported("n", "an answer is one; leave n out")
    options = body.options or OllamaOptions()
    for name, harmless in (("mirostat", 0), ("typical_p", 1), ("tfs_z", 1)):
        if getattr(options, name) not in (None, harmless):
            raise unsupported(f"options.{name}", f"other than {harmless} is not supported; use top_p or min_p")
    if options.num_predict == 0:
        raise invalid("options.num_predict", "must be at least 1, or -1 for an answer up to the end of the context", 0)
    asked = {name: getattr(options, name) for name in _SAME_NAMES} | {
        "max_tokens": None if options.num_predict is None or options.num_predict < 0 else options.num_predict,
        "repetition_penalty": options.repeat_penalty,
        "seed": None if options.seed is None or options.seed < 0 else options.seed,
        "response_format": _format(body.format),
    }
    given = {name: getattr(body, name) for name in SamplingFields.model_fields}
    return given | {name: value for name, value in asked.items() if value is not None} | {"stream": body.is_stream}


def _format(asked: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not asked:
        return None
    if isinstance(asked, str):
        return ResponseFormat.model_construct(type="json_object")
    return json_form(asked)


def _refuse_features(body: OllamaGenerate) -> None:
    if body.images:
        raise unsupported("images", "is not supported: this model reads text only")
    if body.template:
        raise unsupported("template", "is not supported: write the whole prompt and send raw")
    if body.context:
        raise unsupported("context", "is not supported: no state is kept; send the conversation to /api/chat")


def _messages(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Ollama's results name their call by its order, or by the function; here each has an id.

    Raises:
        ApiError: images, calls that are none, or a result of no call.
    """
    made: list[dict[str, Any]] = []
    waiting = _OpenCalls()
    for place, turn in enumerate(turns):
        param, role = f"messages.{place}", turn.get("role")
        if turn.get("images"):
            raise unsupported(f"{param}.images", "is not supported: this model reads text only")
        message: dict[str, Any] = {"role": role, "content": turn.get("content") or ""}
        if role == "assistant" and turn.get("tool_calls"):
            calls = _calls(f"{param}.tool_calls", turn["tool_calls"], f"call_{place}")
            for call in calls:
                waiting.add(call["id"], call["function"]["name"])
            message["tool_calls"] = calls
        elif role == "tool":
            message["tool_call_id"], message["name"] = _answered(param, turn, waiting)
        made.append(message)
    return made


def _calls(param: str, calls: object, prefix: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(param, "must be a list of calls")
    made = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise invalid(f"{param}.{place}", "a call has a function with a name and an object as arguments")
        try:
            text = json.dumps(arguments or {}, ensure_ascii=False)
        except RecursionError:
            raise invalid(f"{param}.{place}.function.arguments", "is nested too deeply") from None
        call_id = f"{prefix}_{place}"
        made.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": text}})
    return made


class _OpenCalls:
    """Calls without a result, in their order. Of a chat with many, none is looked at twice."""

    def __init__(self) -> None:
        self._functions: OrderedDict[str, str] = OrderedDict()  # by the id of a call
        self._ids: defaultdict[str, deque[str]] = defaultdict(deque)  # by function; answered ones may be left

    def add(self, call_id: str, function: str) -> None:
        self._functions[call_id] = function
        self._ids[function].append(call_id)

    def take(self, function: object) -> tuple[str, str] | None:
        """Id and function of the first call of `function` (None: of any), which then waits no more; None: none."""
        if function is None:
            return self._functions.popitem(last=False) if self._functions else None
        ids = self._ids.get(function) if isinstance(function, str) else None
        while ids:
            call_id = ids.popleft()
            if call_id in self._functions:
                return call_id, self._functions.pop(call_id)
        return None


def _answered(param: str, turn: Mapping[str, Any], waiting: _OpenCalls) -> tuple[str, str]:
    """The call that a result belongs to: the first of its function, or the first, which then waits no more."""
    found = waiting.take(turn.get("tool_name") or turn.get("name"))
    if found is None:
        raise invalid(f"{param}.tool_name", "must be the function of a call in a message before it")
    return found
