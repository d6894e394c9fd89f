"""`foretoken bench`: plain against speculative decoding, one request at a time, through the public interface."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from foretoken.bench import peers
from foretoken.bench.compare import ratios
from foretoken.bench.drafting import DrafterChoice, parse_drafters
from foretoken.bench.measure import PLAIN, Answer, Contender, Plan, Sample, Setting, measure, summarise
from foretoken.bench.peers import EVERY as EVERY_KIND
from foretoken.bench.peers import check_kinds
from foretoken.bench.prompts import ALL, choose, fit, read_prompts
from foretoken.bench.report import (
    Report,
    check_name,
    check_plot,
    machine,
    source_caveats,
    versions,
    write_plot,
    write_result,
)
from foretoken.bench.workload import MOST_PROMPTS, SLICES, Prompt, slices
from foretoken.config import LOSSY_RULES, SamplingParams, SpecConfig
from foretoken.core import StepOutput
from foretoken.errors import ConfigError, ForetokenError, InputError
from foretoken.files import check_file, check_folder
from foretoken.model.open import model_folder
from foretoken.params import check_number, check_whole
from foretoken.printing.console import Console
from foretoken.verify import resolve

# What to know about a drafter's numbers, alone or as a part of another.
_CAVEATS = {
    "recycling": "recycling keeps its matrix from answer to answer, so that repeats find what earlier ones left there.",
    "early_exit": "early_exit keeps what it learned of its layers from answer to answer, where they are left to auto.",
    "lookahead": (
        "lookahead has the target run probes beside its guesses: their cost is in its times, they are no "
        "drafted tokens."
    ),
}


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and where the result goes.

    Plain decoding is always measured: it is the baseline. `drafters` are names, with options behind a colon if wanted
    (`drafting`), or `all`. `prompts` is a file or folder (`prompts`) instead of the library's texts; `slices` then says
    which kinds of them. `peer_drafters` are the kinds of speculative decoding to run in other engines,
    `peer_num_drafts` the draft lengths that these are swept over. `out` is a folder for a dated result, `name` the end
    of its file name, `plot` a .png or .svg file. `threads=None` leaves torch's own number.
    """

    target: str
    draft: str | None = None
    drafters: tuple[str, ...] = ("draft_model", "ngram")
    num_drafts: tuple[int | Literal["auto"], ...] = (3, 5)
    rules: tuple[str, ...] = ("auto",)
    allow_lossy: bool = False
    slices: tuple[str, ...] = (ALL,)
    prompts: Path | None = None
    prompts_per_slice: int = 2
    max_tokens: int = 128
    repeats: int = 3
    warmup: int = 1
    temperatures: tuple[float, ...] = (0.0, 0.8)
    ignore_eos: bool = True
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    peers: bool = False
    peer_drafters: tuple[str, ...] = (EVERY_KIND,)
    peer_num_drafts: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
    plot: Path | None = None
    out: Path | None = None
    name: str = "bench"
    seed: int = 0

    def __post_init__(self) -> None:
        for field, low, high in (
            ("prompts_per_slice", 1, MOST_PROMPTS),
            ("max_tokens", 2, None),
            ("repeats", 1, None),
            ("warmup", 0, None),
            ("seed", 0, 2**63),
        ):
            check_whole(field, getattr(self, field), low, high)
        if self.threads is not None and self.threads < 1:
            raise InputError("threads", self.threads, "must be at least 1; leave it out for torch's own number")
        if not self.temperatures:
            raise InputError("temperatures", self.temperatures, "give at least one; 0 is greedy")
        for temperature in self.temperatures:
            check_number("temperatures", temperature, low=0.0, high=100.0)
        for rule, temperature in itertools.product(self.rules, self.temperatures):
            resolve(rule, greedy=temperature == 0, seeded=True, allow_lossy=self.allow_lossy)
        if not self.slices:
            raise InputError("slices", self.slices, f"give at least one of {', '.join(SLICES)}, or {ALL}")
        if self.drafters and not self.num_drafts:
            raise InputError("num_drafts", self.num_drafts, "give at least one number of tokens to draft, or 'auto'")
        for field in ("num_drafts", "peer_num_drafts"):
            for number in getattr(self, field):
                if number != "auto" or field == "peer_num_drafts":
                    check_whole(field, number, low=1, high=1024)
        for choice in self.choices:
            if choice.required and "draft" in choice.needs and self.draft is None:
                raise ConfigError(
                    "draft",
                    None,
                    f"drafter {choice.name} needs a draft; give its folder, or leave {choice.name} out of the drafters",
                )
        check_kinds(self.peer_drafters)
        check_name(self.name)
        if self.plot is not None:
            check_plot(self.plot)

    @property
    def choices(self) -> tuple[DrafterChoice, ...]:
        """The drafters to measure."""
        return parse_drafters(self.drafters)

    @property
    def num_threads(self) -> int:
        """Threads that every engine of the run gets."""
        return self.threads if self.threads is not None else torch.get_num_threads()


