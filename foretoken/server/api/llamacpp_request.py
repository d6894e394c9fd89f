"""The bodies of llama.cpp's own routes, and the requests that they stand for."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from foretoken.server.api.body import ListOf, RequestPart
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import unsupported
from foretoken.server.api.schemas import (
    MAX_WHOLE,
    CompletionRequest,
    Number,
    OwnNames,
    RepetitionPenalty,
    SamplingFields,
    Whole,
    wrong_shape,
)

# What llama.cpp draws with where neither a request nor the server says anything.
_DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# Filters that do not exist here, with the values that leave what is drawn unchanged.
_HARMLESS: Mapping[str, tuple[float, ...]] = {
    "typical_p": (1,),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1, 0),
    "t_max_predict_ms": (-1, 0),
    "n_indent": (0,),
    "min_keep": (0, 1),
    "adaptive_target": (-1,),
}
DISABLED: Mapping[str, float] = {name: values[0] for name, values in _HARMLESS.items()} | {"adaptive_decay": 0.9}
_PROMPT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}, {"type": "object"}]}


def _as_bias(value: object) -> object:
    """Pairs of a token, by its id or its text, and a number; or an object of such."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list | None):
        raise wrong_shape("must be a list of pairs, or an object")
    for pair in pairs or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2 or type(pair[0]) not in (int, str):
            raise wrong_shape("each entry is a token id or a text, and a number")
        if type(pair[1]) not in (int, float) or not -100 <= pair[1] <= 100:
            raise wrong_shape("values must be numbers from -100 to 100")
    return pairs


LlamaBias = Annotated[
    list[Any] | None,
    BeforeValidator(_as_bias),
    WithJsonSchema({"anyOf": [{"type": "null"}, {"type": "array"}, {"type": "object"}]}),
]


class LlamaFields(SamplingFields):
    """What `/completion` and `/infill` share."""

    own_names: ClassVar[OwnNames] = {
        "max_tokens": ("n_predict",),
        "repetition_penalty": ("repeat_penalty",),
        "logprobs": ("n_probs",),
        "suffix": ("input_suffix",),
    }

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)] = None
    n_predict: Annotated[int, Field(ge=-2, le=MAX_WHOLE)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    n_probs: Whole | None = None
    logit_bias: LlamaBias = None  # type: ignore[assignment]
    return_tokens: bool = False
    response_fields: ListOf[str] | None = None
    timings_per_token: bool = False
    # without effect: prompts are cached in any case and by all requests, and there are no slots to choose
    cache_prompt: Any = None
    id_slot: Any = None
    n_keep: Any = None
    repeat_last_n: Any = None
    adaptive_decay: Any = None
    # refused where they would change what is drawn or answered
    typical_p: Number | None = None
    mirostat: Number | None = None
    dynatemp_range: Number | None = None
    dry_multiplier: Number | None = None
    xtc_probability: Number | None = None
    top_n_sigma: Number | None = None
    t_max_predict_ms: Number | None = None
    n_indent: Number | None = None
    min_keep: Number | None = None
    adaptive_target: Number | None = None
    samplers: Any = None
    post_sampling_probs: bool | None = None
    return_progress: bool | None = None
    lora: list[Any] | None = None


class ExtraFile(RequestPart):
    """A file that stands before the text that is filled in."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaFields):
    """The body of `/infill`."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: ListOf[ExtraFile] = Field(default_factory=list)


class PiecesRequest(RequestPart):
    """The body of `/tokenize`; special tokens in the text are read as such."""

    content: str
    add_special: bool = False
    with_pieces: bool = False
    parse_special: Literal[True] = True


class TokensRequest(RequestPart):
    """The body of `/detokenize`."""

    tokens: Annotated[list[Any], Field(max_length=1 << 20, json_schema_extra={"items": {"type": "integer"}})]


def prompts_of(prompt: object) -> tuple[list[list[str | int]], bool]:
    """Each prompt as its parts, and whether the answer is a list.

    Raises:
        ApiError: none, or pictures or sounds.
    """
    if isinstance(prompt, list) and prompt and not _is_one(prompt):
        return [_parts(one) for one in prompt], True
    return [_parts(prompt)], False


def _is_one(prompt: Sequence[object]) -> bool:
    """Whether a list is one prompt: token ids, with texts among them."""
    return any(type(part) is int for part in prompt) and all(type(part) in (int, str) for part in prompt)


def _parts(prompt: object) -> list[str | int]:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise unsupported("prompt", "this model reads text only")
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt and _is_one(prompt):
        return list(prompt)
    raise unsupported("prompt", "must be a text, a list of token ids and texts, or a list of those, and not empty")


def defaults(config: ApiConfig) -> dict[str, float]:
    """How answers are drawn for which nothing is asked; seed -1: another one for each."""
    given = {"temperature": config.default_temperature, "seed": config.default_seed}
    return {**_DEFAULTS, "seed": -1} | {name: value for name, value in given.items() if value is not None}


def as_completion(
    body: LlamaFields, prompts: Sequence[Sequence[int]], bias: Mapping[int, float], config: ApiConfig
) -> CompletionRequest:
    """The completion request that answers these prompts, with the biases by token id.

    Raises:
        ApiError: a field that does not exist here and would change the answer.
    """
    _refuse(body)
    given = {name: getattr(body, name) for name in SamplingFields.model_fields}
    limit = body.n_predict if body.n_predict is not None else body.max_tokens
    asked = {
        "prompt": list(prompts),
        "max_tokens": None if limit is None or limit < 0 else limit,
        "repetition_penalty": body.repeat_penalty if body.repeat_penalty is not None else body.repetition_penalty,
        "seed": secrets.randbits(32) if body.seed is not None and body.seed < 0 else body.seed,
        "logit_bias": dict(bias) or None,
        "logprobs": body.n_probs or None,
    }
    drawn = {
        name: value for name, value in defaults(config).items() if name in _DEFAULTS and getattr(body, name) is None
    }
    return CompletionRequest.model_construct(**given | asked | drawn)


def _refuse(body: LlamaFields) -> None:
    if (body.n or 1) > 1:
        raise unsupported("n", "an answer is one; leave n out")
    if body.n_predict == 0:
        raise unsupported("n_predict", "must be at least 1, or -1 for an answer up to the end of the context")
    for name, harmless in _HARMLESS.items():
        if getattr(body, name) not in (None, *harmless):
            raise unsupported(name, f"other than {harmless[0]} is not supported; use top_p or min_p")
    for name in ("samplers", "post_sampling_probs", "return_progress", "lora"):
        if getattr(body, name):
            raise unsupported(name, "is not supported; leave it out")
