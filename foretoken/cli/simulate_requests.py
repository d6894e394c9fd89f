"""`foretoken simulate`: the requests, the settings and the limits that the options ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError, InputError
from foretoken.files import read_text
from foretoken.params import check_number, check_whole, is_count
from foretoken.simulate.arrivals import MOST_REQUESTS, Chances, Job, Lengths, parse_acceptance, parse_trace, poisson
from foretoken.simulate.loads import SHAPES
from foretoken.simulate.setting import SimSetting, parse_setting

_POISSON = "poisson:"
_NUM_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 200, "256", "128"
# Every place of a batch and every replica is an object of its own; a built-in trace fills the batch eight times to find
# the capacity.
_BOUNDS = (("max_batch_size", 1, 4096), ("replicas", 1, 1024), ("seed", 0, 2**63))
_MOST_SECONDS = 1e6
_OF_REQUESTS = ("requests", "prompt_tokens", "output_tokens", "acceptance")


def trace_names(text: str) -> tuple[str, ...]:
    """The built-in traces that `text` names, separated by commas; none where it names anything else."""
    words = words_of(text)
    return tuple(words) if words and all(word in SHAPES for word in words) else ()


def check_trace(given: Mapping[str, Any]) -> None:
    """Built-in traces say everything of their requests; only they last as long as they are told.

    Raises:
        ConfigError: an option that does not go with the trace.
        InputError: a number that cannot be simulated.
    """
    for name, low, high in _BOUNDS:
        check_whole(name, given[name], low, high)
    if given["trace_seconds"] is not None:
        check_number("trace_seconds", given["trace_seconds"], low=0.0, high=_MOST_SECONDS, open_low=True)
    built_ins = trace_names(given["trace"])
    if not words_of(given["trace"]):
        raise InputError("trace", given["trace"], f"name one of {', '.join(SHAPES)}, poisson:RATE, or a file")
    for name in _OF_REQUESTS:
        if built_ins and given[name] is not None:
            raise ConfigError(
                name,
                given[name],
                f"the trace {built_ins[0]} says it for each request; leave it out, or use --trace poisson:RATE",
            )
    if given["trace_seconds"] is not None and not built_ins:
        raise ConfigError(
            "trace_seconds",
            given["trace_seconds"],
            f"goes with the built-in traces {', '.join(SHAPES)} only; leave it out",
        )


def jobs_of(given: Mapping[str, Any], acceptance: str) -> list[Job]:
    """The requests of a file or of random arrivals; `acceptance` holds for those that say nothing of it.

    Raises:
        InputError, ConfigError: an option that makes no requests, or does not go with the trace.
        StorageError: a file that cannot be read.
    """
    trace, requests, chances = (
        given["trace"],
        given["requests"],
        acceptance_of(acceptance if given["acceptance"] is None else given["acceptance"]),
    )
    if requests is not None:
        check_whole("requests", requests, low=1, high=MOST_REQUESTS)
    if not trace.startswith(_POISSON):
        for name in ("prompt_tokens", "output_tokens"):
            if given[name] is not None:
                raise ConfigError(
                    name,
                    given[name],
                    "the trace file says it for each request; leave it out, or use --trace poisson:RATE",
                )
        if not Path(trace).suffix and not os.path.exists(trace):
            raise InputError(
                "trace",
                trace,
                f"is no file and no built-in trace; choose one of {', '.join(SHAPES)}, poisson:RATE, or a file",
            )
        lines = read_text("trace", Path(trace)).split("\n")
        try:
            return parse_trace(lines, chances)[:requests]
        except InputError as error:
            raise InputError(error.field, error.value, f"{error.remedy} (in {trace})") from error
    try:
        rate = float(trace.removeprefix(_POISSON))
    except ValueError:
        raise InputError(
            "trace", trace, "must be poisson:RATE with a number of requests per second, or a file"
        ) from None
    prompts, outputs = (
        _lengths(name, usual if given[name] is None else given[name])
        for name, usual in (("prompt_tokens", _PROMPT_TOKENS), ("output_tokens", _OUTPUT_TOKENS))
    )
    return poisson(rate, requests or _NUM_REQUESTS, prompts, outputs, chances, given["seed"])


def acceptance_of(text: str) -> Chances | str:
    """Numbers if they look like numbers, else a name."""
    words = [word.strip() for word in text.split(",")]
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return parse_acceptance(text)
    return parse_acceptance(numbers)


def settings_of(text: str) -> list[SimSetting]:
    """The settings that are named, each once.

    Raises:
        ConfigError: none is named, or one that does not exist.
    """
    words = words_of(text)
    if not words:
        raise ConfigError("settings", text, "name at least one, such as plain or ngram-auto, or leave it out")
    return [parse_setting(word) for word in words]


def words_of(text: str) -> list[str]:
    """What stands between commas, each once."""
    return [word for word in dict.fromkeys(word.strip() for word in text.split(",")) if word]


def _lengths(field: str, text: str) -> Lengths:
    low, found, high = text.partition("-")
    if not is_count(low) or (found and not is_count(high)) or not 1 <= int(low) <= int(high or low):
        raise InputError(field, text, "must be a number of tokens, or LOW-HIGH")
    return Lengths(int(low), int(high or low))
