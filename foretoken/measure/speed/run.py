"""`foretoken bench speed`: plain against speculative decoding, one request at a time, through the public interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foretoken.backend.answering import AnsweringBackend
from foretoken.backend.registry import LOCAL
from foretoken.config import SpecConfig
from foretoken.engine.llm import LLM
from foretoken.errors import InputError
from foretoken.machine.identity import machine, versions
from foretoken.machine.neighbours import OtherLoad, contention_notes, is_contended
from foretoken.measure.kept import digest, run_of
from foretoken.measure.progress import progress
from foretoken.measure.prompts import fit, prompts_or_library, with_template
from foretoken.measure.report import Report, load_average, now, source_caveats
from foretoken.measure.speed.contenders import Contender, open_others, other_contenders, own_contenders
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.speed.plan import ALL_SLICES, SpeedPlan, SpeedSample
from foretoken.measure.speed.report import speed_report
from foretoken.measure.speed.rows import summarise
from foretoken.measure.speed.turns import Samples, measure
from foretoken.measure.workload import Prompt
from foretoken.measure.write import check_out, free_path, is_page, write_report
from foretoken.model.names import model_folder
from foretoken.printing.console import Console

SAMPLES_SUFFIX = ".samples.jsonl"

# Caveats of a drafter's numbers, alone or as a part of another.
_CAVEATS = {
    "lookahead": (
        "lookahead has the target run probes beside its draft tokens: their cost is in its times, and they are not "
        "counted as draft tokens."
    )
}

_COLD = "Drafters are emptied before every answer: nothing is drafted from earlier ones."
_WARM = (
    "Drafters keep what they remember from prompt to prompt (`warm`); they are emptied before a prompt comes again, so "
    "that no answer is drafted from an earlier one to the same prompt."
)
_POLICIES = "Each adaptive setting has a policy of its own, which keeps what it measured from answer to answer."


@dataclass(frozen=True)
class SpeedRun:
    """What a run measured, before it is summarised. `samples_file` is where the answers are kept."""

    samples: tuple[SpeedSample, ...]
    prompts: tuple[Prompt, ...]
    caveats: tuple[str, ...]
    interrupted: bool
    versions: Mapping[str, str]
    samples_file: Path | None


def run_speed(options: SpeedOptions, llm: LLM | None = None, command: str = "foretoken bench") -> Report:
    """Measure, and write the dated result where options ask for it; the caller prints the report.

    `llm` replaces the engines that are otherwise opened on `options.target`, one for each of `options.numerics`.
    Progress goes to standard error. After Ctrl-C the report holds what was measured until then, and says so; with
    `resume` or `out` every answer is in a file by then.

    Raises:
        ForetokenError: a model that cannot be used, a file that cannot be written or that belongs to other options, or
            a failing engine.
    """
    run = measure_speed(options, llm)
    rows = summarise(run.samples, run.prompts, options.slo_ms)
    counts = [(row.num_contended, row.num_answers) for row in rows if row.slice != ALL_SLICES]
    report = speed_report(
        rows,
        asdict(options),
        command,
        (*run.caveats, *contention_notes(counts, "answers")),
        {"interrupted": run.interrupted, "num_answers": len(run.samples)},
        price_per_hour=options.price_per_hour,
        versions=run.versions,
        files=() if run.samples_file is None else (str(run.samples_file),),
    )
    return write_report(report, options.out, options.name)


def measure_speed(options: SpeedOptions, llm: LLM | None = None) -> SpeedRun:
    """Every answer of a run; raises as `run_speed` does."""
    check_out(options.out)
    prompts, notes = prompts_or_library(options.prompts, options.slices, options.prompts_per_slice)
    torch.set_num_threads(options.num_threads)
    target, draft = _folders(options, given=llm is not None)
    caveats = [*source_caveats(target, draft, load_average()), *notes, *_drafter_notes(options)]
    with ExitStack() as stack:
        others = open_others(options, stack)
        found = versions() | {backend.name: backend.version() for backend in others}
        engines = _engines(options, llm, stack)
        prompts, notes = _fitted(options, prompts, next(iter(engines.values()), None))
        caveats.extend(notes)
        limits = options.max_tokens, options.temperatures, options.repeats, options.warmup
        plan = SpeedPlan(prompts, *limits, options.seed, ignore_eos=not options.stop_at_eos)
        contenders, notes = _contenders(options, engines, others, prompts)
        caveats.extend(notes)
        settings = {contender.setting.name: contender.setting for contender in contenders}
        path = _samples_file(options)
        samples = Samples(path, _about(options, prompts, found, given=llm is not None), settings)
        stack.callback(samples.close)
        notes, interrupted = _measured(contenders, plan, samples)
    caveats.extend(notes)
    if interrupted:
        caveats.append(_interrupted(samples, plan, contenders, path))
    return SpeedRun(tuple(samples.all), prompts, tuple(caveats), interrupted, found, path)


def _drafter_notes(options: SpeedOptions) -> list[str]:
    notes = [text for name, text in _CAVEATS.items() if any(name in choice.leaves for choice in options.choices)]
    notes.append(_WARM if options.warm else _COLD)
    if "auto" in options.num_drafts or any(choice.own("num_draft") == "auto" for choice in options.choices):
        notes.append(_POLICIES)
    return notes


def _engines(options: SpeedOptions, llm: LLM | None, stack: ExitStack) -> dict[str, LLM]:
    """Our engine under each of the numerics, where it is measured."""
    if LOCAL not in options.backends:
        return {}

    def opened(name: str) -> LLM:
        spec, dtype, device = SpecConfig(), options.dtype, options.device
        engine = LLM(options.target, spec, dtype=dtype, device=device, numerics=name, weights=options.weights)
        return stack.enter_context(engine)

    return {name: llm or opened(name) for name in options.numerics}


def _fitted(
    options: SpeedOptions, prompts: tuple[Prompt, ...], llm: LLM | None
) -> tuple[tuple[Prompt, ...], list[str]]:
    """Prompts as every engine gets them: texts that our tokenizer and chat template make; without our engine, texts as
    they are and conversations that each renders itself.
    """
    if llm is None:
        if options.chat:
            prompts = tuple(replace(one, text="", messages=one.messages or (("user", one.text),)) for one in prompts)
        return prompts, []
    prompts = with_template(prompts, llm, options.chat)
    room = llm.target.max_context_tokens - options.max_tokens
    return fit(prompts, lambda text: len(llm.encode(text)), room)


def _contenders(
    options: SpeedOptions, engines: Mapping[str, LLM], others: Sequence[AnsweringBackend], prompts: Sequence[Prompt]
) -> tuple[list[Contender], list[str]]:
    """Our settings under each of the numerics, then those of other engines; and notes on what is left out."""
    contenders, notes = other_contenders(options, others, prompts)
    own: list[Contender] = []
    for name, llm in engines.items():
        found, own_notes = own_contenders(options, llm, prompts, name)
        own.extend(found)
        notes.extend(note for note in own_notes if note not in notes)
    if not [one for one in (*own, *contenders) if one.setting.samples or 0.0 in options.temperatures]:
        raise InputError("backends", ",".join(options.backends), f"nothing can be measured. {' '.join(notes)}")
    return [*own, *contenders], notes


def _measured(contenders: Sequence[Contender], plan: SpeedPlan, samples: Samples) -> tuple[list[str], bool]:
    """Fill `samples`; notes on settings that were left out, and whether the run was interrupted."""
    console = Console(stderr=True)
    if samples.all:
        console.line(f"{len(samples.all)} answers are known from an earlier run and are not measured again")
    warned = False

    def warn(sample: SpeedSample) -> None:
        nonlocal warned
        if is_contended(sample.others) and not warned:
            warned = True
            console.message(
                f"warning: other processes take {sample.others:.0%} of the cores; answers measured meanwhile are "
                "marked. Stop what else runs here, or do not use these figures.",
                "yellow",
            )

    try:
        with progress(plan.num_runs((c.setting for c in contenders), len(samples.all)), console) as tell:
            _, notes = measure(contenders, plan, tell, samples, OtherLoad(), warn)
    except KeyboardInterrupt:
        return [], True
    return notes, False


def _samples_file(options: SpeedOptions) -> Path | None:
    """Where answers are kept: the file to resume, or a new one beside the dated result."""
    if options.resume is not None or options.out is None or is_page(options.out):
        return options.resume
    return free_path(options.out, now(), options.name, (SAMPLES_SUFFIX, ".json")).with_suffix(SAMPLES_SUFFIX)


def _about(options: SpeedOptions, prompts: Sequence[Prompt], found: Mapping[str, str], given: bool) -> dict[str, Any]:
    """Everything that must agree for answers of two runs to stand in one table."""
    models: list[str | None] = []
    files: list[str | None] = []
    if not given and LOCAL in options.backends:
        models = [options.target, options.draft, *(model for choice in options.choices for model in choice.models)]
        files = [file for choice in options.choices for file in choice.files]
    asked = digest([(one.name, one.slice, one.text, one.messages, one.prediction) for one in prompts])
    about = run_of(options, models=models, files=files, machine=machine(), versions=dict(found))
    return about | {"what the prompts ask": asked}


def _interrupted(samples: Samples, plan: SpeedPlan, contenders: Sequence[Contender], path: Path | None) -> str:
    wanted = plan.num_answers(contender.setting for contender in contenders)
    remedy = "" if path is None else f" Go on with the same options and --resume {path}."
    if not samples.all:
        return f"The run was interrupted before the first of {wanted} answers was measured.{remedy}"
    return f"The run was interrupted after {len(samples.all)} of {wanted} answers: these are the measurements.{remedy}"


def _folders(options: SpeedOptions, given: bool) -> tuple[Path, Path | None]:
    if given or LOCAL not in options.backends:
        return Path(options.target), None if options.draft is None else Path(options.draft)
    return model_folder(options.target), None if options.draft is None else model_folder(options.draft)
