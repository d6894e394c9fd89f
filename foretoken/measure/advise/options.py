"""What the adviser is asked: the target, what may draft for it, the texts, the load, memory and price."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

from foretoken.backend.registry import check_address
from foretoken.engine_config import THREADS, EngineConfig
from foretoken.errors import ConfigError, InputError
from foretoken.field_text import wholes, words
from foretoken.machine.memory import parse_bytes
from foretoken.measure import options as shared
from foretoken.measure.eval.options import EvalOptions
from foretoken.measure.options import ALL, MAX_SLO_MS, check_price, check_wholes, resume_option, setting
from foretoken.measure.url.plan import UrlOptions
from foretoken.measure.write import check_result
from foretoken.option import check_fields, option, same_option
from foretoken.params import TEMPERATURES, check_number, check_whole

# Of a run that goes on: they decide about no answer, and costs of steps are measured anew.
FREE_TO_CHANGE = ("memory", "reserve", "machines", "budget_s", "concurrency")
MAX_CONCURRENCY = 512
MAX_NUM_DRAFT = 64
# What is not read beside an address, and without one, with the remedy.
_OF_ENGINE = dict.fromkeys(
    ("memory", "reserve", "weights", "dtype", "device", "threads"), "is about our own engine; leave it out beside url"
)
_OF_ADDRESS = {
    "model": "names a model at an address: give url too, or leave it out",
    "key_variable": "names the key of an address: give url too, or leave it out",
}


@dataclass(frozen=True)
class AdviseOptions:
    """The question.

    `drafts` are names of drafters with their options (`backend.drafting`), folders or hub ids of draft models, and of
    trained heads. `concurrency` are numbers of requests that are answered at once. `memory` is what the engine may use,
    of which the share `reserve` is kept free (None: what this machine has free). `slo_ms` is the longest mean time
    between two tokens of an answer. `price_per_hour` is that of this machine; `machines` is a JSON file of others.
    Costs of steps are measured for about `budget_s` seconds. `resume` is a file that keeps every answer.

    With `url` the engine is a server that decodes `target` plainly: its answers and its times are measured through that
    address, and no weights are loaded here. `model` is the name of its model there.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    url: str | None = setting(
        None, "Address of a server of any engine that decodes the target plainly; it is measured instead of ours."
    )
    model: str | None = field(default=None, metadata=same_option(UrlOptions, "model"))
    key_variable: str = field(default=UrlOptions.key_variable, metadata=same_option(UrlOptions, "key_variable"))
    drafts: tuple[str, ...] = setting(
        ("ngram", "suffix"),
        "Drafters to consider, separated by commas: folders or hub ids of draft models and of trained heads, and "
        "drafters without a model of their own (ngram, suffix, recycling, mtp), NAME:field=value with options.",
        read=words,
    )
    prompts: Path | None = field(default=None, metadata=shared.PROMPTS_OPTION)
    slices: tuple[str, ...] = field(default=(ALL,), metadata=shared.SLICES_OPTION)
    prompts_per_slice: int = field(default=8, metadata=same_option(EvalOptions, "prompts_per_slice"))
    concurrency: tuple[int, ...] = setting((1, 4, 8), "Requests answered at once, separated by commas.", read=wholes)
    num_drafts: tuple[int, ...] = setting(
        tuple(range(1, 11)), "Numbers of draft tokens to compare, separated by commas.", read=wholes
    )
    max_tokens: int = field(default=128, metadata=shared.MAX_TOKENS_OPTION)
    temperature: float = setting(0.0, "Temperature of the answers; 0 is greedy.")
    stop_at_eos: bool = field(default=False, metadata=shared.STOP_AT_EOS_OPTION)
    chat: bool = field(default=False, metadata=shared.CHAT_OPTION)
    memory: str | None = setting(
        None,
        "Memory for weights and caches, such as 24GiB; without it, what this machine has free.",
        valid=lambda _name, text: parse_bytes(text),
    )
    reserve: float = setting(0.2, "Share of the memory that is kept free.")
    slo_ms: float | None = setting(None, "Longest mean time between two tokens of an answer, in milliseconds.")
    price_per_hour: float | None = field(default=None, metadata=shared.PRICE_OPTION)
    machines: Path | None = field(
        default=None,
        metadata=option(
            'JSON file of machines: a list of {"name", "price_per_hour"} and optional "speed" (of steps, this machine '
            "is 1)."
        ),
    )
    budget_s: float = setting(120.0, "Seconds that measuring the costs of steps may take.")
    weights: str = field(default="auto", metadata=same_option(EngineConfig, "weights"))
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    threads: int | None = field(default=None, metadata=THREADS)
    resume: Path | None = field(default=None, metadata=resume_option("answer"))
    out: Path | None = field(default=None, metadata=shared.OUT_OPTION)
    name: str = field(default="advise", metadata=shared.NAME_OPTION)
    seed: int = field(default=0, metadata=shared.SEED_OPTION)

    def __post_init__(self) -> None:
        check_fields(self)
        check_wholes(self, prompts_per_slice=(1, 10_000), max_tokens=(2, 1 << 20), seed=(0, 2**62))
        for name, most in (("concurrency", MAX_CONCURRENCY), ("num_drafts", MAX_NUM_DRAFT)):
            if not getattr(self, name):
                raise InputError(name, getattr(self, name), "give at least one number")
            for number in getattr(self, name):
                check_whole(name, number, 1, most)
        self._check_url()
        if not self.drafts:
            raise InputError("drafts", self.drafts, "name at least one drafter, draft model or head")
        check_number("temperature", self.temperature, *TEMPERATURES)
        check_number("reserve", self.reserve, 0.0, 0.9)
        check_number("budget_s", self.budget_s, 1.0, 86_400.0)
        if self.slo_ms is not None:
            check_number("slo_ms", self.slo_ms, 0.0, MAX_SLO_MS, open_low=True)
        check_price(self.price_per_hour)
        check_result(self.out, self.name)

    def _check_url(self) -> None:
        """The address can be asked, and nothing is given that only our own engine reads."""
        if self.url is not None:
            check_address("url", self.url, self.key_variable)
        unread = _OF_ADDRESS if self.url is None else _OF_ENGINE
        for one in fields(self):
            given = getattr(self, one.name)
            if one.name in unread and given != one.default:
                raise ConfigError(one.name, given, unread[one.name])

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """The numbers of requests at once, ascending, each once."""
        return tuple(sorted(set(self.concurrency)))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of draft tokens, ascending, each once."""
        return tuple(sorted(set(self.num_drafts)))
