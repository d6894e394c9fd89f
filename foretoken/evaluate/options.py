"""What `foretoken eval` measures: models, drafters, prompts and lengths; and the bound of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from foretoken.backend.drafting import DrafterChoice, parse_drafters
from foretoken.bench.speed_options import SpeedOptions
from foretoken.config import RULES, SpecConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.field_text import numbers
from foretoken.option import check_fields, option, same_option
from foretoken.params import check_temperatures, check_whole

MAX_PROMPTS = 100_000
MAX_DRAFTED = 256


@dataclass(frozen=True)
class EvalDrafter:
    """One drafter under evaluation: its name in the results, its configuration, and whether its requests get their
    prompt's prediction.
    """

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
    to the seeds of the sampled answers, which follow from their prompts.
    """

    target: str = field(metadata=same_option(SpeedOptions, "target"))
    draft: str | None = field(default=None, metadata=same_option(SpeedOptions, "draft"))
    drafters: Sequence[str] = field(default=("draft_model", "ngram"), metadata=same_option(SpeedOptions, "drafters"))
    num_draft: int = field(default=5, metadata=option("Draft tokens of each round: a fixed number."))
    rule: str = field(
        default="auto",
        metadata=option(
            "Verification rule: {choices}; auto is greedy, and coupled above temperature 0.", choices=RULES
        ),
    )
    allow_lossy: bool = field(default=False, metadata=same_option(SpeedOptions, "allow_lossy"))
    prompts_per_slice: int = field(default=10, metadata=option("Prompts of each slice; ten or more for an interval."))
    max_tokens: int = field(default=64, metadata=same_option(SpeedOptions, "max_tokens"))
    temperatures: Sequence[float] = field(
        default=(0.0, 0.8), metadata=option("Temperatures, separated by commas; 0 is greedy.", read=numbers)
    )
    stop_at_eos: bool = field(default=False, metadata=same_option(SpeedOptions, "stop_at_eos"))
    chat: bool = field(default=False, metadata=same_option(SpeedOptions, "chat"))
    seed: int = field(default=0, metadata=option("Another number gives other sampled answers."))
    dtype: str = field(default="auto", metadata=same_option(SpeedOptions, "dtype"))
    device: str = field(default="auto", metadata=same_option(SpeedOptions, "device"))
    numerics: str = field(default="default", metadata=same_option(EngineConfig, "numerics"))
    weights: str = field(default="auto", metadata=same_option(SpeedOptions, "weights"))

    def __post_init__(self) -> None:
        check_fields(self)
        check_whole("num_draft", self.num_draft, low=1, high=MAX_DRAFTED)
        check_whole("prompts_per_slice", self.prompts_per_slice, low=1, high=MAX_PROMPTS)
        check_whole("max_tokens", self.max_tokens, low=2)
        check_whole("seed", self.seed, low=0, high=2**62)
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
            if refusal is None:
                drafter = self._drafter(choice)
                found[drafter.name] = drafter
            elif choice.required:
                raise refusal
        if not found:
            raise ConfigError("drafters", ",".join(self.drafters), "none of them can be evaluated here; name others")
        return tuple(found.values())

    def _refusal(self, choice: DrafterChoice) -> ConfigError | None:
        """Why a drafter cannot be evaluated; only part of `all`, it is then left out."""
        if "auto" in (choice.name, choice.own("num_draft")):
            remedy = "evaluate drafters by name, with a fixed number of draft tokens: acceptance depends on it"
            return ConfigError("drafters", choice.label, remedy)
        if "draft" in choice.needs and self.draft is None:
            return ConfigError("drafters", choice.label, "needs a draft model: give --draft, or name other drafters")
        return None

    def _drafter(self, choice: DrafterChoice) -> EvalDrafter:
        draft = self.draft if "draft" in choice.takes else None
        spec = choice.spec(num_draft=self.num_draft, rule=self.rule, allow_lossy=self.allow_lossy, draft=draft)
        rule = f" {spec.rule}" if choice.own("rule") else ""
        name = f"{choice.label}-{spec.num_draft}{rule}"
        return EvalDrafter(name, spec, "prediction" in choice.takes, "prediction" in choice.needs)