class Stats(Protocol):
    """What the bench reads of `out.stats`."""

    @property
    def num_steps(self) -> int: ...  # noqa: D102
    @property
    def num_drafted(self) -> int: ...  # noqa: D102
    @property
    def num_accepted(self) -> int: ...  # noqa: D102
    @property
    def wasted_s(self) -> float: ...  # noqa: D102
    @property
    def accepted_per_position(self) -> Sequence[tuple[int, int]]: ...  # noqa: D102


class Output(Protocol):
    """What the bench reads of one answer."""

    @property
    def text(self) -> str: ...  # noqa: D102
    @property
    def token_ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def stats(self) -> Stats: ...  # noqa: D102
    @property
    def error(self) -> Exception | None: ...  # noqa: D102


class Totals(Protocol):
    """Seconds that the engine has spent since it started, by phase."""

    @property
    def draft_s(self) -> float: ...  # noqa: D102
    @property
    def target_s(self) -> float: ...  # noqa: D102
    @property
    def rule_s(self) -> float: ...  # noqa: D102


class HasTotals(Protocol):
    """An engine with its totals."""

    @property
    def stats(self) -> Totals: ...  # noqa: D102


class HasContext(Protocol):
    """A target whose context ends somewhere."""

    @property
    def max_context_tokens(self) -> int: ...  # noqa: D102


class Generator(Protocol):
    """The part of `foretoken.LLM` that the bench uses."""

    @property
    def target(self) -> HasContext:
        """Prompts are cut to what it can take."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    @property
    def engine(self) -> HasTotals:
        """Read between two steps: what lies between two readings is what these steps cost."""
        ...

    def generate(
        self,
        prompts: list[str],
        params: SamplingParams,
        *,
        spec: SpecConfig,
        on_step: Callable[[list[StepOutput]], None],
    ) -> Sequence[Output]:
        """Answer every prompt under one `spec`; `on_step` gets what each step emitted."""
        ...


class _Watch:
    """The clock and the engine's totals when the first tokens came: what is before belongs to the prompt."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.start = time.perf_counter()
        self.first_at: float | None = None
        self.num_first = 0
        self.first_totals = (0.0, 0.0, 0.0)

    def on_step(self, outputs: list[StepOutput]) -> None:
        if self.first_at is None and any(output.token_ids for output in outputs):
            self.first_at = time.perf_counter()
            self.num_first = sum(len(output.token_ids) for output in outputs)
            self.first_totals = self.totals()

    def totals(self) -> tuple[float, float, float]:
        """(draft, target and rule, rule alone) seconds so far."""
        stats = self.generator.engine.stats
        return stats.draft_s, stats.target_s + stats.rule_s, stats.rule_s


