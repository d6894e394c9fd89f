"""Words and options that several measurements share: names of settings and numerics, and the metadata of fields."""

from __future__ import annotations

from collections.abc import Mapping

from foretoken.config import DRAFTERS
from foretoken.errors import InputError
from foretoken.field_text import words
from foretoken.measure.workload import SLICES
from foretoken.option import Option, Settings, option
from foretoken.params import check_number, check_whole

ALL = "all"  # every slice, or every kind
PLAIN = "plain"
DEFAULT_NUMERICS, STRICT = "default", "strict"

setting = Settings()  # of one measurement; those of several follow

DRAFTERS_OPTION = option(
    f"Drafters, separated by commas: {', '.join(DRAFTERS)}; or all; or sweep: each at 2, 3, 5 and 8 draft "
    "tokens, a draft model also with trees. NAME:field=value;field=value sets options of one. With --draft "
    "alone draft_model is added.",
    read=words,
)
SLICES_OPTION = option(f"Kinds of text: {', '.join(SLICES)} (or those of --prompts); or all.", read=words)
PROMPTS_OPTION = option(
    "File or folder of prompts: JSON lines with `prompt` or `messages` and optional `slice` and `prediction`, "
    "or public evaluation sets."
)
CHAT_OPTION = option("Send texts as a user's message through the target's chat template.")
MAX_TOKENS_OPTION = option("Tokens per answer.")
REPEATS_OPTION = option("Number of measurements of each setting; the median is reported.")
STOP_AT_EOS_OPTION = option("Let answers end early; by default all have the same length.")
OUT_OPTION = option("Folder for a dated result, or one .html, .md or .json file.")
NAME_OPTION = option("End of the result's file name.")
SEED_OPTION = option("Seed of sampled answers.")
PRICE_OPTION = option("Price of this machine per hour: adds the price of a million tokens.")
SLO_OPTION = option(
    "With a price: longest mean time between two tokens of an answer, in milliseconds; others are paid for and not "
    "counted."
)

_MAX_PRICE = 1e9
MAX_SLO_MS = 1e9


def resume_option(what: str, how: str = "") -> Mapping[str, Option]:
    """The option that names the file from which a run resumes, where each `what` is kept."""
    return option(f"Results file with each {what}; an interrupted run resumes from it{how}.")


def check_wholes(options: object, **limits: tuple[int, int | None]) -> None:
    """Refuse fields of `options` that are no whole numbers within their limits.

    Raises:
        InputError: names the field.
    """
    for name, (low, high) in limits.items():
        check_whole(name, getattr(options, name), low, high)


def check_slo(slo_ms: float | None, has_price: bool) -> None:
    """Refuse a time between tokens that is not above 0, or that no price is made with.

    Raises:
        InputError: names it.
    """
    if slo_ms is None:
        return
    check_number("slo_ms", slo_ms, 0.0, MAX_SLO_MS, open_low=True)
    if not has_price:
        raise InputError("slo_ms", slo_ms, "says which tokens a price is divided among: give price_per_hour too")


def check_price(price_per_hour: float | None) -> None:
    """Refuse a price that is not above 0.

    Raises:
        InputError: names the value.
    """
    if price_per_hour is not None:
        check_number("price_per_hour", price_per_hour, 0.0, _MAX_PRICE, open_low=True)
