"""Both checkouts, opened with the same options, and turns that alternate between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.measure.load.prompts import asks
from foretoken.model.names import model_folder
from foretoken.text.tokenizer import load_tokenizer
from studies.before_after.checkout import Checkout, CheckoutError

BEFORE, AFTER = "before", "after"
_SPARE_TOKENS = 64  # of cache for each request, for draft tokens and rounding up to blocks
_MAX_PROMPT_TOKENS = 4096  # the prompts of a batch are read in one step
_OWN_DRAFT = ("draft_model", "cascade", "mix", "auto")  # drafters that take a draft model

Setting = dict[str, Any]  # fields of a SpecConfig; empty: plain decoding


@dataclass(frozen=True)
class Options:
    """What both checkouts are opened with, and how requests are made."""

    folders: Mapping[str, Path]
    target: str
    draft: str | None
    settings: Mapping[str, Setting]
    slices: tuple[str, ...]
    max_batch: int
    num_requests: int  # of each slice
    max_tokens: int
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    profile: str = "auto"
    prompt_tokens: int = 64
    seed: int = 0
    temperature: float | None = None  # None: that of the slice
    top_p: float = 1.0


@dataclass
class Pair:
    """The children by name; `idle` holds for each turn the share of a core that the other child used meanwhile."""

    checkouts: dict[str, Checkout]
    about: dict[str, dict[str, Any]]
    idle: list[float] = field(default_factory=list)

    def turn(self, name: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """One turn of one checkout.

        Raises:
            CheckoutError: the child failed.
        """
        others = [other for key, other in self.checkouts.items() if key != name]
        before_s, began = sum(other.cpu_s() for other in others), time.perf_counter()
        reply = self.checkouts[name].ask(message)
        took_s = time.perf_counter() - began
        self.idle.append((sum(other.cpu_s() for other in others) - before_s) / took_s)
        return reply


def setting_fields(name: str, draft: str | None) -> Setting:
    """The fields of the setting called `name`: plain, auto, DRAFTER-auto or DRAFTER-NUMBER.

    Raises:
        CheckoutError: another name, or a drafter without its draft model.
    """
    if name == "plain":
        return {}
    drafter, _, number = ("auto", "", "auto") if name == "auto" else name.rpartition("-")
    if not drafter or not (number == "auto" or number.isdecimal()):
        raise CheckoutError(f"setting {name!r}: must be plain, auto, DRAFTER-auto or DRAFTER-5")
    if drafter in ("draft_model", "cascade") and draft is None:
        raise CheckoutError(f"setting {name!r} needs --draft")
    given = draft if drafter in _OWN_DRAFT else None
    return {"drafter": drafter, "draft": given, "num_draft": number if number == "auto" else int(number)}


def pool_of(options: Options) -> dict[str, list[dict[str, Any]]]:
    """The requests of every slice: token ids, temperature and top_p.

    Raises:
        CheckoutError: a target without a tokenizer.
    """
    tokenizer = load_tokenizer(model_folder(options.target))
    if tokenizer is None:
        raise CheckoutError(f"{options.target} has no tokenizer, and the prompts are texts")
    found = asks(options.slices, options.num_requests, tokenizer.encode, options.prompt_tokens, options.seed)
    return {
        name: [
            {
                "ids": list(ask.prompt_ids),
                "temperature": ask.temperature if options.temperature is None else options.temperature,
                "top_p": options.top_p,
            }
            for ask in own
        ]
        for name, own in found.items()
    }


@contextmanager
def opened(options: Options) -> Iterator[Pair]:
    """Start the children and load the model in one after the other.

    Raises:
        CheckoutError: a checkout or a model that cannot be used.
    """
    pool = pool_of(options)
    longest = max(len(ask["ids"]) for own in pool.values() for ask in own)
    llm = {
        "dtype": options.dtype,
        "device": options.device,
        "cache_tokens": 2 * options.max_batch * (longest + 2 * options.max_tokens + _SPARE_TOKENS),
        "max_batch_size": options.max_batch,
        "max_prompt_tokens": _MAX_PROMPT_TOKENS,
        "profile": options.profile,
    }
    checkouts: dict[str, Checkout] = {}
    try:
        about = {}
        for name, folder in options.folders.items():
            checkouts[name] = Checkout(name, folder, options.threads)
            about[name] = checkouts[name].open(
                {
                    "target": options.target,
                    "llm": llm,
                    "settings": dict(options.settings),
                    "pool": pool,
                    "seed": options.seed,
                }
            )
        yield Pair(checkouts, about)
    finally:
        for checkout in checkouts.values():
            checkout.close()


def rotated(sides: Sequence[str], settings: Sequence[str], turn: int) -> list[tuple[str, str]]:
    """The order of a round: settings rotate, and the checkouts of a setting stand side by side and swap places."""
    first = turn % len(settings)
    order = [*settings[first:], *settings[:first]]
    own = list(sides) if turn % 2 == 0 else list(reversed(sides))
    return [(side, setting) for setting in order for side in own]
