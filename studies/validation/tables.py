"""What `foretoken simulate --measure` found: the whole run from opening the models to the record, a table, and JSON."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from studies.validation.calibrate import slice_of
from foretoken.bench.drafting import DrafterChoice, parse_drafters
from foretoken.bench.profile import measure_profile
from foretoken.bench.report import machine, print_notes, source_caveats, versions
from studies.validation.validate import (
    FIGURES,
    JUDGED,
    TOLERANCE,
    Causes,
    Comparison,
    Tell,
    Trial,
    compare,
    median_profile,
)
from foretoken.config import SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.llm import LLM
from foretoken.errors import ConfigError, StorageError
from foretoken.files import to_json
from foretoken.model.open import model_folder
from foretoken.plan.profile import Profile
from foretoken.printing.console import Console
from foretoken.simulate.arrivals import Job
from foretoken.simulate.setting import Limits, SimSetting

_MOST_PASSES, _PASSES_S = 3, 60.0  # a profile is measured again until so much time is spent
_WORDS = {
    "tokens_per_s": "tok/s",
    "latency_s_p50": "whole answer",
    "latency_s_p95": "p95",
    "ttft_s_p50": "first token",
    "ttft_s_p95": "p95",
}


@dataclass(frozen=True)
class MeasureOptions:
    """What to validate: models, settings, traces by name (requests, or None for a built-in one of that name) and
    limits.

    `threads=None` leaves torch's own number; `seconds` is how long a built-in trace lasts, chosen by the machine if
    None.
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


@dataclass(frozen=True)
class Validation:
    """Every comparison, with everything needed to judge it."""

    command: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    profile: Profile
    rows: tuple[Comparison, ...]
    caveats: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [
            {
                "trace": row.trace,
                "setting": row.predicted.setting,
                "holds": row.holds,
                "errors": {name: row.error(name) for name in FIGURES},
                **{name: asdict(getattr(row, name)) for name in ("predicted", "measured", "causes")},
                "jobs": [asdict(one) for one in row.jobs],
                "requests": [asdict(one) for one in row.requests],
            }
            for row in self.rows
        ]
        about = {name: getattr(self, name) for name in ("command", "date", "machine", "versions", "options", "caveats")}
        return {**about, "tolerance": TOLERANCE, "judged": JUDGED, "profile": self.profile.as_dict(), "rows": rows}


def run_validation(options: MeasureOptions, command: str, tell: Tell = lambda _words, _finished: None) -> Validation:
    """Open the models, measure a profile, and compare each setting on each trace.

    Raises:
        ConfigError: a drafter that lacks something, or needs a prediction for each prompt.
        ForetokenError: a model that cannot be used, a trace that cannot run, or a failing engine.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    choices = _choices(options)
    for job in (job for jobs in options.traces.values() if jobs is not None for job in jobs):
        slice_of(job)  # minutes of measuring must not end in an error
    folder, draft = model_folder(options.target), None if options.draft is None else model_folder(options.draft)
    caveats = source_caveats(folder, draft, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
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
            Trial(options.settings, options.traces, limits, options.seed, options.seconds),
            tell,
        )
    shown = {
        **asdict(options),
        "settings": [setting.name for setting in options.settings],
        "traces": list(options.traces),
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Validation(
        command,
        date,
        machine(),
        versions(),
        shown,
        profile,
        tuple(rows),
        tuple(dict.fromkeys((*caveats, *profile.caveats))),
    )


def _choices(options: MeasureOptions) -> dict[str, DrafterChoice]:
    names = tuple(dict.fromkeys(setting.drafter for setting in options.settings if setting.drafter is not None))
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


def _profile(llm: LLM, specs: Mapping[str, SpecConfig], options: MeasureOptions, command: str, tell: Tell) -> Profile:
    """Several passes of the measurement behind `foretoken bench --profile`, on the open target."""
    factory = DrafterFactory(llm.folder, llm.target, llm.tokenizer, ModelOptions(options.dtype, options.device))
    drafters = {name: (spec, factory.make(spec)) for name, spec in specs.items()}
    about = {
        "name": options.target,
        "dtype": options.dtype,
        "device": str(llm.target.device),
        "threads": torch.get_num_threads(),
    }
    began, found = time.perf_counter(), list[Profile]()
    while not found or (len(found) < _MOST_PASSES and time.perf_counter() - began < _PASSES_S):
        words = f"profile, pass {len(found) + 1}"
        tell(words, 0)
        found.append(measure_profile(llm.target, drafters, _PASSES_S, options.seed, about, command))
    return median_profile(found)


def write_validation(found: Validation, folder: Path, name: str) -> Path:
    """Write `folder/YYYY-MM-DD-name.json`; an earlier file of the day is kept, and this one numbered.

    Raises:
        StorageError: the folder cannot be written.
    """
    stem, taken = f"{found.date[:10]}-{name}", 1
    while (folder / f"{stem}.json").exists():
        taken += 1
        stem = f"{found.date[:10]}-{name}-{taken}"
    path = folder / f"{stem}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(found.as_dict()) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the result to {folder}: {error}") from error
    return path


def print_validation(found: Validation, file: Path | None, console: Console | None = None) -> None:
    """Predicted, measured and error of each figure; then where errors come from."""
    console = console or Console()
    names = [(row.trace, row.predicted.setting) for row in found.rows]
    figures = [
        (*name, *(_cell(row, figure) for figure in FIGURES)) for name, row in zip(names, found.rows, strict=True)
    ]
    styles = [None if row.holds else "red" for row in found.rows]
    headings = ("trace", "setting", *(_WORDS[figure] for figure in FIGURES))
    console.table(headings, figures, title="predicted | measured  error", justify="llr", styles=styles)
    console.line()
    causes = [(*name, *_errors(row.causes)) for name, row in zip(names, found.rows, strict=True)]
    headings = ("trace", "setting", "steps", "drafter", "tok/round", "rows", "requests", "pace", "between steps")
    console.table(headings, causes, title="where it comes from", justify="llr")
    console.line()
    held = sum(row.holds for row in found.rows)
    console.line(f"within {TOLERANCE:.0%} in throughput and p95 latency: {held} of {len(found.rows)}")
    print_notes(console, found.caveats, () if file is None else (file,))


def _errors(causes: Causes) -> tuple[str, ...]:
    errors = (causes.step, causes.draft, causes.emitted, causes.rows, causes.batch, causes.pace)
    return (*("" if error is None else f"{error:+.0%}" for error in errors), f"{causes.outside_share:.1%}")


def _cell(row: Comparison, name: str) -> str:
    unit, scale = ("", 1.0) if name == "tokens_per_s" else ("ms", 1e3)
    predicted, measured = (scale * getattr(side, name) for side in (row.predicted, row.measured))
    return f"{predicted:.4g} | {measured:.4g} {unit} {row.error(name):+.0%}".replace("  ", " ")
