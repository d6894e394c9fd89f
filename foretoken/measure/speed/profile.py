"""`foretoken bench profile`: seconds of a target step by rows, context, batch and prompt, and of each drafter.

`engine.startup.profiling` does the measuring; this file says what is measured, and writes and prints the result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.backend.drafting import DrafterChoice
from foretoken.config import SpecConfig
from foretoken.draft.base import Drafter
from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.engine.startup.profiling import BATCH_NUM_DRAFT, SHORT_TOKENS, StepBench, Tell, Work, save_profile
from foretoken.engine.startup.profiling import load_profile as load_profile
from foretoken.engine.startup.start_profile import describe_drafter, describe_target, measure_roofline
from foretoken.errors import ConfigError
from foretoken.machine.identity import machine, versions
from foretoken.measure.report import Table, load_average, now, print_notes, print_tables, source_caveats
from foretoken.measure.speed.options import ProfileOptions
from foretoken.measure.write import free_path
from foretoken.model.interface import LanguageModel
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from foretoken.plan.profile import DrafterCost, Profile
from foretoken.printing.console import Console
from foretoken.text.tokenizer import load_tokenizer

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_BATCHES = (1, 2, 4, 8, 16)
_NUM_DRAFT = (1, 2, 4, 8)
_DRAFT_BATCHES = (1, 4, 8, 16)
_PROMPTS = (32, 256)
_CONTEXTS = (32, 128, 512, 2048, 8192)


def run_profile(
    options: ProfileOptions, command: str = "foretoken bench profile", tell: Tell = lambda _words, _share: None
) -> Profile:
    """Open the target, measure it, return the profile.

    Raises:
        ForetokenError: a model or drafter cannot be used.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = model_folder(options.target)
    target, tokenizer = open_model(folder, options.dtype, options.device), load_tokenizer(folder)
    factory = DrafterFactory(folder, target, tokenizer, ModelOptions(options.dtype, options.device))
    specs = {
        choice.label: _spec(choice, options)
        for choice in options.drafters
        if choice.required or options.draft or "draft" not in choice.needs
    }
    drafters = {name: (spec, factory.make(spec)) for name, spec in specs.items()}
    caveats = source_caveats(folder, None if options.draft is None else model_folder(options.draft), load_average())
    about = {"name": options.target, "dtype": options.dtype}
    return measure_profile(target, drafters, options.budget_s, options.seed, about, command, caveats, tell)


def measure_profile(
    target: LanguageModel,
    drafters: Mapping[str, tuple[SpecConfig, Drafter]],
    budget_s: float,
    seed: int,
    about: Mapping[str, Any],
    command: str,
    caveats: Sequence[str] = (),
    tell: Tell = lambda _words, _share: None,
) -> Profile:
    """The profile of an open target; the most important curves first, the others while `budget_s` lasts."""
    bench = StepBench(target, seed, time.perf_counter() + budget_s, budget_s, tell)
    bench.step_times("warm-up", Work(1, SHORT_TOKENS, 3))
    rows = bench.curve("rows", _ROWS, lambda rows: Work(1, SHORT_TOKENS, rows - 1))
    drafting = {
        name: bench.drafter_curve(name, made, _NUM_DRAFT, lambda count: Work(1, SHORT_TOKENS, count))
        for name, made in drafters.items()
    }
    batch = bench.curve("batch", _BATCHES, lambda count: Work(count, SHORT_TOKENS, 0))
    together = {
        name: bench.drafter_curve(
            f"{name} batch", made, _DRAFT_BATCHES, lambda count: Work(count, SHORT_TOKENS, BATCH_NUM_DRAFT)
        )
        for name, made in drafters.items()
    }
    chunk, context = bench.long_texts(_CONTEXTS)
    prompts = {name: bench.prompt_curve(name, made, _PROMPTS) for name, made in drafters.items()}
    return Profile(
        target={
            **about,
            **describe_target(target),
            "max_context_tokens": target.max_context_tokens,
            "block_tokens": target.footprint_tokens(1),
        },
        machine=machine(),
        versions=versions(),
        command=command,
        date=now(),
        rows=rows,
        batch=batch,
        context=context,
        chunk=chunk,
        drafters={
            name: DrafterCost(drafting[name], together[name], BATCH_NUM_DRAFT, prompts[name], describe_drafter(*made))
            for name, made in drafters.items()
        },
        caveats=(*caveats, *bench.left_out()),
        roofline=measure_roofline(target),
    )


def write_profile(profile: Profile, folder: Path, name: str) -> Path:
    """Write `folder/YYYY-MM-DD-name.json`, numbered if there is one.

    Raises:
        StorageError: it cannot be written.
    """
    path = free_path(folder, profile.date, name)
    save_profile(profile, path)
    return path


def print_profile(profile: Profile, file: Path | None) -> None:
    """Print every curve on a line: counts with milliseconds."""
    console = Console()
    curves = {
        "rows": profile.rows,
        "requests": profile.batch,
        "prompt tokens": profile.chunk,
        "past tokens": profile.context,
    }
    for name, cost in profile.drafters.items():
        curves |= {
            f"{name}: draft tokens": cost.guesses,
            f"{name}: requests": cost.batch,
            f"{name}: first, text of": cost.prompt,
        }
    points = {
        name: "  ".join(f"{count}: {1e3 * seconds:.3g}" for count, seconds in curve.points)
        for name, curve in curves.items()
    }
    lines = tuple(row for row in points.items() if row[1])
    print_tables([Table("", ("step by", "milliseconds"), lines, justify="l")], console)
    print_notes(profile.caveats, () if file is None else (file,), console)


def _spec(choice: DrafterChoice, options: ProfileOptions) -> SpecConfig:
    if "draft" in choice.needs and options.draft is None:
        remedy = f"drafter {choice.label} needs a draft; give its folder, or leave {choice.name} out of the drafters"
        raise ConfigError("draft", None, remedy)
    return choice.spec(**({"draft": options.draft} if "draft" in choice.needs else {}))
