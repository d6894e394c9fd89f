"""The fields of a request, with their types and bounds: those of OpenAI, vLLM's extensions, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from foretoken.params import PRIORITIES, TEMPERATURES
from foretoken.server.api.body import ClosedPart, ListOf
from foretoken.server.api.forms import ResponseFormat, StructuredOutputs
from foretoken.server.api.tools import ToolChoice, ToolList

MAX_WHOLE = 2**31 - 1  # of counts without a limit of their own; each has one that the server's settings say
_MAX_TOKENS = 2**63 - 1  # a limit beyond the context, or beyond the vocabulary, is cut to it
_NAME_CHARS = 256

Whole = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Count = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
TokenLimit = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=TEMPERATURES[0], le=TEMPERATURES[1], allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(ge=1e-3, le=100, allow_inf_nan=False)]
NumDraft = Annotated[int, Field(ge=0, le=1024)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
ShortText = Annotated[str, Field(max_length=_NAME_CHARS)]
# What a body calls fields of the chat or the text that it stands for; of several names the first that it gives counts.
OwnNames = Mapping[str, tuple[str, ...]]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


def wrong_shape(message: str) -> PydanticCustomError:
    """The error of a validator for a value of another shape."""
    return PydanticCustomError("wrong_shape", "{message}", {"message": message})


def _as_bias(value: object) -> object:
    """JSON has texts as keys; token ids are numbers."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_shape("must map token ids to numbers")
    found: dict[int, Any] = {}
    for key, number in value.items():
        if not isinstance(key, str) or not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise wrong_shape("keys must be token ids")
        if isinstance(number, bool) or not isinstance(number, int | float) or not -100 <= number <= 100:
            raise wrong_shape("values must be numbers from -100 to 100")
        found[int(key)] = number
    return found


def _as_prompt(value: object) -> object:
    """A text, token ids, or a list of either; checked here, since a union over a million ids takes seconds."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong_shape("must be a text, a list of token ids, or a list of those, and not empty")
    if set(map(type, value)) == {int}:
        return [value]
    for item in value:
        if isinstance(item, str):
            continue
        if not isinstance(item, list) or set(map(type, item)) - {int}:
            raise wrong_shape("must be a text, a list of token ids, or a list of those; ids are whole numbers")
    return value


def _as_prediction(value: object) -> object:
    """The text of a prediction in OpenAI's shape; "" for null and for no content."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "content" or set(value) - {"type", "content"}:
        raise wrong_shape('must be {"type": "content", "content": text}')
    content = value.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong_shape("content must be a text or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong_shape('every part of content must be {"type": "text", "text": text}')
        texts.append(part["text"])
    return "".join(texts)


def _as_stop(value: object) -> object:
    """A text or texts, checked here: errors of a union name its branches, which no request has."""
    if value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value)):
        return value
    raise wrong_shape("must be a text or a list of texts")


def _as_items(value: object) -> object:
    """A text or the items of a conversation."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(x, dict) for x in value)):
        return value
    raise wrong_shape("must be a text, or a list of items that is not empty")


_TEXT_OR_IDS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
_PREDICTION_SCHEMA = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {
                "type": {"const": "content"},
                "content": {
                    "anyOf": [
                        {"type": "null"},
                        {"type": "string"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                                "required": ["type", "text"],
                            },
                        },
                    ]
                },
            },
            "required": ["type"],
            "additionalProperties": False,
        },
    ]
}
Prompts = Annotated[
    list[Any],
    BeforeValidator(_as_prompt),
    WithJsonSchema({"anyOf": [*_TEXT_OR_IDS["anyOf"], {"type": "array", "items": _TEXT_OR_IDS, "minItems": 1}]}),
]
Stop = Annotated[str | ListOf[str] | None, BeforeValidator(_as_stop)]
Items = Annotated[str | Annotated[ListOf[dict[str, Any]], Field(min_length=1)], BeforeValidator(_as_items)]
Prediction = Annotated[str | None, BeforeValidator(_as_prediction), WithJsonSchema(_PREDICTION_SCHEMA)]
LogitBias = Annotated[
    dict[int, float] | None,
    BeforeValidator(_as_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
            ]
        }
    ),
]


class StreamOptions(BaseModel):
    """How a stream is sent."""

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class SpecFields(ClosedPart):
    """Speculation for one request; an unknown field is an error here."""

    drafter: ShortText | None = None
    num_draft: NumDraft | Literal["auto"] | None = None
    rule: ShortText | None = None
    exact: bool | None = None


class OwnFields(ClosedPart):
    """What this server adds to a request; an unknown field is an error here."""

    trace: bool = False
    metrics: Literal["none", "summary", "detailed"] | None = None
    slice: Annotated[str, Field(max_length=64)] | None = None


class SamplingFields(BaseModel):
    """What requests for texts and for chats share."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)

    own_names: ClassVar[OwnNames] = {}

    model: ShortText | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias = None
    max_tokens: TokenLimit | None = None
    metadata: dict[str, Any] | None = None
    n: Count | None = None
    prediction: Prediction = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: ShortText | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None  # OpenAI's are signed
    service_tier: ServiceTier | None = None
    stop: Stop = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    user: ShortText | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=_MAX_TOKENS)] | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_TOKENS)] | None = None
    bad_words: ListOf[str] | None = None
    stop_token_ids: ListOf[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: ListOf[Whole] | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    logprob_token_ids: ListOf[Whole] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=_NAME_CHARS)] | None = None
    priority: Annotated[int, Field(ge=PRIORITIES[0], le=PRIORITIES[1])] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    # llama.cpp's
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    # ours, and the names under which others know `spec.num_draft`
    spec: SpecFields | None = None
    foretoken: OwnFields | None = None
    num_draft_tokens: NumDraft | None = None
    draft_num_predict: NumDraft | None = None
    speculative_n_max: NumDraft | None = Field(None, alias="speculative.n_max")

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatRequest(SamplingFields):
    """The body of `/v1/chat/completions`."""

    own_names: ClassVar[OwnNames] = {"max_tokens": ("max_tokens", "max_completion_tokens")}

    messages: Annotated[ListOf[dict[str, Any]], Field(min_length=1)]
    logprobs: bool | None = None
    prompt_logprobs: Whole | None = None
    top_logprobs: Whole | None = None
    max_completion_tokens: TokenLimit | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ShortText | None = None
    tool_choice: ToolChoice | None = None
    tools: ToolList | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: ListOf[str] | None = None
    audio: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: ListOf[dict[str, Any]] | None = None
    function_call: ShortText | dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None


class CompletionRequest(SamplingFields):
    """The body of `/v1/completions`."""

    prompt: Prompts
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: Whole | None = None
    prompt_logprobs: Whole | None = None
    suffix: str | None = None
