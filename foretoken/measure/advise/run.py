"""`foretoken advise`: should I speculate, with which drafter, how many tokens, up to which load, at which cost."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from typing import Any

import torch

from foretoken.config import SpecConfig
from foretoken.draft.base import Drafter, ModelDrafter
from foretoken.engine.llm import LLM
from foretoken.errors import ForetokenError, SpeculationWarning, UnsupportedModelError
from foretoken.field_text import from_mapping
from foretoken.machine.identity import machine, versions
from foretoken.machine.neighbours import OtherLoad, is_contended
from foretoken.measure.advise.candidates import AdviseCandidate, candidates_of
from foretoken.measure.advise.cells import Machine, machines_of
from foretoken.measure.advise.costs import measure_costs
from foretoken.measure.advise.elsewhere import measured_elsewhere
from foretoken.measure.advise.memory import budget_of, memory_rows
from foretoken.measure.advise.options import FREE_TO_CHANGE, AdviseOptions
from foretoken.measure.advise.report import Measured, advise_report
from foretoken.measure.advise.rounds import AnswerRounds, RoundRecorder, answered, read_rounds
from foretoken.measure.advise.verdict import Finding, of_pair
from foretoken.measure.eval.options import EvalDrafter, EvalOptions
from foretoken.measure.eval.prompts import EvalPrompt, fitting, in_turns, prompts_of
from foretoken.measure.eval.run import measure
from foretoken.measure.kept import KeptFile, kept_run
from foretoken.measure.progress import progress
from foretoken.measure.report import Report, interruption_notes, load_average, source_caveats
from foretoken.measure.write import write_report
from foretoken.model.names import model_folder
from foretoken.model.open import open_device
from foretoken.printing.console import Console
from foretoken.text.tokenizer import Tokenizer, load_tokenizer

_SPARE_TOKENS = 256  # of cache per request: the chat template, rounding up to whole blocks


def advise(target: str, **options: Any) -> Report:  # noqa: ANN401 - the other fields of AdviseOptions
    """Say whether to speculate for `target`; `options` are the other fields of `AdviseOptions`.

    `results["answer"]` of the report is "yes", "only under this load", "only for these slices" or "no".

    Raises:
        InputError: an option or a prompt that cannot be used; names it.
        ForetokenError: a target that cannot be used.
    """
    return run_advise(from_mapping(AdviseOptions, {"target": target} | options), command="foretoken.advise(...)")


def run_advise(options: AdviseOptions, command: str = "foretoken advise") -> Report:
    """Measure acceptance and the costs of steps, and make the answer of them; the caller prints the report.

    Progress goes to standard error. After Ctrl-C the answer is made of the prompts that were answered by every
    candidate, if there are any.

    Raises:
        InputError, StorageError: prompts, machines or sizes that cannot be used; see `KeptFile` too.
        ForetokenError: a target that cannot be used, or a failing engine.
        KeyboardInterrupt: it came before there was an answer.
    """
    load, machines, candidates = load_average(), machines_of(options), candidates_of(options)
    prompts = prompts_of(options.prompts, options.slices, options.prompts_per_slice)
    if options.url is not None:
        found, caveats = measured_elsewhere(options, candidates, prompts, machines), _library_texts(options)
    else:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        found = measured(options, candidates, prompts, machines)
        caveats = source_caveats(model_folder(options.target), None, load)
    caveats += interruption_notes(found.interrupted, options.resume)
    caveats += [*recorded_notes(options, prompts), *found.notes]
    report = advise_report(options, found, command, caveats)
    return write_report(report, options.out, options.name)


def recorded_notes(options: AdviseOptions, prompts: Sequence[EvalPrompt]) -> list[str]:
    """Where recorded requests have other lengths or temperatures than those that the advice is made for."""
    lengths = [one.max_tokens for one in prompts if one.max_tokens is not None]
    temperatures = [one.temperature for one in prompts if one.temperature is not None]
    found = []
    if lengths and median_low(lengths) != options.max_tokens:
        found.append(
            f"The requests of the file ask for {_range(lengths)} tokens, and the advice is for answers of "
            f"{options.max_tokens}: --max-tokens {median_low(lengths)} is their median."
        )
    if temperatures and median_low(temperatures) != options.temperature:
        found.append(
            f"The requests of the file have a temperature of {_range(temperatures)}, and the advice is for "
            f"{options.temperature:g}: --temperature {median_low(temperatures):g} is their median."
        )
    return found


def cut_notes(options: AdviseOptions, lengths: Sequence[int], max_context_tokens: int) -> list[str]:
    """Where answers behind prompts of these lengths end with the target's context."""
    count = sum(length + options.max_tokens > max_context_tokens for length in lengths)
    if not count:
        return []
    return [
        f"{count} of {len(lengths)} answers end before {options.max_tokens} tokens: the target's context of "
        f"{max_context_tokens} holds no more behind their prompts. The advice is for these shorter answers; give a "
        "smaller --max-tokens, or shorter prompts."
    ]


