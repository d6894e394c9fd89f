"""What `foretoken eval` measures, of our engine or of another: drafters, prompts and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from foretoken.backend.answering import AnsweringBackend
from foretoken.backend.drafting import DrafterChoice, parse_drafters
from foretoken.config import RULES, SpecConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError, InputError
from foretoken.field_text import numbers, words
from foretoken.measure import options as shared
from foretoken.measure.asked import BackendSource
from foretoken.measure.options import check_price, check_slo, check_wholes, resume_option, setting
from foretoken.option import check_fields, same_option
from foretoken.params import check_temperatures

MAX_PROMPTS = 100_000
MAX_DRAFTED = 256
_TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class EvalDrafter:
    """One drafter: its name in the results, its configuration, and what it does with its prompts' predictions."""

    name: str
    spec: SpecConfig
    takes_prediction: bool = False
    needs_prediction: bool = False


@dataclass(frozen=True)
class EvalOptions:
    """Models, drafters and settings of an evaluation.

    `drafters` are written as for `foretoken bench`. Every draft has `num_draft` tokens at most, a fixed number:
    acceptance rates at different lengths are not comparable. `rule="auto"` is greedy at temperature 0 and coupled
    above, because every answer has a seed. With `chat` a text becomes a user's message. `seed` is added
    to the seeds of the sampled answers, which follow from their prompts. With `price_per_hour` answers are timed, and
    those of plain decoding beside them. `resume` is a file that keeps every answer.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    draft: str | None = field(default=None, metadata=same_option(SpecConfig, "draft"))
    drafters: Sequence[str] = field(default=("draft_model", "ngram"), metadata=shared.DRAFTERS_OPTION)
    num_draft: int = setting(5, "Draft tokens of each round: a fixed number.")
    rule: str = setting(
        "auto", "Verification rule: {choices}; auto is greedy, and coupled above temperature 0.", choices=RULES
    )
    allow_lossy: bool = field(default=False, metadata=same_option(SpecConfig, "allow_lossy"))
    prompts_per_slice: int = setting(10, "Prompts of each slice; ten or more for an interval.")
    max_tokens: int = field(default=64, metadata=shared.MAX_TOKENS_OPTION)
    temperatures: Sequence[float] = setting((0.0, 0.8), "Temperatures, separated by commas; 0 is greedy.", read=numbers)
    stop_at_eos: bool = field(default=False, metadata=shared.STOP_AT_EOS_OPTION)
    chat: bool = field(default=False, metadata=shared.CHAT_OPTION)
    seed: int = setting(0, "Seed of the sampled answers.")
    dtype: str = field(default="auto", metadata=same_option(EngineConfig, "dtype"))
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    numerics: str = field(default="default", metadata=same_option(EngineConfig, "numerics"))
    weights: str = field(default="auto", metadata=same_option(EngineConfig, "weights"))
    price_per_hour: float | None = field(default=None, metadata=shared.PRICE_OPTION)
    slo_ms: float | None = field(default=None, metadata=shared.SLO_OPTION)
    resume: Path | None = field(default=None, metadata=resume_option("answer"))

    def __post_init__(self) -> None:
        check_fields(self)
        _check_sizes(self)
        check_temperatures("temperatures", self.temperatures)
        _ = self.settings  # refuses what no drafter takes

    @cached_property
    def settings(self) -> tuple[EvalDrafter, ...]:
        """The drafters with their configurations, each once.

        Raises:
            ConfigError: an unknown drafter or option, a drafter without the draft that it needs, or one whose
                acceptance is not at a fixed length.
        """
        found: dict[str, EvalDrafter] = {}
        for choice in parse_drafters(self.drafters):
            refusal = self._refusal(choice)
            if refusal is not None:
                if choice.required:
                    raise refusal
                continue
            draft = self.draft if "draft" in choice.takes else None
            spec = choice.spec(num_draft=self.num_draft, rule=self.rule, allow_lossy=self.allow_lossy, draft=draft)
            name = f"{choice.label}-{spec.num_draft}" + (f" {spec.rule}" if choice.own("rule") else "")
            found[name] = EvalDrafter(name, spec, "prediction" in choice.takes, "prediction" in choice.needs)
        if not found:
            raise ConfigError("drafters", ",".join(self.drafters), "none of them can be evaluated here; name others")
        if self.draft is not None and all(drafter.spec.draft is None for drafter in found.values()):
            raise ConfigError("draft", self.draft, "none of the drafters takes one; leave it out, or add draft_model")
        return tuple(found.values())

    @property
    def comparable(self) -> dict[str, object]:
        """The settings that two results must share to be comparable."""
        return {name: getattr(self, name) for name in ("rule", "max_tokens", "stop_at_eos", "chat", "allow_lossy")}

    def _refusal(self, choice: DrafterChoice) -> ConfigError | None:
        """Why a drafter cannot be evaluated; only part of `all`, it is then left out."""
        if "auto" in (choice.name, choice.own("num_draft")):
            remedy = "evaluate drafters by name, with a fixed number of draft tokens: acceptance depends on it"
            return ConfigError("drafters", choice.label, remedy)
        if "draft" in choice.needs and self.draft is None:
            return ConfigError("drafters", choice.label, "needs a draft model: give --draft, or name other drafters")
        return None


def _check_sizes(options: EvalOptions | BackendEvalOptions) -> None:
    counts = {"num_draft": (1, MAX_DRAFTED), "prompts_per_slice": (1, MAX_PROMPTS)}
    check_wholes(options, **counts, max_tokens=(2, None), seed=(0, 2**62))
    check_price(options.price_per_hour)
    check_slo(options.slo_ms, options.price_per_hour is not None)


@dataclass(frozen=True)
class BackendEvalOptions:
    """The backend and the settings of its evaluation.

    `drafters` are its own ways to draft, at most `num_draft` tokens each where that can be chosen; None: all that it
    has. `temperatures` None: 0, and 0.8 where it samples by a seed. The others are those of `EvalOptions`.
    """

    source: BackendSource
    drafters: Sequence[str] | None = setting(None, "Ways to draft of the backend.", read=words)
    num_draft: int = field(default=5, metadata=same_option(EvalOptions, "num_draft"))
    prompts_per_slice: int = field(default=10, metadata=same_option(EvalOptions, "prompts_per_slice"))
    max_tokens: int = field(default=64, metadata=shared.MAX_TOKENS_OPTION)
    temperatures: Sequence[float] | None = field(default=None, metadata=same_option(EvalOptions, "temperatures"))
    stop_at_eos: bool = field(default=False, metadata=shared.STOP_AT_EOS_OPTION)
    chat: bool = field(default=False, metadata=shared.CHAT_OPTION)
    seed: int = field(default=0, metadata=same_option(EvalOptions, "seed"))
    price_per_hour: float | None = field(default=None, metadata=shared.PRICE_OPTION)
    slo_ms: float | None = field(default=None, metadata=shared.SLO_OPTION)
    resume: Path | None = field(default=None, metadata=same_option(EvalOptions, "resume"))

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.temperatures is not None:
            check_temperatures("temperatures", self.temperatures)

    def temperatures_for(self, backend: AnsweringBackend) -> tuple[float, ...]:
        """The temperatures to ask at, each once.

        Raises:
            InputError: above 0, and it does not sample by a seed.
        """
        sampling = backend.capabilities.sampling
        if self.temperatures is None:
            return _TEMPERATURES if sampling else _TEMPERATURES[:1]
        for temperature in self.temperatures:
            if temperature > 0 and not sampling:
                raise InputError("temperatures", temperature, f"{backend.name} does not sample by a seed; give 0")
        return tuple(dict.fromkeys(float(one) for one in self.temperatures))

    @property
    def comparable(self) -> dict[str, object]:
        """What two results must share to be comparable; the rule is the backend's own."""
        named = ("max_tokens", "stop_at_eos", "chat")
        return {"rule": "the backend's own", "allow_lossy": False} | {name: getattr(self, name) for name in named}
