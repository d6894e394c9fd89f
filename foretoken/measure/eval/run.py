"""One evaluation of our engine or of another, from options to result, and what is left of it when it is interrupted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

from foretoken.backend.answering import AnsweringBackend, Drafting, Question
from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.engine.prompts import check_no_tool_calls
from foretoken.errors import InputError
from foretoken.heads.kind import with_head_kind
from foretoken.machine.identity import machine, versions
from foretoken.measure.asked import chosen_draftings, drafting_name
from foretoken.measure.eval.counts import AcceptanceCounter, reported_counts
from foretoken.measure.eval.identity import identity_of
from foretoken.measure.eval.options import BackendEvalOptions, EvalDrafter, EvalOptions
from foretoken.measure.eval.prompts import EvalPrompt, encoded, fitting, in_turns
from foretoken.measure.eval.result import EvalResult, EvalSample, sample_of
from foretoken.measure.kept import KeptFile, kept_run
from foretoken.measure.options import PLAIN
from foretoken.measure.price import PriceRow, counted_tokens, price_rows
from foretoken.measure.prompts import text_pairs
from foretoken.measure.report import now
from foretoken.model.names import model_folder

_FEW_PROMPTS = 10  # of a slice: with fewer no interval is narrow
_REMEDY = "acceptance cannot be measured; ask an engine that reports them with its answers, or a server with /metrics"


def open_llm(options: EvalOptions) -> LLM:
    """The engine with the target; costs of steps are not measured, because drafts have a fixed length.

    Raises:
        ForetokenError: a model that cannot be used.
    """
    return LLM(
        options.target,
        SpecConfig(drafter=None),
        dtype=options.dtype,
        device=options.device,
        numerics=options.numerics,
        weights=options.weights,
        profile="off",
    )


def plan(options: EvalOptions, prompts: Sequence[EvalPrompt]) -> list[tuple[EvalPrompt, EvalDrafter, float]]:
    """What to run, prompt by prompt. A drafter that needs a prediction runs on the prompts that have one. With a price
    plain decoding runs too, to be compared with.

    Raises:
        InputError: a drafter for which there is no prompt.
    """
    for drafter in options.settings:
        if drafter.needs_prediction and all(prompt.prediction is None for prompt in prompts):
            raise InputError("drafters", drafter.name, "no prompt has a prediction; evaluate it on the slice edit")
    plain = () if options.price_per_hour is None else (EvalDrafter(PLAIN, SpecConfig(drafter=None)),)
    return [
        (prompt, drafter, float(temperature))
        for prompt in in_turns(prompts)
        for drafter in (*plain, *options.settings)
        if prompt.prediction is not None or not drafter.needs_prediction
        for temperature in dict.fromkeys(options.temperatures)
    ]


def measure(llm: LLM, options: EvalOptions, job: tuple[EvalPrompt, EvalDrafter, float]) -> EvalSample:
    """The counts of one answer.

    Raises:
        InputError: a prompt that does not fit the target's context, or needs a tokenizer or chat template it lacks.
        ForetokenError: a draft that cannot be used, or an answer that failed.
    """
    counter, (prompt, drafter, temperature) = AcceptanceCounter(), job
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=temperature,
        seed=answer_seed(options.seed, prompt) if temperature > 0 else None,
        ignore_eos=not options.stop_at_eos,
        tenant=f"{drafter.name} {temperature:g} {prompt.key}",
        slice=prompt.slice,
        prediction=prompt.prediction if drafter.takes_prediction else None,
    )
    spec = with_head_kind(drafter.spec)
    llm.engine.watchers.append(counter)
    try:
        llm.reset_drafters(spec.for_request(params.prediction))
        output = llm.generate([encoded(llm, prompt, options.chat)], params, spec)[0]
    finally:
        llm.engine.watchers.remove(counter)
    if output.error is not None:
        raise output.error
    rule = "+".join(sorted(counter.rules)) or output.stats.rule
    count = len(output.token_ids)
    timed = count, output.stats.total_s, output.stats.inter_token_s if count > 1 else None
    return EvalSample(drafter.name, prompt.slice, temperature, prompt.key, rule, counter.counts, timed)


class EvaluationRun(ABC):
    """A running evaluation: `samples` are the answers so far, so that `result` can be taken at any time. `plain` are
    those without drafts, which only prices need.
    """

    options: EvalOptions | BackendEvalOptions
    jobs: Sequence[object]  # one for each answer

    def __init__(self, options: EvalOptions | BackendEvalOptions, prompts: Sequence[EvalPrompt], command: str) -> None:
        self.options, self.prompts, self.command = options, prompts, command
        self.samples: list[EvalSample] = []
        self.plain: list[EvalSample] = []
        self.identity: dict[str, object] = {}

    @abstractmethod
    def run(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Measure every job; `tell` receives the name of a drafter before each answer.

        Raises:
            ForetokenError: it cannot be measured, or there was no answer.
        """

    def _kept(self, kind: str, **about: Any) -> KeptFile:  # noqa: ANN401 - see `run_of`
        """The file of answers; options, prompts and `about` must agree, and the machine where times count."""
        options, asked = self.options, {"prompts": [one.key for one in self.prompts]}
        about |= {} if options.price_per_hour is None else {"machine": machine()}
        return kept_run(options.resume, kind, asked, options, **about)

    def notes(self) -> list[str]:
        """What restricts the result."""
        per_slice = Counter(prompt.slice for prompt in self.prompts)
        few = [f"{name} ({count})" for name, count in per_slice.items() if count < _FEW_PROMPTS]
        return [f"fewer than {_FEW_PROMPTS} prompts, so the intervals are rough: {', '.join(few)}"] if few else []

    def prices(self) -> tuple[PriceRow, ...]:
        """The price of tokens by slice and temperature, of plain decoding too where it can be had; none without one."""
        spent: dict[tuple[str, str], list[tuple[int, float]]] = {}
        slo_ms = self.options.slo_ms
        for one in (*self.plain, *self.samples):
            if one.timed is not None:
                count, seconds, between_s = one.timed
                own = spent.setdefault((f"{one.slice}, {one.temperature:g}", one.drafter), [])
                own.append((counted_tokens(count, between_s, slo_ms), seconds))
        speeds: list[tuple[str, str, float | None]] = []
        for where, timed in spent.items():
            count, seconds = sum(one for one, _ in timed), sum(one for _, one in timed)
            speeds.append((*where, count / seconds if seconds > 0 else None))
        return price_rows(self.options.price_per_hour, speeds, PLAIN)

    def result(self) -> EvalResult:
        """What was measured so far."""
        return EvalResult(
            samples=tuple(self.samples),
            identity=self.identity,
            settings=self.options.comparable,
            options=asdict(self.options),
            command=self.command,
            machine=machine(),
            versions=versions(),
            date=now(),
            complete=len(self.samples) + len(self.plain) == len(self.jobs),
            notes=self.notes(),
        )


