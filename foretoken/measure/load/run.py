"""`foretoken bench load --batches`: settings by batch size and slice, against plain and the best fixed setting.

A cell is a batch size and a slice. In a cell the settings take turns in an order that rotates, and each answers the
same requests as one batch, greedily (the slice `random` at temperature 1.5 with seeds). A setting's policy starts
without measurements and keeps its state from cell to cell, as in a server that runs for long.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from foretoken.engine.llm import LLM
from foretoken.errors import InputError
from foretoken.machine.identity import machine, versions
from foretoken.machine.neighbours import contention_notes
from foretoken.measure.kept import KeptFile, kept_run
from foretoken.measure.load.options import LoadOptions
from foretoken.measure.load.prompts import Ask, asks
from foretoken.measure.load.rows import (
    BatchSample,
    batch_plots,
    batch_prices,
    grid_summary,
    grid_tables,
    summarise_grid,
    summary_table,
)
from foretoken.measure.load.settings import (
    NO_POLICIES,
    Answered,
    BatchSetting,
    Policies,
    Stage,
    Turn,
    parse_batch_settings,
    together,
)
from foretoken.measure.options import PLAIN, STRICT
from foretoken.measure.plots import Plot
from foretoken.measure.price import PriceRow, price_tables
from foretoken.measure.progress import Tell, progress
from foretoken.measure.report import Report, Table, interruption_notes, load_average, source_caveats
from foretoken.measure.write import write_report
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from foretoken.text.tokenizer import load_tokenizer

RESUMED = "The run was stopped and resumed; policies of adaptive settings started without measurements again."
_SPARE_TOKENS = 64  # of cache per request, for draft tokens and rounding up to whole blocks
EXPLAINED = (
    "A cell: tokens per second of the whole batch, prefill included (median over repeats); the ratio to plain; the "
    "ratio to the best setting with a fixed number of draft tokens (plain is one of them) at that batch size and "
    "slice. Ratios are medians over repeats of neighbouring turns. `decoding` counts from the moment when every "
    "request has its first token. `requests` is the mean over requests of the tokens per second after a request's "
    "first token: requests with high acceptance end early, and the batch then runs with fewer requests, which a "
    "server with a queue would refill. The best fixed setting is chosen afterwards from the same noisy turns, which "
    "biases it upwards a little. `differing` counts answers that differ from plain's; in 16-bit arithmetic an answer "
    "may differ where two logits are within rounding error, and `unexplained` counts greedy answers without such a "
    "near tie. `!` behind a cell: other processes took a tenth of the cores or more during a turn of it."
)


def kept_turns(
    options: LoadOptions,
    found: Mapping[str, Sequence[Ask]],
    settings: Iterable[BatchSetting],
    without_effect: Iterable[str] = (),
) -> KeptFile:
    """The file of `options.resume`. Besides the options, prompts, machine, versions and the models of `settings` must
    agree; `without_effect` names options that this kind of run does not read. Raises as `KeptFile` does.
    """
    asked = {"prompts": {name: [list(ask.prompt_ids) for ask in own] for name, own in found.items()}}
    choices = [one.choice for one in settings if one.choice is not None]
    models = [options.target, options.draft, *(model for choice in choices for model in choice.models)]
    files = [file for choice in choices for file in choice.files]
    about = {"models": models, "files": files, "machine": machine(), "versions": versions()}
    return kept_run(options.resume, "bench load", asked, options, without=without_effect, **about)


def announce(words: str) -> None:
    """One line on standard error, before something that takes minutes."""
    Console(stderr=True).line(words)


@contextmanager
def opened(
    options: LoadOptions,
    slices: Sequence[str],
    *,
    max_batch: int,
    count: int,
    answer_tokens: int,
    policies: Policies = NO_POLICIES,
) -> Iterator[tuple[Stage, dict[str, tuple[Ask, ...]]]]:
    """The model, opened with room for `max_batch` answers of `answer_tokens`, and `count` requests of every slice.

    Raises:
        InputError: a target without a tokenizer, or an unknown slice.
        ForetokenError: a model that cannot be used.
    """
    folder = model_folder(options.target)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise InputError("target", options.target, "has no tokenizer, and the prompts are texts; choose another target")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = asks(
        slices,
        count,
        tokenizer.encode,
        options.prompt_tokens,
        options.seed,
        options.prompts,
        lambda messages: tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False),
    )
    longest = max(len(ask.prompt_ids) for own in found.values() for ask in own)
    with LLM(
        options.target,
        dtype=options.dtype,
        device=options.device,
        numerics=options.numerics,
        weights=options.weights,
        cache_tokens=options.cache_tokens or 2 * max_batch * (longest + answer_tokens + _SPARE_TOKENS),
        cache_reserve=options.cache_reserve,
        max_batch_size=options.max_batch_size or max_batch,
        max_prompt_tokens=options.max_prompt_tokens,
        max_step_tokens=options.max_step_tokens,
        routing=options.routing,
    ) as llm:
        yield Stage(llm, options.draft, policies, options.seed), found


def make_report(
    options: LoadOptions,
    kind: str,
    command: str,
    *,
    rows: Sequence[Any],
    summary: Mapping[str, Any],
    tables: Sequence[Table],
    explained: str,
    notes: Sequence[str],
    interrupted: bool,
    load: float,
    plots: Sequence[Plot] = (),
    strict_differing: int = 0,
    prices: Sequence[PriceRow] = (),
) -> Report:
    """The report of a run, written to `options.out` if that is set; `load` is the machine's load average before it,
    `strict_differing` counts greedy answers that differ from plain's under strict numerics.
    """
    draft = None if options.draft is None else model_folder(options.draft)
    caveats = source_caveats(model_folder(options.target), draft, load)
    caveats += interruption_notes(interrupted, options.resume)
    report = Report(
        title=f"Load ({kind})",
        command=command,
        options=asdict(options),
        results={
            "kind": kind,
            "rows": tuple(rows),
            "summary": summary,
            "prices": tuple(prices),
            "strict_differing": strict_differing,
            "interrupted": interrupted,
        },
        tables=tuple(tables),
        plots=tuple(plots),
        explained=explained,
        caveats=(*caveats, *notes),
    )
    return write_report(report, options.out, options.name)


def run_batches(
    options: LoadOptions,
    command: str = "foretoken bench load",
    policies: Policies = NO_POLICIES,
    remarks: Sequence[str] = (),
) -> Report:
    """Measure the grid. After Ctrl-C the report holds what was measured until then, and says so.

    `policies` are made for settings of their names; `remarks` are added to the caveats.

    Raises:
        ForetokenError: a setting or model that cannot be used, a failing engine, or a folder that cannot be written.
    """
    load = load_average()
    settings, notes = parse_batch_settings(options.settings, options.draft, policies)
    count = max(*options.batches, options.prompts_per_slice)
    samples: list[BatchSample] = []
    opening = opened(
        options,
        options.slices,
        max_batch=max(options.batches),
        count=count,
        answer_tokens=options.max_tokens,
        policies=policies,
    )
    with opening as (stage, found):
        is_resumed, interrupted = _measured(stage, options, settings, found, samples)
    notes += [RESUMED] if is_resumed else []
    rows = summarise_grid(samples)
    prices = batch_prices(rows, options.price_per_hour)
    notes.append(
        "The policy of each setting started without measurements and kept its state from cell to cell, in the order "
        "of the tables."
    )
    return make_report(
        options,
        "batches",
        command,
        rows=rows,
        summary=grid_summary(rows),
        strict_differing=sum(row.differing_greedy for row in rows) if options.numerics == STRICT else 0,
        prices=prices,
        tables=(
            *grid_tables(rows),
            summary_table(rows),
            *price_tables(prices, "batch and slice", "Tokens of whole batches, their prompts included."),
        ),
        plots=batch_plots(rows),
        explained=EXPLAINED,
        notes=(*notes, *contention_notes([(row.num_contended, row.num_turns) for row in rows], "turns"), *remarks),
        interrupted=interrupted,
        load=load,
    )


def _measured(
    stage: Stage,
    options: LoadOptions,
    settings: Sequence[BatchSetting],
    found: Mapping[str, Sequence[Ask]],
    samples: list[BatchSample],
) -> tuple[bool, bool]:
    """Fill `samples`; whether some were known from an earlier run, and whether Ctrl-C ended this one."""
    with closing(kept_turns(options, found, settings)) as kept:
        samples += kept.restored(lambda line: restored(line, settings))
        num_known = len(samples)
        num_turns = len(settings) * len(options.batches) * (len(options.slices) * options.repeats + options.warmup)
        known = f", {num_known} of them known" if num_known else ""
        try:
            announce(f"{num_turns} turns{known}, {_estimate(stage, options, settings, found)}")
            with progress(num_turns - num_known) as tell:
                measure_grid(stage, options, settings, found, samples, tell, kept)
        except KeyboardInterrupt:
            return num_known > 0, True
    return num_known > 0, False


def measure_grid(
    stage: Stage,
    options: LoadOptions,
    settings: Sequence[BatchSetting],
    found: Mapping[str, Sequence[Ask]],
    samples: list[BatchSample],
    tell: Tell = lambda _words: None,
    kept: KeptFile | None = None,
) -> None:
    """Append a sample for every setting, cell and repeat that `samples` lacks, the smallest batch first; whole samples
    where interrupted. Each is written to `kept` as well.
    """
    turns = 0
    known = {(one.setting.name, one.batch, one.slice, one.repeat) for one in samples}
    for batch in sorted(set(options.batches)):
        cells = itertools.product(settings, options.slices, range(options.repeats))
        if all((setting.name, batch, name, repeat) in known for setting, name, repeat in cells):
            turns += len(options.slices) * options.repeats
            continue
        for setting in [setting for _ in range(options.warmup) for setting in settings]:
            tell(f"warm-up {batch}: {setting.name}")
            answer_all(stage, setting, found[options.slices[0]][:batch], batch, options.max_tokens)
        for name in options.slices:
            own = found[name][: max(batch, options.prompts_per_slice)]
            for repeat in range(options.repeats):
                first = turns % len(settings)
                turns += 1
                for setting in (*settings[first:], *settings[:first]):
                    if (setting.name, batch, name, repeat) in known:
                        continue
                    tell(f"{batch} {name}: {setting.name}")
                    turn = answer_all(stage, setting, own, batch, options.max_tokens)
                    samples.append(BatchSample(setting, batch, name, repeat, turn))
                    if kept is not None:
                        kept.append(asdict(samples[-1]) | {"setting": setting.name})


def restored(line: Mapping[str, Any], settings: Sequence[BatchSetting]) -> BatchSample:
    """A sample that was written.

    Raises:
        ValueError, KeyError, TypeError: the line is none of this run's.
    """
    (setting,) = (setting for setting in settings if setting.name == line["setting"])
    turn = dict(line["turn"])
    answers = tuple(Answered(tuple(one["token_ids"]), one["greedy"], one["num_near_ties"]) for one in turn["answers"])
    turn |= {"answers": answers, "request_speeds": tuple(turn["request_speeds"])}
    return BatchSample(setting, line["batch"], line["slice"], line["repeat"], Turn(**turn))


def answer_all(stage: Stage, setting: BatchSetting, own: Sequence[Ask], batch: int, max_tokens: int) -> Turn:
    """Answer requests, a batch at a time."""
    places = range(0, len(own), batch)
    return together(
        [stage.answer(setting, own[place : place + batch], max_tokens, first_place=place) for place in places]
    )


def _estimate(
    stage: Stage, options: LoadOptions, settings: Sequence[BatchSetting], found: Mapping[str, Sequence[Ask]]
) -> str:
    """How long all turns take at the speed of plain, from a run of plain at the smallest and the largest batch."""
    batches = sorted(set(options.batches))
    asks = found[options.slices[0]]
    took_s: dict[int, float] = {}
    stage.answer(BatchSetting(PLAIN), asks[:1], options.max_tokens)  # warm-up
    for batch in dict.fromkeys((batches[0], batches[-1])):
        began = time.perf_counter()
        stage.answer(BatchSetting(PLAIN), asks[:batch], options.max_tokens)
        took_s[batch] = time.perf_counter() - began
    stage.forget()
    low, high = batches[0], batches[-1]
    slope_s = (took_s[high] - took_s[low]) / (high - low) if high > low else 0.0
    groups = {batch: math.ceil(max(batch, options.prompts_per_slice) / batch) for batch in batches}
    rounds = {batch: groups[batch] * len(options.slices) * options.repeats + options.warmup for batch in batches}
    total_s = len(settings) * sum(rounds[batch] * (took_s[low] + slope_s * (batch - low)) for batch in batches)
    return f"about {max(1, round(total_s / 60))} min if every setting takes as long as plain"
