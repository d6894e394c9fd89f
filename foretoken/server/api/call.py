"""From the fields of a request to the `Call` that a backend answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence, Sized
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from foretoken.backend.call import Call, ModelInfo
from foretoken.config import SamplingParams
from foretoken.errors import InputError
from foretoken.params import ADVISED_FIELDS
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import BODY_KEY, ApiError, invalid, unsupported
from foretoken.server.api.exchange import Api
from foretoken.server.api.messages import checked_messages, ends_open, structure_of, tools_of
from foretoken.server.api.schemas import ChatRequest, CompletionRequest, SamplingFields
from foretoken.server.api.speculation import spec_of, uses_prediction
from foretoken.server.record import Caller, caller_of, name_request, tenant_of

_log = logging.getLogger("foretoken.server")
_MAX_NOTICED = 256  # a client that makes up names must not fill the memory
_noticed: set[str] = set()
_TIERS = {"auto": 0, "default": 0, "scale": 0, "flex": 10, "priority": -10, "fast": -10}
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
_CALLERS_OWN = {"max_tokens": "max_tokens", "prediction": "prediction.content", "tenant": "cache_salt"}
# What each template may be told; anything else could replace what the server itself says.
TEMPLATE_OPTIONS = ("enable_thinking", "thinking", "reasoning_effort")
_PASSED_ON = (
    *("frequency_penalty", "presence_penalty", "logit_bias", "n", "seed", "ignore_eos", "min_tokens", "bad_words"),
    *("stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "logprob_token_ids"),
)


@dataclass(frozen=True)
class Terms:
    """What a request is checked against: the served model, the settings, and who asks."""

    info: ModelInfo
    config: ApiConfig
    caller: Caller


def terms_of(api: Api, body: SamplingFields, scope: MutableMapping[str, Any]) -> Terms:
    """What a request is checked against. Its scope takes over the name that the body gives it, and the body for the
    names of fields in errors.

    Raises:
        ApiError: no requests are taken now, an unknown field where the server is strict, or another model's name.
    """
    info = api.ready_info()
    _notice_unknown(body, api.config)
    check_model(body.model, info, api.config)
    scope[BODY_KEY] = body
    if body.request_id is not None:
        name_request(scope, body.request_id)
    return Terms(info, api.config, caller_of(scope))


def chat_call(body: ChatRequest, terms: Terms) -> Call:
    """The call of a chat request.

    Raises:
        ApiError: a field that cannot be honoured.
    """
    info = terms.info
    _refuse_chat_features(body)
    if not info.has_tokenizer or not info.has_chat_template:
        raise unsupported("messages", "the model has no chat template; use /v1/completions")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid("max_completion_tokens", "and max_tokens disagree; give one")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs=true", body.top_logprobs)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    named = max((limit for limit in limits if limit is not None), default=None)
    max_tokens = _max_tokens(body, terms, named, terms.config.default_max_tokens, num_prompts=1)
    messages = checked_messages(body.messages, info.template_roles)
    params = _params(body, terms, max_tokens, logprobs, "top_logprobs", _prompt_logprobs(body, terms))
    return Call(
        params,
        messages=messages,
        prediction=body.prediction,
        tools=tools_of(body, info),
        template_options=_template_options(body, messages, terms.config),
        spec=spec_of(body, info, terms.config),
        trace=wants_rounds(body, terms.config),
    )


def completion_call(
    body: CompletionRequest, terms: Terms, default_max_tokens: int | None = _COMPLETION_MAX_TOKENS
) -> Call:
    """The call of a completion request; `default_max_tokens` is for one that names none (None: to the context's end).

    Raises:
        ApiError: a field that cannot be honoured.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "other than n is not supported")
    _check_prompts(body.prompt, terms)
    max_tokens = _max_tokens(body, terms, body.max_tokens, default_max_tokens, len(body.prompt))
    listed = _prompt_logprobs(body, terms, body.logprobs if body.echo else None)
    params = _params(body, terms, max_tokens, body.logprobs, "logprobs", listed)
    return Call(
        params,
        prompts=body.prompt,
        prediction=body.prediction,
        spec=spec_of(body, terms.info, terms.config),
        trace=wants_rounds(body, terms.config),
    )


