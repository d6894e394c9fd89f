"""`foretoken bench speed`: plain against speculative decoding, one request at a time, through the public interface."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from foretoken.bench import peers
from foretoken.bench.measure import Contender, SpeedPlan, SpeedSample, measure, summarise
from foretoken.bench.own import Generator, own_contenders
from foretoken.bench.plot import write_plot
from foretoken.bench.prompts import ALL, choose, fit, read_prompts
from foretoken.bench.report import Report, load_average, machine, source_caveats, versions, write_report
from foretoken.bench.speed_options import SpeedOptions
from foretoken.bench.speed_tables import speed_report
from foretoken.bench.workload import SLICES, Prompt, slices
from foretoken.files import check_file, check_folder
from foretoken.model.open import model_folder
from foretoken.printing.console import Console

# Caveats of a drafter's numbers, alone or as a part of another.
_CAVEATS = {
    "lookahead": (
        "lookahead has the target run probes beside its draft tokens: their cost is in its times, and they are not "
        "counted as draft tokens."
    ),
}

_COLD = "Drafters are emptied before every answer: nothing is drafted from earlier ones."
_WARM = (
    "Drafters keep what they remember from prompt to prompt (`warm`); they are emptied before a prompt comes again, so "
    "that no answer is drafted from an earlier one to the same prompt."
)
_POLICIES = "Each adaptive setting has a policy of its own, which keeps what it measured from answer to answer."


def run_speed(options: SpeedOptions, generator: Generator | None = None, command: str = "foretoken bench") -> Report:
    """Measure, and write the plot and the dated result where options ask for them; the caller prints the report.

    `generator` replaces the engine that is otherwise opened on `options.target`. A progress bar goes to standard error.

    Raises:
        ForetokenError: a model that cannot be used, a file that cannot be written, or a failing engine.
    """
    for folder in (options.out, options.plot.parent if options.plot else None):
        if folder is not None:
            check_folder(folder)
    if options.plot is not None:
        check_file("plot", options.plot)
    prompts, notes = _prompts(options)
    torch.set_num_threads(options.num_threads)
    target, draft = _folders(options, given=generator is not None)
    caveats = source_caveats(target, draft, load_average())
    caveats.extend(notes)
    caveats.extend(text for name, text in _CAVEATS.items() if any(name in choice.leaves for choice in options.choices))
    caveats.append(_WARM if options.warm else _COLD)
    if "auto" in options.num_drafts or any(choice.own("num_draft") == "auto" for choice in options.choices):
        caveats.append(_POLICIES)
    with ExitStack() as stack:
        generator = generator or _open(options, stack)
        prompts, notes = fit(
            prompts, lambda text: len(generator.encode(text)), generator.target.max_context_tokens - options.max_tokens
        )
        caveats.extend(notes)
        plan = SpeedPlan(
            prompts,
            options.max_tokens,
            options.temperatures,
            options.repeats,
            options.warmup,
            options.seed,
            options.ignore_eos,
        )
        contenders, notes = own_contenders(options, generator, prompts)
        caveats.extend(notes)
        if options.peers:
            others, notes = peers.contenders(
                target=target,
                draft=draft,
                dtype=options.dtype,
                device=options.device,
                threads=options.num_threads,
                num_drafts=options.peer_num_drafts,
                kinds=options.peer_drafters,
            )
            contenders.extend(others)
            caveats.extend(notes)
            if others and 0.0 not in options.temperatures:
                caveats.append("Other engines are measured greedily only, and temperature 0 was not asked for.")
        samples, notes = _with_progress(contenders, plan)
    caveats.extend(notes)
    rows = summarise(samples, prompts)
    found = versions() | (peers.versions() if options.peers else {})
    report = speed_report(rows, asdict(options), command, caveats, versions=found)
    if options.plot is not None:
        write_plot(rows, machine()["cpu"], options.plot)
    return write_report(report, options.out, options.name) if options.out is not None else report


def _prompts(options: SpeedOptions) -> tuple[tuple[Prompt, ...], list[str]]:
    if options.prompts is not None:
        return choose(read_prompts(options.prompts), options.slices, options.prompts_per_slice)
    return slices(SLICES if ALL in options.slices else options.slices, options.prompts_per_slice), []


def _folders(options: SpeedOptions, given: bool) -> tuple[Path, Path | None]:
    if given:
        return Path(options.target), None if options.draft is None else Path(options.draft)
    return model_folder(options.target), None if options.draft is None else model_folder(options.draft)


def _open(options: SpeedOptions, stack: ExitStack) -> Generator:
    from foretoken import LLM

    llm = LLM(options.target, dtype=options.dtype, device=options.device)
    stack.callback(llm.close)
    return llm


def _with_progress(contenders: Sequence[Contender], plan: SpeedPlan) -> tuple[list[SpeedSample], list[str]]:
    with Console(stderr=True).bar("measuring", plan.num_runs(c.setting for c in contenders), counts=True) as bar:
        return measure(contenders, plan, lambda name: bar.update(name, advance=1))
