"""The flags of `foretoken serve`, made from the fields of the server's configurations, and what given flags mean."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, TypeVar

import typer

from foretoken.cli.common import text_of
from foretoken.cli.flags import flag, with_flags
from foretoken.cli.origins import SECRETS
from foretoken.field_text import union_members
from foretoken.server.api.config import METRICS_LEVELS, ApiConfig
from foretoken.server.guard.config import GuardConfig, is_loopback
from foretoken.server.life.config import LifeConfig
from foretoken.server.observe.config import LOG_FORMATS, ObserveConfig

KEY_VARIABLE = "FORETOKEN_API_KEY"
_PLAIN = (int, float, bool, str)

_Config = TypeVar("_Config")

_ACCESS = {
    "host": "The address to listen on; one that other machines reach needs a key.",
    "api_key": f"The key that clients send; @FILE reads it from a file, {KEY_VARIABLE} is another way: a flag is seen "
    "by every user of the machine.",
    "admin_key": "The key of admin routes; @FILE reads it from a file.",
    "keys_file": "A TOML file with more keys: a table [NAME] for each, with key or sha256, tenant, admin.",
    "insecure": "Listen on a public address without any key.",
    "metrics_public": "Let /metrics be read without a key.",
    "allowed_hosts": "A Host value that passes, besides local ones; may be given several times.",
    "cors_origins": "An origin whose pages may call the server, as https://app.example; may be given several times.",
    "max_body_bytes": "Longest body of a request.",
    "max_header_bytes": "Longest header block of a request.",
    "max_headers": "Most headers of a request.",
    "header_timeout_s": "Seconds for the headers of a request.",
    "body_timeout_s": "Seconds for the body of a request, and one more for each --min-body-bytes-per-s.",
    "min_body_bytes_per_s": "A body that comes slower is given up.",
    "keep_alive_s": "Seconds that an idle connection stays open.",
    "max_connections": "Most connections at once.",
}
_API = {
    "strict": "Refuse unknown fields of a request instead of ignoring them.",
    "max_prompts": "Most prompts of one request.",
    "max_choices": "Largest n of a request.",
    "max_stop_strings": "Most stop strings of a request.",
    "max_text_chars": "Longest stop string, in characters.",
    "max_bad_words": "Most bad_words of a request.",
    "max_bad_word_tokens": "Most tokens of all bad_words of a request.",
    "max_logit_bias": "Most entries of logit_bias.",
    "max_logprobs": "Most alternatives listed for each token.",
    "max_prompt_logprobs": "Most prompt tokens times alternatives in one response.",
    "max_request_tokens": "Most answers times max_tokens of one request.",
    "max_pending_tokens": "The same over all requests that run or wait; no bound.",
    "default_max_tokens": "Longest answer of a chat request that names no length; to the end of the context.",
    "first_token_timeout_s": "Seconds for the first token, with the time in the queue.",
    "request_timeout_s": "Seconds for a whole request.",
    "ping_s": "Seconds of silence after which a stream gets a comment.",
    "granularity": "When a stream's events are sent: step, token, or interval:MS.",
    "stream_buffer_bytes": "Unread bytes after which a slow client is dropped.",
    "obfuscation": "Pad the events of streams that do not say whether they want it; on where other machines reach the "
    "address.",
    "force_obfuscation": "Pad the events of every stream.",
    "obfuscation_bucket_bytes": "Padded events have a multiple of this size.",
    "request_metrics": f"What metrics in a response holds: {', '.join(METRICS_LEVELS)}.",
    "retry_after_s": "Seconds that refused clients should wait.",
    "predictions": "Draft the prediction of requests that have one.",
}
_LIFE = {
    "workers": "Processes that each hold the model; requests are spread over them.",
    "devices": "The device of a worker, as cuda:0; may be given several times, in the order of the workers.",
    "watchdog_s": "Seconds after which a step counts as stuck: the worker is killed and restarted.",
    "drain_s": "Seconds that requests in flight get after SIGTERM; 0 ends them at once.",
    "first_restart_s": "Seconds before a worker that died is restarted; doubled with each death.",
    "longest_restart_s": "Longest pause before a restart, in seconds.",
    "good_s": "Seconds after which a worker counts as well: the pause begins anew.",
    "failed_starts": "Starts in a row without success after which the server gives up.",
    "quarantine_s": "Seconds for which a request is refused that ran while two workers died; 0 = never.",
    "max_waiting": "Requests of a worker that may wait; further ones get 429.",
    "max_unread_events": "Unread events after which a call is cancelled.",
    "beat_s": "Seconds between a worker's signs of life.",
}
_OBSERVATION = {
    "metrics_alias": "vllm: also expose the metrics that vLLM has, under its names.",
    "stats_max_age_s": "Scrapes within so many seconds see the same counters.",
    "slices": "A slice of requests that gets a label of its own; may be given several times.",
    "history": "A SQLite file for the figures of finished requests, never their texts.",
    "history_max_age_days": "Days that a request stays in it.",
    "history_max_bytes": "Largest size of it.",
    "request_log": f"One line per request on standard error: {', '.join(LOG_FORMATS)}.",
    "tracing": "Send OpenTelemetry traces and metrics, as the OTEL_* variables say.",
}
PANELS: Mapping[str, tuple[type, Mapping[str, str]]] = {
    "Access and connections": (GuardConfig, _ACCESS),
    "Requests": (ApiConfig, _API),
    "Workers": (LifeConfig, _LIFE),
    "Observation": (ObserveConfig, _OBSERVATION),
}
# Fields without a flag: made from other flags.
DERIVED: Mapping[type, frozenset[str]] = {ApiConfig: frozenset({"specs", "allow_lossy"})}


def with_server_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with a flag for every field of the server's configurations; it reads them from its context."""
    flags = [
        _flag(kind, field, words[field.name], panel)
        for panel, (kind, words) in PANELS.items()
        for field in fields(kind)
        if field.name in words
    ]
    return with_flags(verb, flags, after="port")