class Own:
    """A setting of foretoken itself. `takes_prediction` says whether its requests get their prompt's prediction."""

    def __init__(
        self, setting: Setting, generator: Generator, spec: SpecConfig, takes_prediction: bool = False
    ) -> None:
        self.setting = setting
        self.generator = generator
        self.spec, self.takes_prediction = spec, takes_prediction
        self._num_answers = 0

    def params_for(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """A tenant per answer, or repeats would draft from themselves."""
        self._num_answers += 1
        prediction = prompt.prediction if self.takes_prediction else None
        return replace(params, tenant=f"{self.setting.name} {self._num_answers}", prediction=prediction)

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Answer one prompt alone; the clock runs outside the engine.

        Raises:
            ForetokenError: the engine failed, or gave no token.
        """
        watch = _Watch(self.generator)
        own = self.params_for(prompt, params)
        output = self.generator.generate([prompt.text], own, spec=self.spec, on_step=watch.on_step)[0]
        stop = time.perf_counter()
        if isinstance(output.error, ForetokenError):
            raise output.error
        if watch.first_at is None:
            raise ForetokenError(f"{self.setting.name} gave no token for {prompt.name}")
        draft_s, verify_s, rule_s = watch.totals()
        return Answer(
            token_ids=tuple(output.token_ids),
            text=output.text,
            num_emitted=len(output.token_ids),
            decode_tokens=len(output.token_ids) - watch.num_first,
            decode_s=stop - watch.first_at,
            ttft_s=watch.first_at - watch.start,
            num_steps=output.stats.num_steps,
            decode_steps=output.stats.num_steps - 1,
            num_drafted=output.stats.num_drafted,
            num_accepted=output.stats.num_accepted,
            draft_s=draft_s - watch.first_totals[0],
            verify_s=verify_s - watch.first_totals[1],
            rule_s=rule_s - watch.first_totals[2],
            wasted_s=output.stats.wasted_s,
            positions=tuple(output.stats.accepted_per_position),
        )


def own_contenders(
    options: BenchOptions, generator: Generator, prompts: Sequence[Prompt]
) -> tuple[list[Contender], list[str]]:
    """Plain decoding, then every drafter at every number of drafted tokens, under every rule; a note where something
    was left out.

    Raises:
        ConfigError: a drafter that was asked for by name can run on no prompt, or its options contradict each other.
    """
    found: dict[Setting, Contender] = {Setting(PLAIN): Own(Setting(PLAIN), generator, SpecConfig())}
    notes: list[str] = []
    for choice in options.choices:
        if "draft" in choice.needs and options.draft is None:
            notes.append(f"{choice.name} was not measured: it needs a draft, and none was given.")
            continue
        where = _slices_of(choice, prompts)
        if where == ():
            remedy = "measure it on the slice edit, or on your own prompts with a `prediction` each"
            if choice.required:
                raise ConfigError("drafters", choice.label, f"the prompts carry no prediction; {remedy}")
            notes.append(f"{choice.name} was not measured: no prompt carries a prediction.")
            continue
        if where is not None:
            left_out = dict.fromkeys(prompt.slice for prompt in prompts if prompt.slice not in where)
            notes.append(
                f"{choice.label} was not measured on {', '.join(left_out)}: these prompts carry no prediction."
            )
        try:
            found |= {contender.setting: contender for contender in _sweep(choice, options, generator, where)}
        except ConfigError as error:
            if choice.required:
                raise
            notes.append(f"{choice.name} was not measured: {error}")
    return list(found.values()), notes


def _slices_of(choice: DrafterChoice, prompts: Sequence[Prompt]) -> tuple[str, ...] | None:
    """Where the drafter can run: one that needs a prediction on slices that have one in every prompt; None for
    everywhere.
    """
    names = dict.fromkeys(prompt.slice for prompt in prompts)
    able = tuple(
        name for name in names if all(prompt.prediction is not None for prompt in prompts if prompt.slice == name)
    )
    return able if "prediction" in choice.needs and len(able) < len(names) else None


def _sweep(
    choice: DrafterChoice, options: BenchOptions, generator: Generator, where: tuple[str, ...] | None
) -> list[Own]:
    """One contender per number of guesses and rule, or for those that the choice itself names."""
    num_drafts = options.num_drafts if choice.own("num_draft") is None else (choice.own("num_draft"),)
    rules = options.rules if choice.own("rule") is None else (choice.own("rule"),)
    found = []
    for num_draft, rule in itertools.product(num_drafts, rules):
        given = {"draft": options.draft} if "draft" in choice.takes else {}
        spec = choice.spec(num_draft=num_draft, rule=rule, allow_lossy=options.allow_lossy, **given)
        setting = Setting(
            name=f"{choice.label}-{num_draft}" + ("" if rules == options.rules and len(rules) == 1 else f" {rule}"),
            drafter=choice.name,
            num_draft=num_draft,
            lossy=rule in LOSSY_RULES,
            options=choice.options,
            free=choice.own("draft") is None
            and (options.draft is None or "draft" not in choice.takes)
            and "prediction" not in choice.takes,
            slices=where,
            optional=not choice.required,
        )
        found.append(Own(setting, generator, spec, "prediction" in choice.takes))
    return found


def run_bench(options: BenchOptions, generator: Generator | None = None, command: str = "foretoken bench") -> Report:
    """Measure, and write the plot and the dated result if they were asked for; the caller prints the report.

    `generator` stands in for the engine that would be opened on `options.target`. A progress bar goes to a terminal's
    standard error.

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
    caveats = source_caveats(target, draft, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
    caveats.extend(notes)
    caveats.extend(text for name, text in _CAVEATS.items() if any(name in choice.leaves for choice in options.choices))
    with ExitStack() as stack:
        generator = generator or _open(options, stack)
        prompts, notes = fit(
            prompts, lambda text: len(generator.encode(text)), generator.target.max_context_tokens - options.max_tokens
        )
        caveats.extend(notes)
        plan = Plan(
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
    report = Report(command, machine(), found, asdict(options), rows, ratios(rows), tuple(caveats))
    if options.plot is not None:
        write_plot(report, options.plot)
    return write_result(report, options.out, options.name) if options.out is not None else report


def _prompts(options: BenchOptions) -> tuple[tuple[Prompt, ...], list[str]]:
    if options.prompts is not None:
        return choose(read_prompts(options.prompts), options.slices, options.prompts_per_slice)
    return slices(SLICES if ALL in options.slices else options.slices, options.prompts_per_slice), []


def _folders(options: BenchOptions, given: bool) -> tuple[Path, Path | None]:
    if given:
        return Path(options.target), None if options.draft is None else Path(options.draft)
    return model_folder(options.target), None if options.draft is None else model_folder(options.draft)


def _open(options: BenchOptions, stack: ExitStack) -> Generator:
    from foretoken import LLM

    llm = LLM(options.target, dtype=options.dtype, device=options.device)
    stack.callback(llm.close)
    return llm


def _with_progress(contenders: Sequence[Contender], plan: Plan) -> tuple[list[Sample], list[str]]:
    with Console(stderr=True).bar("measuring", plan.num_runs(c.setting for c in contenders), counts=True) as bar:
        return measure(contenders, plan, lambda name: bar.update(name, advance=1))
