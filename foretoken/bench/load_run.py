"""What every load measurement begins and ends with: the model opened for it, and its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from foretoken.bench.batch_prompts import Ask, asks
from foretoken.bench.batch_settings import NO_POLICIES, Policies, Stage
from foretoken.bench.caveats import source_caveats
from foretoken.bench.load_options import LoadOptions
from foretoken.engine.llm import LLM
from foretoken.errors import InputError
from foretoken.machine.identity import machine, versions
from foretoken.measure.kept import KeptFile, digest, run_of
from foretoken.measure.plots import Plot
from foretoken.measure.report import Report, Table
from foretoken.measure.write import write_report
from foretoken.model.names import model_folder
from foretoken.printing.console import Console
from foretoken.text.tokenizer import load_tokenizer

RESUMED = "The run was stopped and resumed; policies of adaptive settings started without measurements again."


def kept_turns(
    options: LoadOptions, found: Mapping[str, Sequence[Ask]], without_effect: Iterable[str] = ()
) -> KeptFile | None:
    """The file of `options.resume`, None without one. Besides the options, prompts, machine and versions must agree;
    `without_effect` names options that this kind of run does not read.

    Raises:
        InputError, StorageError: see `KeptFile`.
    """
    if options.resume is None:
        return None
    prompts = digest({name: [list(ask.prompt_ids) for ask in own] for name, own in found.items()})
    run = run_of(options, without_effect, machine=machine(), versions=versions())
    return KeptFile(options.resume, "bench load", run | {"prompts by content": prompts})


_SPARE_TOKENS = 64  # of cache per request, for draft tokens and rounding up to whole blocks


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
) -> Report:
    """The report of a run, written to `options.out` if that is set; `load` is the machine's load average before it,
    `strict_differing` counts greedy answers that differ from plain's under strict numerics.
    """
    draft = None if options.draft is None else model_folder(options.draft)
    caveats = source_caveats(model_folder(options.target), draft, load)
    if interrupted:
        caveats.append("The run was interrupted: these are the measurements until then.")
    report = Report(
        title=f"Load ({kind})",
        command=command,
        options=asdict(options),
        results={
            "kind": kind,
            "rows": tuple(rows),
            "summary": summary,
            "strict_differing": strict_differing,
            "interrupted": interrupted,
        },
        tables=tuple(tables),
        plots=tuple(plots),
        explained=explained,
        caveats=(*caveats, *notes),
    )
    return write_report(report, options.out, options.name) if options.out is not None else report