class EvalRun(EvaluationRun):
    """An evaluation of our engine."""

    options: EvalOptions
    jobs: list[tuple[EvalPrompt, EvalDrafter, float]]

    def __init__(self, options: EvalOptions, prompts: Sequence[EvalPrompt], command: str) -> None:
        super().__init__(options, prompts, command)
        self.jobs = plan(options, prompts)

    def run(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Open the target, read the identities, measure; `tell` receives a drafter's name before each answer.

        Raises:
            ForetokenError: a model that cannot be used, a prompt that cannot be run, or an answer that failed.
        """
        with open_llm(self.options) as llm:
            fitting(llm, self.prompts, self.options.chat)
            self.identity = identities(self.options)
            specs = [one.spec for one in self.options.settings]
            models = [self.options.target, *(name for spec in specs for name in (spec.draft, spec.head) if name)]
            files = [name for spec in specs for name in (spec.corpus, spec.ngram_table)]
            with closing(self._kept("eval", models=models, files=files, versions=versions())) as kept:
                names = _each_named((drafter.name, temperature, prompt) for prompt, drafter, temperature in self.jobs)
                for name, job in zip(names, self.jobs, strict=True):
                    tell(job[1].name)
                    sample = kept.once(name, sample_of, partial(measure, llm, self.options, job))
                    (self.plain if sample.drafter == PLAIN else self.samples).append(sample)


def _each_named(asked: Iterable[tuple[str, float, EvalPrompt]]) -> Iterator[str]:
    """A name for each answer: of its drafter, temperature and prompt, and how often these came before."""
    known: Counter[str] = Counter()
    for drafter, temperature, prompt in asked:
        place = f"{drafter} {temperature} {prompt.key}"
        yield f"{place} {known[place]}"
        known[place] += 1


def answer_seed(seed: int, prompt: EvalPrompt) -> int:
    """The seed of a prompt's sampled answers: the same whatever else is run."""
    return seed + int(prompt.key[:8], 16)


def identities(options: EvalOptions) -> dict[str, object]:
    """The hashes of target and drafters' models.

    Raises:
        ModelError, StorageError: one that cannot be read.
    """
    known: dict[str, dict[str, str | None]] = {}

    def of(name: str) -> dict[str, str | None]:
        if name not in known:
            known[name] = identity_of(name, model_folder(name))
        return known[name]

    target = of(options.target)
    drafts = {one.name: [of(name) for name in dict.fromkeys(_drafts(one.spec))] for one in options.settings}
    return {"target": target, "drafts": {name: found for name, found in drafts.items() if found}}


def _drafts(spec: SpecConfig) -> Iterator[str]:
    """The draft models of a configuration and its parts."""
    if spec.draft is not None:
        yield spec.draft
    for part in spec.declared:
        yield from _drafts(part)


class BackendEvalRun(EvaluationRun):
    """An evaluation of an open backend."""

    options: BackendEvalOptions
    jobs: list[tuple[Question, EvalPrompt, Drafting, float]]

    def __init__(
        self, options: BackendEvalOptions, prompts: Sequence[EvalPrompt], command: str, backend: AnsweringBackend
    ) -> None:
        """Plan what to ask.

        Raises:
            InputError: what the backend cannot be asked or does not report; names the field.
        """
        super().__init__(options, prompts, command)
        self.backend = backend
        self.identity = {"backend": options.source.identity_of(backend)}
        self.num_silent = 0  # answers without a word on drafts
        self.has_promised = backend.capabilities.draft_counts != "none"
        self.counts_itself = self.has_promised or backend.counters() is None
        self.draftings = chosen_draftings(backend, "drafters", options.drafters, options.num_draft)
        temperatures = options.temperatures_for(backend)
        asked = [(self._question(prompt), prompt) for prompt in in_turns(self.prompts)]
        plain = (Drafting(),) * (options.price_per_hour is not None and backend.capabilities.plain)
        self.jobs = [
            (question, prompt, drafting, temperature)
            for place, (question, prompt) in enumerate(asked)
            # The second to answer finds its prompt in the cache of a server.
            for drafting in ((*plain, *self.draftings) if place % 2 else (*self.draftings, *plain))
            for temperature in temperatures
        ]
        if not self.counts_itself:  # one slice after the other: what its counters miss of an answer is the next one's
            places = {drafting: place for place, drafting in enumerate((*plain, *self.draftings))}
            self.jobs.sort(key=lambda job: (places[job[2]], job[3], job[1].slice))

    def run(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Ask; `tell` receives the name of a way to draft before each answer.

        Raises:
            InputError: the backend reported nothing of its drafts.
            ForetokenError: it gave no answer.
        """
        source, about = self.options.source, self.identity | {"drafting": self.drafters()}

        def restored(found: Sequence[Any]) -> tuple[EvalSample, bool]:
            return sample_of(found[0]), bool(found[1])

        with closing(self._kept("eval of a backend", models=(source.model, source.draft), **about)) as kept:
            names = _each_named((drafting_name(job[2]), job[3], job[1]) for job in self.jobs)
            for name, job in zip(names, self.jobs, strict=True):
                tell(drafting_name(job[2]))
                sample, is_silent = kept.once(name, restored, partial(self._measured, *job))
                self.num_silent += is_silent
                (self.plain if job[2].kind is None else self.samples).append(sample)
                if self.num_silent and not self.has_promised:
                    break
        if self.num_silent == len(self.samples):
            self.samples.clear()
            remedy = f"reports no drafted and accepted tokens; {_REMEDY}"
            raise InputError("backend", self.backend.name, remedy)

    def _measured(
        self, question: Question, prompt: EvalPrompt, drafting: Drafting, temperature: float
    ) -> tuple[EvalSample, bool]:
        """The counts of one answer, and whether it came without a word on its drafts."""
        seed = answer_seed(self.options.seed, prompt) if temperature > 0 else None
        asked = Question(**{**vars(question), "temperature": temperature, "seed": seed})
        self.backend.reset()
        before = None if self.counts_itself else self.backend.counters()
        answer = self.backend.answer(asked, drafting)
        after = None if before is None else self.backend.counters()
        drafted, accepted = answer.num_drafted, answer.num_accepted
        if before is not None and after is not None:
            drafted, accepted = (round(after[name] - before[name]) for name in ("drafted", "accepted"))
        is_silent = drafting.kind is not None and (drafted is None or accepted is None)
        counts = reported_counts(answer, drafted or 0, accepted or 0)
        between_s = answer.decode_s / answer.decode_tokens if answer.decode_tokens else None
        timed = None if answer.e2e_s is None else (answer.num_emitted, answer.e2e_s, between_s)
        name = drafting_name(drafting)
        return EvalSample(name, prompt.slice, temperature, prompt.key, "", counts, timed), is_silent

    def _question(self, prompt: EvalPrompt) -> Question:
        """A prompt as the backend is asked it."""
        options, text = self.options, prompt.content if isinstance(prompt.content, str) else ""
        messages = (("user", text),) if text and options.chat else () if text else _pairs(prompt)
        if messages and not self.backend.capabilities.conversations:
            field_name = "chat" if options.chat else "prompts"
            raise InputError(field_name, prompt.name, f"{self.backend.name} renders no conversations; give texts")
        return Question(
            text="" if messages else text,
            messages=messages,
            max_tokens=options.max_tokens,
            ignore_eos=not options.stop_at_eos,
            prediction=prompt.prediction,
        )

    def drafters(self) -> list[str]:
        """The names of its ways to draft, as in the result."""
        return [drafting_name(one) for one in self.draftings]

    def notes(self) -> list[str]:
        """What restricts the result, with what the backend says of itself."""
        notes = [*super().notes(), *self.backend.notes()]
        if not self.counts_itself:
            notes.append("drafted and accepted tokens are differences of the engine's counters around each answer")
        if self.num_silent:
            notes.append(f"{self.num_silent} answers came without counts of drafts: taken as if nothing was drafted")
        return notes


def _pairs(prompt: EvalPrompt) -> tuple[tuple[str, str], ...]:
    """The (role, content) pairs of a conversation."""
    check_no_tool_calls(prompt.name, prompt.content)
    found = text_pairs(prompt.content)
    if found is None:
        remedy = "another engine is asked texts, and messages whose content is a text; it takes no token ids"
        raise InputError("prompts", prompt.name, remedy)
    return found