def _range(values: Sequence[float]) -> str:
    ends = dict.fromkeys((min(values), max(values)))
    return " to ".join(f"{one:g}" for one in ends)


def measured(
    options: AdviseOptions,
    candidates: Sequence[AdviseCandidate],
    prompts: Sequence[EvalPrompt],
    machines: Sequence[Machine] = (),
) -> Measured:
    """Everything that the answer is made of, of candidates that can be loaded; those that cannot are kept with the
    reason.

    Raises:
        ForetokenError: a target that cannot be used, or a failing engine.
    """
    device = open_device(options.device)
    budget = budget_of(options, device)  # what is free before the target is loaded, which is planned with the rest
    with _opened(options, prompts) as (llm, lengths):
        prompt_tokens = round(sum(lengths) / len(lengths))
        loaded = _Loaded()
        for candidate in candidates:
            loaded.load(llm, candidate)
        usable = [one for one in candidates if one.name in loaded.made]
        console = Console(stderr=True)
        with console.spinner("timing steps") as spinner:
            others = OtherLoad()
            costs = measure_costs(
                llm.target, loaded.made, options, prompt_tokens, lambda words, _share: spinner.update(words)
            )
            share = others.share()
        models = [options.target, *(candidate.source for candidate in usable)]
        files = [name for candidate in usable for name in (candidate.spec.corpus, candidate.spec.ngram_table)]
        asked = {"prompts": [one.key for one in prompts]}
        about = {"models": models, "files": files, "versions": versions(), "machine": machine()}
        with closing(kept_run(options.resume, "advise", asked, options, without=FREE_TO_CHANGE, **about)) as kept:
            answers, interrupted = _answers(llm, options, usable, prompts, kept, console)
        cut = cut_notes(options, lengths, llm.target.max_context_tokens)
        notes = [*costs.left_out, *_library_texts(options), *cut]
        if costs.prompt_tokens < prompt_tokens:
            notes.append(f"Prompts have {prompt_tokens} tokens, and steps were timed behind {costs.prompt_tokens}.")
        if is_contended(share):
            notes.append(f"Other processes took {share:.0%} of the cores while steps were timed: measure again alone.")
        try:
            rows = memory_rows(options, usable, budget, prompt_tokens, device)
        except UnsupportedModelError as error:  # shapes do not follow from the files
            rows = []
            notes.append(f"Memory was not planned: {error}")
    found = usable, answers, costs, rows, budget, machines, loaded.findings, loaded.failed, notes
    return Measured(*found, interrupted=interrupted)


