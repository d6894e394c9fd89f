"""The validation of the simulator from opening the models to the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from foretoken.backend.drafting import DrafterChoice, parse_drafters
from foretoken.config import SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.llm import LLM
from foretoken.errors import ConfigError
from foretoken.measure.report import Report, load_average, source_caveats
from foretoken.measure.speed.profile import measure_profile
from foretoken.model.names import model_folder
from foretoken.plan.profile import Profile
from foretoken.simulate.inputs import Job, Limits, SimSetting
from studies.validation.calibrate import slice_of
from studies.validation.tables import validation_report
from studies.validation.validate import Tell, ValidationPlan, compare, median_profile

_MAX_PASSES, _PASSES_S = 3, 60.0  # a profile is measured again until so much time is spent


@dataclass(frozen=True)
class ValidationOptions:
    """What to validate: models, settings, limits, and arrivals by name (requests, or None for built-in ones).

    `threads=None` keeps torch's number; `seconds` is how long built-in arrivals last (None: what suits the machine).
    """

    target: str
    draft: str | None
    settings: tuple[SimSetting, ...]
    traces: Mapping[str, Sequence[Job] | None]
    max_batch_size: int = 16
    max_prompt_tokens: int = 512
    cache_tokens: int | None = None
    max_step_tokens: int | None = None
    cache_reserve: float = SchedulerConfig.cache_reserve
    seconds: float | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0


def run_validation(options: ValidationOptions, command: str, tell: Tell = lambda _words, _finished: None) -> Report:
    """Open the models, measure a profile, and compare each setting on each trace.

    Raises:
        ConfigError: a drafter that lacks something, or needs a prediction for each prompt.
        ForetokenError: a model that cannot be used, a trace that cannot run, or a failing engine.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    choices = _choices(options)
    for job in (job for jobs in options.traces.values() if jobs is not None for job in jobs):
        slice_of(job)  # before minutes of measuring
    folder, draft = model_folder(options.target), None if options.draft is None else model_folder(options.draft)
    caveats = source_caveats(folder, draft, load_average())
    given = {"draft": options.draft}
    specs = {name: choice.spec(**{part: given[part] for part in choice.needs}) for name, choice in choices.items()}
    tell("opening the models", 0)
    with LLM(
        options.target,
        dtype=options.dtype,
        device=options.device,
        cache_tokens=options.cache_tokens,
        max_batch_size=options.max_batch_size,
        max_prompt_tokens=options.max_prompt_tokens,
        max_step_tokens=options.max_step_tokens,
        cache_reserve=options.cache_reserve,
        profile="off",
    ) as llm:
        profile = _profile(llm, specs, options, command, tell)
        limits = Limits(
            max_batch_size=options.max_batch_size,
            max_prompt_tokens=options.max_prompt_tokens,
            max_step_tokens=options.max_step_tokens,
            cache_reserve=options.cache_reserve,
            cache_tokens=llm.target.capacity_tokens,
            block_tokens=llm.target.footprint_tokens(1),
            max_context_tokens=llm.target.max_context_tokens,
        )
        rows = compare(
            llm,
            llm.encode,
            profile,
            specs,
            ValidationPlan(options.settings, options.traces, limits, options.seed, options.seconds),
            tell,
        )
    shown = {
        **asdict(options),
        "settings": [setting.name for setting in options.settings],
        "traces": list(options.traces),
    }
    return validation_report(tuple(rows), profile, shown, command, tuple(dict.fromkeys((*caveats, *profile.caveats))))


def _choices(options: ValidationOptions) -> dict[str, DrafterChoice]:
    names = tuple(dict.fromkeys(setting.drafters[0] for setting in options.settings if setting.drafters))
    choices = {choice.name: choice for choice in parse_drafters(names)}
    for name, choice in choices.items():
        if "prediction" in choice.needs:
            raise ConfigError(
                "settings", name, "needs a prediction for each prompt, and requests of a trace carry none; leave it out"
            )
        if "draft" in choice.needs and options.draft is None:
            raise ConfigError(
                "draft", None, f"drafter {name} needs a draft; give its folder, or leave {name} out of the settings"
            )
    return choices


def _profile(
    llm: LLM, specs: Mapping[str, SpecConfig], options: ValidationOptions, command: str, tell: Tell
) -> Profile:
    """The median of several profiles as `foretoken bench profile` measures them, on the open target."""
    factory = DrafterFactory(llm.folder, llm.target, llm.tokenizer, ModelOptions(options.dtype, options.device))
    drafters = {name: (spec, factory.make(spec)) for name, spec in specs.items()}
    about = {
        "name": options.target,
        "dtype": options.dtype,
        "device": str(llm.target.device),
        "threads": torch.get_num_threads(),
    }
    began, found = time.perf_counter(), list[Profile]()
    while not found or (len(found) < _MAX_PASSES and time.perf_counter() - began < _PASSES_S):
        words = f"profile, pass {len(found) + 1}"
        tell(words, 0)
        found.append(measure_profile(llm.target, drafters, _PASSES_S, options.seed, about, command))
    return median_profile(found)
