"""The flags that say how tokens are chosen, and the `SamplingParams` that given flags mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from foretoken.cli.flags import flag, with_flags
from foretoken.config import SamplingParams
from foretoken.errors import InputError

_Texts = list[str] | None


def _described(kind: Any, words: str) -> Any:  # noqa: ANN401 - annotations
    return Annotated[kind, typer.Option(help=words)]


_FLAGS = (
    flag(
        "temperature", 0.0, _described(float, "0 takes the most likely token; 1 samples the model's own distribution.")
    ),
    flag("top_p", 1.0, _described(float, "Sample from the smallest set of tokens that holds this probability.")),
    flag("top_k", 0, _described(int, "Sample from the k most likely tokens; 0 = all.")),
    flag("min_p", 0.0, _described(float, "Drop tokens less likely than this share of the most likely one.")),
    flag("presence_penalty", 0.0, _described(float, "Taken off the logit of every token the answer already holds.")),
    flag("frequency_penalty", 0.0, _described(float, "Taken off once for every time the answer holds the token.")),
    flag("repetition_penalty", 1.0, _described(float, "Divides the logits of tokens in prompt and answer; 1 = off.")),
    flag("logit_bias", None, _described(_Texts, "ID=VALUE added to a token's logit; may be given several times.")),
    flag(
        "bad_word",
        None,
        _described(
            _Texts, "A text that must not appear in the answer, not even inside a word; may be given several times."
        ),
    ),
    flag("seed", None, _described(int | None, "Repeat the same random choices.")),
    flag("stop", None, _described(_Texts, "Stop before this text; may be given several times.")),
    flag("min_tokens", 0, _described(int, "Shortest answer, in tokens.")),
    flag("ignore_eos", False, Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")]),
)


def with_sampling_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` with the flags of sampling behind its own `max_tokens`; it reads them from its context."""
    return with_flags(verb, _FLAGS, after="max_tokens")


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` from flags by name, other flags among them.

    Raises:
        InputError: a value that makes no sense; names the flag.
    """
    as_given = {field.name: given[field.name] for field in fields(SamplingParams) if field.name in given}
    return SamplingParams(
        **as_given
        | {
            "logit_bias": _biases(given["logit_bias"] or ()),
            "bad_words": tuple(given["bad_word"] or ()),
            "stop": tuple(given["stop"] or ()),
        }
    )


def _biases(entries: Sequence[str]) -> dict[int, float]:
    """Each token's bias; a token that is named twice would have two."""
    found: dict[int, float] = {}
    for token, value in map(_bias, entries):
        if token in found:
            raise InputError(
                "logit_bias",
                f"{token}={value:g}",
                f"token {token} has the bias {found[token]:g} already; give one of the two",
            )
        found[token] = value
    return found


def _bias(entry: str) -> tuple[int, float]:
    """`ID=VALUE`."""
    token, _, value = entry.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InputError(
            "logit_bias", entry, "must be a token id, an equals sign and a number, such as 42=-100"
        ) from None
