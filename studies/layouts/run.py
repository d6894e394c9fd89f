"""The comparison of layouts from opening the models to the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from foretoken.engine.drafters import DrafterFactory, ModelOptions
from foretoken.errors import ConfigError, InputError
from foretoken.measure.report import Report, load_average, source_caveats
from foretoken.measure.workload import slices
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from foretoken.text.tokenizer import load_tokenizer
from studies.layouts.layouts import LayoutOptions, Layouts, Tell, measure_layouts, ratios
from studies.layouts.padded import native
from studies.layouts.tables import EXPLAINED, layout_tables

_SLICE = "code"
_LENGTH_STEPS = 7  # prompts are cut to these many different shares of their length, 1/4 to all
_SHORTEST = 0.25
_STRIDE = 3  # neighbours differ in length; without a divisor in common with the number of steps


def run_layouts(options: LayoutOptions, command: str, tell: Tell = lambda _words, _share: None) -> Report:
    """Open the models and measure every way at every batch size.

    Raises:
        ForetokenError: a model that cannot be used in this comparison, or a failing engine.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = model_folder(options.target)
    target, tokenizer = open_model(folder, options.dtype, options.device), load_tokenizer(folder)
    if tokenizer is None:
        raise ConfigError("target", options.target, "has no tokenizer to read the prompts with")
    model = native(target, "target")
    factory = DrafterFactory(folder, target, tokenizer, ModelOptions(options.dtype, options.device))
    caveats = source_caveats(folder, None if options.draft is None else model_folder(options.draft), load_average())
    num_prompts = options.pool * max(options.batch_sizes)
    texts = [tokenizer.encode(prompt.text) for prompt in slices((_SLICE,), num_prompts)]
    if len(texts) < num_prompts:
        raise InputError(
            "batch_sizes", options.batch_sizes, f"{num_prompts} prompts are needed, the library here has {len(texts)}"
        )
    prompts = uneven(texts, target.max_context_tokens - options.max_tokens)
    rows = measure_layouts(Layouts(options, target, partial(factory.make, options.spec)), prompts, tell)
    about = asdict(options) | {
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "dtype": str(model.dtype),
    }
    about["prompt_tokens"] = {
        size: [len(prompt) for prompt in prompts[: size * options.pool]] for size in options.batch_sizes
    }
    found = ratios(rows)
    return Report(
        title="Layouts",
        command=command,
        options=about,
        results={"rows": rows, "ratios": found},
        tables=layout_tables(rows, found, about["prompt_tokens"]),
        explained=EXPLAINED,
        caveats=tuple(caveats),
    )


def uneven(texts: Sequence[Sequence[int]], room: int) -> list[list[int]]:
    """The last tokens of every text: a quarter to all of it in turn, at most `room`; neighbours differ in length.

    Raises:
        InputError: no room for a prompt.
    """
    if room < 1:
        raise InputError(
            "max_tokens", f"{room} tokens are left for a prompt", "ask for shorter answers than the target's context"
        )
    steps = [(place * _STRIDE) % _LENGTH_STEPS for place in range(len(texts))]
    shares = [_SHORTEST + (1 - _SHORTEST) * step / (_LENGTH_STEPS - 1) for step in steps]
    return [
        list(text[-min(room, max(1, round(share * len(text)))) :]) for text, share in zip(texts, shares, strict=True)
    ]
