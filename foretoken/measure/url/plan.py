"""What is sent to an OpenAI-compatible endpoint, and when: options, and arrivals of a Poisson process or a trace."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.backend.registry import DEFAULT_KEY_VARIABLE, base_of, check_address
from foretoken.errors import InputError
from foretoken.field_text import numbers
from foretoken.files import parse_json, read_text
from foretoken.measure import options as shared
from foretoken.measure.options import ALL, check_price, check_wholes, resume_option, setting
from foretoken.measure.prompts import prompts_or_library
from foretoken.measure.workload import Prompt
from foretoken.measure.write import check_result
from foretoken.option import option
from foretoken.params import TEMPERATURES, check_number, check_whole

if TYPE_CHECKING:
    from foretoken.backend.http import ServerAddress


MAX_REQUESTS = 1_000_000  # all are planned before the first is sent
_RATES = (1e-6, 1e6)  # requests per second
_MAX_S = 86_400.0
_TRACE_KEYS = ("arrival_s", "prompt", "max_tokens", "slice")
_MAX_ARRIVAL_S = 1e7


@dataclass(frozen=True)
class UrlOptions:
    """What to send to which endpoint.

    `url` is the server's address, with or without `/v1`. `model` None: the first that `/v1/models` names. `rates` are
    mean arrivals per second of a Poisson process, one run each; `trace` is a file of arrivals in their place. A prompt
    is continued as it stands, or with `chat` sent as a user's message. `deadlines`: a request is good if its time to
    the first token, its time per further token and its whole time are within those that are set; without one, every
    request that succeeds is good. `key_variable` names the environment variable with the API key: a key on the command
    line would be in the report. `timeout_s`: a server that is silent for so long has failed the request. `resume` is a
    file that keeps each run that has ended, a rate or the trace; what it holds already is not measured again.
    """

    url: str = field(metadata=option("Address of the server, such as http://127.0.0.1:8000, with or without /v1."))
    model: str | None = setting(None, "Name of the model; without it, the first of /v1/models.")
    rates: tuple[float, ...] = setting(
        (1.0,),
        "Requests per second of a Poisson process; several, separated by commas, run one after the other.",
        name="rate",
        read=numbers,
    )
    requests: int = setting(64, "Requests of each rate.")
    trace: Path | None = field(
        default=None,
        metadata=option("File of arrivals in place of --rate: JSON lines, arrival_s [prompt, max_tokens, slice]."),
    )
    prompts: Path | None = field(default=None, metadata=shared.PROMPTS_OPTION)
    slices: tuple[str, ...] = field(default=(ALL,), metadata=shared.SLICES_OPTION)
    prompts_per_slice: int = setting(8, "Prompts of each slice; requests take them in turn.")
    chat: bool = setting(False, "Send prompts as a user's message to /v1/chat/completions.")
    max_tokens: int = field(default=64, metadata=shared.MAX_TOKENS_OPTION)
    temperature: float = setting(0.0, "Sampling temperature.")
    stop_at_eos: bool = setting(False, "Let answers end early; by default ignore_eos is sent.")
    warmup: int = setting(2, "Requests before the run, not counted.")
    ttft_deadline_s: float | None = setting(
        None, "A request is good if its first text arrives within this many seconds."
    )
    tpot_deadline_s: float | None = setting(None, "The same for the mean time of each further token.")
    e2e_deadline_s: float | None = setting(None, "The same for the whole answer.")
    timeout_s: float = setting(600.0, "A request fails if the server sends nothing for this many seconds.")
    key_variable: str = setting(DEFAULT_KEY_VARIABLE, "Environment variable with the API key.")
    price_per_hour: float | None = field(default=None, metadata=shared.PRICE_OPTION)
    out: Path | None = field(default=None, metadata=shared.OUT_OPTION)
    resume: Path | None = field(default=None, metadata=resume_option("load", " with the same options"))
    name: str = field(default="url", metadata=shared.NAME_OPTION)
    seed: int = field(default=0, metadata=shared.SEED_OPTION)

    def __post_init__(self) -> None:
        check_address("url", self.url, self.key_variable)
        counts = {"requests": (1, MAX_REQUESTS), "prompts_per_slice": (1, MAX_REQUESTS), "max_tokens": (1, 1 << 20)}
        check_wholes(self, **counts, warmup=(0, MAX_REQUESTS), seed=(0, 2**63 - MAX_REQUESTS))  # sent with seed + i
        if not self.rates:
            raise InputError("rate", "", "give requests per second, several separated by commas")
        for rate in self.rates:
            check_number("rate", rate, *_RATES)
        check_number("temperature", self.temperature, *TEMPERATURES)
        check_number("timeout_s", self.timeout_s, 0.0, _MAX_S, open_low=True)
        for name in ("ttft_deadline_s", "tpot_deadline_s", "e2e_deadline_s"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0.0, _MAX_S, open_low=True)
        check_price(self.price_per_hour)
        for name in ("model", "key_variable"):
            if getattr(self, name) == "":
                raise InputError(name, "", "must not be empty; leave it out")
        check_result(self.out, self.name)

    @property
    def base(self) -> str:
        """The address without `/v1` and without a slash at its end."""
        return base_of(self.url)

    @property
    def server(self) -> ServerAddress:
        """What clients of the endpoint are made with."""
        from foretoken.backend.http import ServerAddress  # help is printed without an HTTP client

        return ServerAddress(self.url, self.model or "", self.key_variable, self.timeout_s)


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
    found, _ = prompts_or_library(options.prompts, options.slices, options.prompts_per_slice)
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
    # Not `str.splitlines`, which cuts at characters that JSON's texts may hold, such as U+2028.
    lines = [line for line in enumerate(read_text("trace", path).split("\n"), 1) if line[1].strip()]
    if not 0 < len(lines) <= MAX_REQUESTS:
        raise InputError("trace", str(path), f"must hold 1 to {MAX_REQUESTS} requests, one a line")
    parsed = sorted((_line(path, number, line) for number, line in lines), key=lambda raw: float(raw["arrival_s"]))
    found = []
    for index, raw in enumerate(parsed, first):
        prompt = prompts[index % len(prompts)]
        if "prompt" in raw:
            prompt = Prompt(f"trace:{index}", str(raw.get("slice", "trace")), raw["prompt"])
        most = raw.get("max_tokens", options.max_tokens)
        found.append(_request(options, prompt, index, float(raw["arrival_s"]), most))
    return found


def warmup_requests(options: UrlOptions, prompts: Sequence[Prompt]) -> list[UrlRequest]:
    """Requests that are sent one after the other before the run, and not counted."""
    chosen = ((index, prompts[index % len(prompts)]) for index in range(options.warmup))
    return [_request(options, prompt, index, 0.0, options.max_tokens) for index, prompt in chosen]


def _request(options: UrlOptions, prompt: Prompt, index: int, arrival_s: float, max_tokens: int) -> UrlRequest:
    messages = (prompt.messages or (("user", prompt.text),)) if options.chat else ()
    return UrlRequest(index, arrival_s, prompt.slice, prompt.text, max_tokens, messages)


def _line(path: Path, number: int, line: str) -> Mapping[str, Any]:
    where = f"trace line {number}"
    line = line.removesuffix("\r")
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