def check_model(model: str | None, info: ModelInfo, config: ApiConfig) -> None:
    """Refuse (`ApiError` 404) a name that is not the served model's; a server that speaks llama.cpp's interface takes
    any, one that speaks Ollama's takes the name with the tag that its clients add, and without.
    """
    tag = ":latest" if config.ollama else ""
    is_served = model is None or model.removesuffix(tag) == info.name.removesuffix(tag)
    if not is_served and not config.llama_cpp:
        raise ApiError(404, "model_not_found", "model: is not served here; see /v1/models", "model")


def metrics_level(body: SamplingFields, config: ApiConfig) -> str:
    """How much `metrics` of the response has."""
    asked = None if body.foretoken is None else body.foretoken.metrics
    return config.request_metrics if asked is None else asked


def wants_trace(body: SamplingFields) -> bool:
    """Whether the response has `foretoken.trace`."""
    return body.foretoken is not None and body.foretoken.trace


def wants_rounds(body: SamplingFields, config: ApiConfig) -> bool:
    """Whether the response needs to know what was drafted in each step."""
    return wants_trace(body) or metrics_level(body, config) == "detailed"


def slice_of(body: SamplingFields) -> str:
    """The kind of text that the request names, in our field or in OpenAI's `metadata`; an `ApiError` if too long."""
    if body.foretoken is not None and body.foretoken.slice is not None:
        return body.foretoken.slice
    named = (body.metadata or {}).get("slice", "")
    if not isinstance(named, str) or len(named) > 64:
        raise invalid("metadata.slice", "must be a text of at most 64 characters")
    return named


def tier_of(body: SamplingFields) -> str | None:
    """The service tier that was used, for the response; None where none was asked for."""
    return "default" if body.service_tier == "auto" else body.service_tier


