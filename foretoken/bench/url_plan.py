"""Which requests are sent to an endpoint, and when: a Poisson process, or the lines of a trace."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.bench.prompts import ALL, choose, read_prompts
from foretoken.bench.url_options import MAX_REQUESTS, UrlOptions
from foretoken.bench.workload import SLICES, Prompt, slices
from foretoken.errors import InputError
from foretoken.files import parse_json, read_text
from foretoken.params import check_number, check_whole

_TRACE_KEYS = ("arrival_s", "prompt", "max_tokens", "slice")
_MAX_ARRIVAL_S = 1e7


@dataclass(frozen=True)
class UrlRequest:
    """One request: `arrival_s` after the start of the run; `messages` are those of a chat, else `text` is continued."""

    index: int
    arrival_s: float
    slice: str
    text: str
    max_tokens: int
    messages: tuple[tuple[str, str], ...] = ()


def chosen_prompts(options: UrlOptions) -> tuple[Prompt, ...]:
    """The prompts that requests take in turn.

    Raises:
        InputError: an unknown slice, or conversations that are not to be sent as a chat.
        StorageError: the file of prompts cannot be read.
    """
    if options.prompts is None:
        return slices(SLICES if ALL in options.slices else options.slices, options.prompts_per_slice)
    found, _ = choose(read_prompts(options.prompts), options.slices, options.prompts_per_slice)
    if not options.chat and any(prompt.messages for prompt in found):
        raise InputError("prompts", str(options.prompts), "holds conversations: add --chat, or leave those slices out")
    return found


def poisson_requests(options: UrlOptions, prompts: Sequence[Prompt], rate: float, first: int = 0) -> list[UrlRequest]:
    """`options.requests` arrivals, `rate` a second on average; the same seed gives the same, scaled in time.

    `first` is the number of the first request, which decides its prompt and its seed.
    """
    rng, now, found = random.Random(f"arrivals {options.seed}"), 0.0, []
    for index in range(first, first + options.requests):
        now += rng.expovariate(1.0) / rate
        found.append(_request(options, prompts[index % len(prompts)], index, now, options.max_tokens))
    return found


def trace_requests(options: UrlOptions, prompts: Sequence[Prompt], path: Path, first: int = 0) -> list[UrlRequest]:
    """The requests of a trace: JSON lines with `arrival_s`, and optionally `prompt`, `max_tokens` and `slice`; without
    a prompt, the next of `prompts`. `first`: see `poisson_requests`.

    Raises:
        InputError: names the line and what is wrong with it.
        StorageError: the file cannot be read.
    """
    lines = [line for line in enumerate(read_text("trace", path).splitlines(), 1) if line[1].strip()]
    if not 0 < len(lines) <= MAX_REQUESTS:
        raise InputError("trace", str(path), f"must hold 1 to {MAX_REQUESTS} requests, one a line")
    parsed = sorted((_line(path, number, line) for number, line in lines), key=lambda raw: float(raw["arrival_s"]))
    return [_traced(options, prompts[index % len(prompts)], index, raw) for index, raw in enumerate(parsed, first)]


def warmup_requests(options: UrlOptions, prompts: Sequence[Prompt]) -> list[UrlRequest]:
    """Requests that are sent one after the other before the run, and not counted."""
    return [
        _request(options, prompts[index % len(prompts)], index, 0.0, options.max_tokens)
        for index in range(options.warmup)
    ]


def _request(options: UrlOptions, prompt: Prompt, index: int, arrival_s: float, max_tokens: int) -> UrlRequest:
    messages = (prompt.messages or (("user", prompt.text),)) if options.chat else ()
    return UrlRequest(index, arrival_s, prompt.slice, prompt.text, max_tokens, messages)


def _traced(options: UrlOptions, prompt: Prompt, index: int, raw: Mapping[str, Any]) -> UrlRequest:
    if "prompt" in raw:
        prompt = Prompt(f"trace:{index}", str(raw.get("slice", "trace")), raw["prompt"])
    return _request(options, prompt, index, float(raw["arrival_s"]), raw.get("max_tokens", options.max_tokens))


def _line(path: Path, number: int, line: str) -> Mapping[str, Any]:
    where = f"trace line {number}"
    raw = parse_json("trace", f"{path}:{number}", line)
    if not isinstance(raw, Mapping):
        raise InputError(where, line, "must be an object")
    unknown = set(raw) - set(_TRACE_KEYS)
    if unknown:
        raise InputError(where, sorted(unknown)[0], f"unknown key; known: {', '.join(_TRACE_KEYS)}")
    check_number(f"{where}: arrival_s", raw.get("arrival_s"), 0.0, _MAX_ARRIVAL_S)
    if "max_tokens" in raw:
        check_whole(f"{where}: max_tokens", raw["max_tokens"], 1, 1 << 20)
    if not isinstance(raw.get("prompt", "x"), str) or raw.get("prompt") == "":
        raise InputError(f"{where}: prompt", raw["prompt"], "must be a text of at least one character")
    return raw