@contextmanager
def _opened(options: AdviseOptions, prompts: Sequence[EvalPrompt]) -> Iterator[tuple[LLM, list[int]]]:
    """The engine, with room for the highest load, and the tokens of each prompt."""
    tokenizer = load_tokenizer(model_folder(options.target))
    room = max(_rough_tokens(one, tokenizer) for one in prompts)
    room = room + options.max_tokens + max(options.lengths) + _SPARE_TOKENS
    with LLM(
        options.target,
        SpecConfig(drafter=None),
        dtype=options.dtype,
        device=options.device,
        weights=options.weights,
        profile="off",
        cache_tokens=2 * options.loads[-1] * room,
        max_batch_size=options.loads[-1],
    ) as llm:
        yield llm, list(map(len, fitting(llm, prompts, options.chat)))


def _rough_tokens(prompt: EvalPrompt, tokenizer: Tokenizer | None) -> int:
    """About as many tokens as a prompt has, its chat template aside."""
    if tokenizer is None:
        return len(prompt.content)
    texts = [prompt.content] if isinstance(prompt.content, str) else [str(part) for part in prompt.content]
    return sum(len(tokenizer.encode(text)) for text in texts)


@dataclass
class _Loaded:
    """Drafters that could be loaded, what their checks found, and why others could not."""

    made: dict[str, tuple[AdviseCandidate, SpecConfig, Drafter]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def load(self, llm: LLM, candidate: AdviseCandidate) -> None:
        """Load a candidate's drafter and compare its model with the target."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the checks say the same, with the verdict
                llm.prepare(candidate.spec)
        except ForetokenError as error:
            self.failed[candidate.name] = str(error)
            return
        (drafter,) = llm.loaded_drafters(candidate.spec)
        self.made[candidate.name] = (candidate, candidate.spec, drafter)
        if candidate.kind == "draft model" and candidate.source is not None and isinstance(drafter, ModelDrafter):
            texts = llm.tokenizer, load_tokenizer(model_folder(candidate.source))
            self.findings += of_pair(candidate.name, candidate.source, llm.target, drafter.models()[0], texts)


def _answers(
    llm: LLM,
    options: AdviseOptions,
    candidates: Sequence[AdviseCandidate],
    prompts: Sequence[EvalPrompt],
    kept: KeptFile,
    console: Console,
) -> tuple[dict[str, list[AnswerRounds]], bool]:
    """By candidate its rounds on every prompt, with the longest drafts; and whether an interrupt ended that early."""
    asked = EvalOptions(
        options.target,
        drafters=("ngram",),
        num_draft=max(options.lengths),
        max_tokens=options.max_tokens,
        temperatures=(options.temperature,),
        stop_at_eos=options.stop_at_eos,
        chat=options.chat,
        seed=options.seed,
    )
    recorder, found = RoundRecorder(), {one.name: list[AnswerRounds]() for one in candidates}

    def rounds(prompt: EvalPrompt, candidate: AdviseCandidate) -> AnswerRounds:
        drafter = EvalDrafter(candidate.name, candidate.spec)
        sample = measure(llm, asked, (prompt, drafter, options.temperature))
        return recorder.answer(sample.prompt, sample.slice)

    llm.engine.watchers.append(recorder)
    interrupted = False
    try:
        with warnings.catch_warnings(), progress(len(prompts) * len(candidates), console) as tell:
            warnings.simplefilter("ignore", SpeculationWarning)
            for place, prompt in enumerate(in_turns(prompts)):
                for one in candidates:
                    tell(f"acceptance of {one.name}")
                    answer = kept.once(f"{one.name}, prompt {place}", read_rounds, partial(rounds, prompt, one))
                    found[one.name].append(answer)
    except KeyboardInterrupt:
        if not all(any(answer.rounds for answer in own) for own in found.values()):
            raise
        interrupted = True
    finally:
        llm.engine.watchers.remove(recorder)
    return {name: answered(own, len(prompts)) for name, own in found.items()}, interrupted


def _library_texts(options: AdviseOptions) -> list[str]:
    if options.prompts is not None:
        return []
    return ["No prompts were given: acceptance was measured on the library's own texts, and depends on texts."]
