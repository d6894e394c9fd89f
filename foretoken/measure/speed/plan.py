"""What a speed measurement is made of: settings, what answers under them, their answers, and the plan of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foretoken.backend.answering import Answer, Question
from foretoken.config import SamplingParams
from foretoken.measure.options import DEFAULT_NUMERICS
from foretoken.measure.workload import Prompt

ENGINE = "foretoken"
ALL_SLICES = "all"


@dataclass(frozen=True)
class SpeedSetting:
    """One way to decode: an engine, a drafter (None: plain decoding) and its number of draft tokens.

    `options` are those of the drafter as they were written. `counterpart` is the drafter of ours that another engine's
    way is like. `free` drafters need nothing but the target and the text: no draft model, no prediction. `slices`
    limits where the setting is measured (None: everywhere). An `optional` setting that cannot be used here is left out
    with a note. `numerics` is that of the engine that runs it. `samples`: it can be measured above temperature 0.
    """

    name: str
    engine: str = ENGINE
    drafter: str | None = None
    num_draft: int | str | None = None
    lossy: bool = False
    options: str = ""
    counterpart: str | None = None
    free: bool = False
    slices: tuple[str, ...] | None = None
    optional: bool = False
    numerics: str = DEFAULT_NUMERICS
    samples: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding by this engine."""
        return self.engine == ENGINE and self.drafter is None

    def runs_on(self, prompt: Prompt) -> bool:
        """Whether it is measured on this prompt."""
        return self.slices is None or prompt.slice in self.slices


def question_of(prompt: Prompt, params: SamplingParams) -> Question:
    """A prompt as engines are asked it: its text, or its conversation where nobody rendered it."""
    return Question(
        text=prompt.text,
        messages=() if prompt.text else prompt.messages,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
        prediction=prompt.prediction,
    )


@dataclass(frozen=True)
class SpeedSample:
    """One answer with the place it has in the run; `others` is the share of the cores' time that other processes took
    meanwhile, None where that is not known.
    """

    setting: SpeedSetting
    prompt_index: int
    slice: str
    temperature: float
    repeat: int
    answer: Answer
    others: float | None = None


@dataclass(frozen=True)
class SpeedPlan:
    """Every contender on every prompt at every temperature, `repeats` times after `warmup` untimed prompts."""

    prompts: tuple[Prompt, ...]
    max_tokens: int
    temperatures: tuple[float, ...]
    repeats: int
    warmup: int
    seed: int
    ignore_eos: bool = True

    def params(self, temperature: float, prompt_index: int, repeat: int) -> SamplingParams:
        """Sampling of one answer; the seed is the same for every setting."""
        seed = self.seed + repeat * len(self.prompts) + prompt_index
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=temperature, seed=seed, ignore_eos=self.ignore_eos
        )

    def temperatures_of(self, setting: SpeedSetting) -> tuple[float, ...]:
        """Those at which it can answer."""
        return tuple(t for t in self.temperatures if setting.samples or t == 0.0)

    def places_of(self, setting: SpeedSetting) -> tuple[int, ...]:
        """Numbers of the prompts that it is measured on."""
        return tuple(index for index, prompt in enumerate(self.prompts) if setting.runs_on(prompt))

    def num_answers(self, settings: Iterable[SpeedSetting]) -> int:
        """Answers that are measured."""
        return sum(len(self.temperatures_of(s)) * self.repeats * len(self.places_of(s)) for s in settings)

    def num_runs(self, settings: Iterable[SpeedSetting], num_known: int = 0) -> int:
        """Answers that a run takes, warm-up included, less those known already."""
        settings = tuple(settings)
        warmups = self.warmup * sum(len(self.temperatures_of(s)) for s in settings)
        return self.num_answers(settings) - num_known + warmups