def _params(
    body: SamplingFields,
    terms: Terms,
    max_tokens: int,
    logprobs: int | None,
    logprobs_param: str,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    config = terms.config
    _check_lists(body, terms)
    for name, count in ((logprobs_param, logprobs), ("logprob_token_ids", len(body.logprob_token_ids or ()))):
        if count is not None and count > config.max_logprobs:
            raise invalid(name, f"must be at most {config.max_logprobs}", count)
    given: dict[str, Any] = {
        name: value
        for name in _PASSED_ON
        if (value := getattr(body, name)) is not None and not (name == "min_tokens" and value == 0)
    }
    seed = given.setdefault("seed", config.default_seed)
    if seed is not None and seed < 0:  # -1 draws a fresh one, as in vLLM and llama.cpp
        given["seed"] = None if seed == -1 else seed % 2**64
    given |= _sampling(body, terms)
    given |= {
        "max_tokens": max_tokens,
        "stop": _checked_stops(body, config),
        "logprobs": logprobs,
        "logprobs_of": "model",
        "prompt_logprobs": prompt_logprobs,
        "priority": _TIERS[body.service_tier or "default"] if body.priority is None else body.priority,
        "prediction": (body.prediction or None) if uses_prediction(body, config) else None,
        "tenant": tenant_of(terms.caller, body.cache_salt or ""),
        "slice": slice_of(body),
        **structure_of(body, terms.info),
    }
    try:
        return SamplingParams(**given)
    except InputError as error:
        raise invalid(_CALLERS_OWN.get(error.field, error.field), error.remedy, error.value) from None


def _prompt_logprobs(body: ChatRequest | CompletionRequest, terms: Terms, echoed: int | None = None) -> int | None:
    """How many alternatives are listed for each token of the prompt: vLLM's field, or as many as `echo` needs.

    Raises:
        ApiError: too many, or in a stream.
    """
    count = body.prompt_logprobs
    if count is not None and count > terms.config.max_logprobs:
        raise invalid("prompt_logprobs", f"must be at most {terms.config.max_logprobs}", count)
    if count is not None and body.stream:
        raise unsupported("prompt_logprobs", "is not streamed; leave stream out")
    return max((one for one in (count, echoed) if one is not None), default=None)


def _sampling(body: SamplingFields, terms: Terms) -> dict[str, Any]:
    """The `ADVISED_FIELDS` of the request; where it names none, the makers' advice, at the server's temperature."""
    named = {name: value for name in ADVISED_FIELDS if (value := getattr(body, name)) is not None}
    if not named and terms.config.sampling_defaults == "model":
        named = dict(terms.info.advised_sampling)
    if body.temperature is None and terms.config.default_temperature is not None:
        named["temperature"] = terms.config.default_temperature
    return {"temperature": 1.0, **named, "top_k": max(0, int(named.get("top_k", 0)))}


def _max_tokens(body: SamplingFields, terms: Terms, named: int | None, default: int | None, num_prompts: int) -> int:
    """The limit of each answer's length, before anything of the size of all answers is made. One that the request does
    not name is cut to what all answers may have together.

    Raises:
        ApiError: too many answers, or a named limit that is too long for them.
    """
    config, info = terms.config, terms.info
    n = body.n or 1
    num_answers = num_prompts * n
    if n > config.max_choices:
        raise invalid("n", f"must be at most {config.max_choices}", n)
    if num_answers > info.max_waiting:
        raise invalid("n", f"prompts times n must be at most {info.max_waiting}, the length of the queue", num_answers)
    budget = config.max_request_tokens
    if config.max_pending_tokens is not None:
        budget = min(budget, config.max_pending_tokens)
    if num_answers > budget:
        raise invalid("n", f"prompts times n must be at most {budget}", num_answers, "too_many_tokens")
    if named is None:
        return min(default or info.max_model_len, info.max_model_len, budget // num_answers)
    max_tokens = min(named, info.max_model_len)
    if num_answers * max_tokens > budget:
        message = f"prompts times n times max_tokens must be at most {budget}"
        raise invalid("max_tokens", message, num_answers * max_tokens, "too_many_tokens")
    return max_tokens


def _check_lists(body: SamplingFields, terms: Terms) -> None:
    config, info = terms.config, terms.info
    for name in ("stop_token_ids", "allowed_token_ids"):
        listed = getattr(body, name) or ()
        if len(listed) > info.vocab_size:
            raise invalid(name, f"must be at most {info.vocab_size} token ids, the size of the vocabulary", len(listed))
        check_token_ids(name, listed, info)
    for token in body.logit_bias or ():
        if token >= info.vocab_size:
            raise invalid("logit_bias", f"token ids must be less than {info.vocab_size}", token)
    check_num_biases(body.logit_bias, config)
    words = body.bad_words or ()
    if len(words) > config.max_bad_words or sum(map(len, words)) > config.max_bad_word_tokens:
        message = f"must be at most {config.max_bad_words} of {config.max_bad_word_tokens} characters together"
        raise invalid("bad_words", message)
    if body.use_beam_search:
        raise unsupported("use_beam_search", "is not supported; n draws several answers")
    if body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "is not supported; send what the model should read")


def _checked_stops(body: SamplingFields, config: ApiConfig) -> list[str]:
    stops = body.stop_strings
    if len(stops) > config.max_stop_strings:
        raise invalid("stop", f"must be at most {config.max_stop_strings} texts", len(stops))
    if any(not text or len(text) > config.max_text_chars for text in stops):
        raise invalid("stop", f"each must have 1 to {config.max_text_chars} characters")
    return stops


def check_num_prompts(prompts: Sequence[Any], config: ApiConfig) -> None:
    """Refuse (`ApiError`) more prompts than a request may have, before any of them is tokenised."""
    if len(prompts) > config.max_prompts:
        raise invalid("prompt", f"must be at most {config.max_prompts} prompts", len(prompts))


def check_num_biases(biases: Sized | None, config: ApiConfig) -> None:
    """Refuse (`ApiError`) more entries of `logit_bias` than a request may have, before any is tokenised."""
    if len(biases or ()) > config.max_logit_bias:
        raise invalid("logit_bias", f"must have at most {config.max_logit_bias} entries", len(biases or ()))


def check_token_ids(param: str, tokens: Sequence[Any], info: ModelInfo) -> None:
    """Refuse (`ApiError`, which shows the first) what is no id of a token of the model."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < info.vocab_size:
            raise invalid(param, f"must be whole numbers from 0 to {info.vocab_size - 1}", token)


def _check_prompts(prompts: Sequence[Any], terms: Terms) -> None:
    info = terms.info
    check_num_prompts(prompts, terms.config)
    for prompt in prompts:
        if not prompt:
            raise invalid("prompt", "is empty; give at least one token")
        if isinstance(prompt, str):
            if not info.has_tokenizer:
                raise unsupported("prompt", "the model has no tokenizer; give token ids")
            continue
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < info.vocab_size:
                raise invalid("prompt", f"token ids must be whole numbers from 0 to {info.vocab_size - 1}", token)


def _refuse_chat_features(body: ChatRequest) -> None:
    """What would change the answer and does not exist here."""
    if body.chat_template:
        raise unsupported("chat_template", "is not supported")
    for name in ("audio", "web_search_options"):
        if getattr(body, name) is not None:  # an empty object asks for them, too
            raise unsupported(name, "is not supported")
    if body.functions and body.function_call != "none":
        raise unsupported("functions", "is not supported; use tools")
    if body.function_call not in (None, "none", "auto"):
        raise unsupported("function_call", "is not supported; use tool_choice")
    if body.modalities not in (None, ["text"]):
        raise unsupported("modalities", "this model writes text only")


def _template_options(body: ChatRequest, messages: Sequence[Mapping[str, Any]], config: ApiConfig) -> dict[str, Any]:
    """What the request, and the interface that it came by, tell the chat template.

    Raises:
        ApiError: a name that is not on the list, or a message is to be continued and an answer begun.
    """
    given = dict(body.chat_template_kwargs or {})
    for name, value in given.items():
        if name not in TEMPLATE_OPTIONS:
            raise unsupported("chat_template_kwargs", f"takes {', '.join(TEMPLATE_OPTIONS)} only")
        if not isinstance(value, bool | str) or (isinstance(value, str) and len(value) > 64):
            raise invalid("chat_template_kwargs", "values must be true, false or short texts")
    if body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
    if body.add_generation_prompt is not None:
        given["add_generation_prompt"] = body.add_generation_prompt
    continues = body.continue_final_message
    if continues and body.add_generation_prompt:
        raise invalid("continue_final_message", "and add_generation_prompt exclude each other; set one of them")
    if continues is None:
        continues = config.llama_cpp and body.add_generation_prompt is None and ends_open(messages)
    if continues:
        given["continue_final_message"] = True
    if not config.llama_cpp:
        return given
    # what llama.cpp tells every chat template where a request does not
    return {"enable_thinking": True, "date_string": datetime.now().strftime("%d %b %Y")} | given


def _notice_unknown(body: SamplingFields, config: ApiConfig) -> None:
    """Warn once of each unknown field, or refuse it.

    Raises:
        ApiError: a field is unknown and the server is strict.
    """
    parts = [body, *(value for value in vars(body).values() if isinstance(value, BaseModel))]
    unknown = [name for part in parts for name in part.model_extra or ()]
    if not unknown:
        return
    if config.strict:
        name = unknown[0] if unknown[0].isidentifier() and len(unknown[0]) <= 64 else None
        raise ApiError(400, "unknown_field", "the body has a field that this server does not know", name)
    for name in unknown:
        if name not in _noticed and len(_noticed) < _MAX_NOTICED:
            _noticed.add(name)
            _log.warning("ignored an unknown field of a request: %.64r", name)