def server_part(kind: type[_Config], given: Mapping[str, Any], **derived: object) -> _Config:
    """One of the server's configurations from flags by name, other flags among them.

    Raises:
        InputError: a value that makes no sense; names the flag.
    """
    (words,) = (words for one, words in PANELS.values() if one is kind)
    values = {name: given[name] for name in words if given[name] is not None}
    return kind(**values | derived)


def keys_from(given: Mapping[str, Any]) -> dict[str, str | None]:
    """The keys that flags or the environment name, read from files where they say so.

    Raises:
        StorageError: a file cannot be read.
    """
    found = {name: text_of(name, given[name]) for name in SECRETS}
    found["api_key"] = found["api_key"] or os.environ.get(KEY_VARIABLE)
    return {name: None if key is None else key.strip() for name, key in found.items()}


def pads_streams(given: Mapping[str, Any]) -> bool:
    """Whether streams are padded by default: sizes of events tell what was accepted, to whoever sees the network."""
    return bool(given["obfuscation"]) or not is_loopback(given["host"])


def _flag(kind: type, field: Field[Any], words: str, panel: str) -> inspect.Parameter:
    hint = typing.get_type_hints(kind)[field.name]
    members = [one for one in union_members(hint) if one is not types.NoneType]
    default: Any = field.default
    name = "--" + field.name.replace("_", "-")
    if members[0] is bool and default:
        name = f"{name}/--no-{name[2:]}"
    if isinstance(default, tuple):
        return flag(
            field.name, None, Annotated[list[str] | None, typer.Option(name, help=words, rich_help_panel=panel)]
        )
    one: Any = members[0] if members[0] in _PLAIN else str
    if default is None:
        one = one | None
    return flag(field.name, default, Annotated[one, typer.Option(name, help=words, rich_help_panel=panel)])
