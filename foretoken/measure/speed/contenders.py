"""What answers in a speed measurement: our engine under each setting, and every other backend that is named."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from foretoken.backend.answering import Answer, AnsweringBackend, Drafting, Question
from foretoken.backend.drafting import DrafterChoice
from foretoken.backend.local_answers import LocalWay
from foretoken.backend.registry import LOCAL, BackendOptions, open_backend
from foretoken.config import LOSSY_RULES, SamplingParams, SpecConfig
from foretoken.draft.base import Drafter, DrafterKey
from foretoken.engine.llm import LLM
from foretoken.errors import ConfigError, InputError
from foretoken.heads.kind import with_head_kind
from foretoken.measure.options import DEFAULT_NUMERICS, PLAIN
from foretoken.measure.speed.options import EVERY_KIND, SpeedOptions
from foretoken.measure.speed.plan import SpeedSetting, question_of
from foretoken.measure.workload import Prompt


class Own:
    """A setting of foretoken. `takes_prediction`: its requests get their prompt's prediction.

    Drafters are reset before every answer. With `warm` they keep what they remember from prompt to prompt, and are
    reset before a prompt that they have answered since.
    """

    def __init__(
        self, setting: SpeedSetting, llm: LLM, spec: SpecConfig, takes_prediction: bool = False, warm: bool = False
    ) -> None:
        self.setting, self.llm, self.warm = setting, llm, warm
        self.way = LocalWay(llm, with_head_kind(spec), setting.name, takes_prediction)
        self._num_tenants = 0
        self._answered: set[Prompt] = set()  # since the drafters were reset
        self._drafters: Mapping[DrafterKey, Drafter] = {}  # of a warm setting, between its answers

    def _tenant(self, prompt: Prompt) -> str:
        """The request's own tenant: its prefix is computed anew. Warm requests share one until a prompt comes again."""
        if not self.warm or prompt in self._answered:
            self._answered.clear()
        if not self._answered:
            self._num_tenants += 1
        self._answered.add(prompt)
        return f"{self.setting.name} {self._num_tenants}"

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Answer one prompt alone, timed outside the engine.

        Raises:
            ForetokenError: it failed, or gave no token.
        """
        question = question_of(prompt, params)
        tenant, spec = self._tenant(prompt), self.way.spec_for(question)
        if len(self._answered) > 1:
            self.llm.put_drafters(self._drafters)
        else:
            self.llm.reset_drafters(spec)
        found = self.way.answer(question, tenant)
        if self.warm:
            self._drafters = self.llm.take_drafters(spec)
        return found


class Other:
    """A backend with one way to draft."""

    def __init__(self, backend: AnsweringBackend, drafting: Drafting) -> None:
        self.backend, self.drafting = backend, drafting
        number = "" if drafting.num_draft is None else str(drafting.num_draft)
        self.setting = SpeedSetting(
            name="-".join(filter(None, (backend.name, drafting.kind, drafting.options, number))),
            engine=backend.name,
            drafter=drafting.kind,
            num_draft="auto" if drafting.num_draft is None and drafting.kind is not None else drafting.num_draft,
            options=drafting.options,
            counterpart=drafting.counterpart,
            free=drafting.is_free,
            samples=backend.capabilities.sampling,
        )

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Answer one prompt, with nothing that was drafted from earlier answers as far as the engine can forget it;
        raises as `AnsweringBackend.answer` does.
        """
        return self.ask(question_of(prompt, params))

    def ask(self, question: Question) -> Answer:
        """The same for a question; raises as `AnsweringBackend.answer` does."""
        self.backend.reset()
        return self.backend.answer(question, self.drafting)


Contender = Own | Other  # a setting that is not foretoken and gives no answer is left out of the run


def own_contenders(
    options: SpeedOptions, llm: LLM, prompts: Sequence[Prompt], numerics: str = DEFAULT_NUMERICS
) -> tuple[list[Contender], list[str]]:
    """Plain decoding, then every drafter at every number of draft tokens under every rule; notes on what is left out.

    `numerics` is that of `llm`.

    Raises:
        ConfigError: a drafter that was asked for by name can run on no prompt, or its options contradict each other.
    """
    plain = SpeedSetting(_named(PLAIN, numerics), numerics=numerics)
    found: dict[SpeedSetting, Contender] = {plain: Own(plain, llm, SpecConfig())}
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
            names = ", ".join(left_out)
            notes.append(f"{choice.label} was not measured on {names}: these prompts carry no prediction.")
        try:
            found |= {contender.setting: contender for contender in _sweep(choice, options, llm, where, numerics)}
        except ConfigError as error:
            if choice.required:
                raise
            notes.append(f"{choice.name} was not measured: {error}")
    return list(found.values()), list(dict.fromkeys(notes))


def _slices_of(choice: DrafterChoice, prompts: Sequence[Prompt]) -> tuple[str, ...] | None:
    """The slices that the drafter can run on (None: all); one that needs a prediction needs it in every prompt."""
    names = dict.fromkeys(prompt.slice for prompt in prompts)
    unable = {prompt.slice for prompt in prompts if prompt.prediction is None}
    return tuple(name for name in names if name not in unable) if "prediction" in choice.needs and unable else None


def _sweep(
    choice: DrafterChoice, options: SpeedOptions, llm: LLM, where: tuple[str, ...] | None, numerics: str
) -> list[Own]:
    """One contender per number of draft tokens and rule, or only those that the choice itself names."""
    num_drafts = options.num_drafts if choice.own("num_draft") is None else (choice.own("num_draft"),)
    rules = options.rules if choice.own("rule") is None else (choice.own("rule"),)
    found = []
    for num_draft, rule in itertools.product(num_drafts, rules):
        given = {"draft": options.draft} if "draft" in choice.takes else {}
        spec = choice.spec(num_draft=num_draft, rule=rule, allow_lossy=options.allow_lossy, **given)
        name = f"{choice.label}-{num_draft}" + ("" if rules == options.rules and len(rules) == 1 else f" {rule}")
        setting = SpeedSetting(
            name=_named(name + (" warm" if options.warm else ""), numerics),
            drafter=choice.name,
            num_draft=num_draft,
            lossy=rule in LOSSY_RULES,
            options=choice.options,
            free=choice.own("draft") is None
            and (options.draft is None or "draft" not in choice.takes)
            and "prediction" not in choice.takes,
            slices=where,
            optional=not choice.required,
            numerics=numerics,
        )
        found.append(Own(setting, llm, spec, "prediction" in choice.takes, options.warm))
    return found


def _named(name: str, numerics: str) -> str:
    return name if numerics == DEFAULT_NUMERICS else f"{name} {numerics}"


def open_others(options: SpeedOptions, stack: ExitStack) -> list[AnsweringBackend]:
    """The backends that are not our own; `stack` closes them. Raises as `open_backend` does."""
    found = []
    for name in options.backends:
        if name != LOCAL:
            asked = (name, options.target, options.draft, options.dtype, options.device, options.num_threads)
            backend = open_backend(BackendOptions(*asked))
            stack.callback(backend.close)
            found.append(backend)
    return found


def other_contenders(
    options: SpeedOptions, backends: Sequence[AnsweringBackend], prompts: Sequence[Prompt]
) -> tuple[list[Contender], list[str]]:
    """Every backend without drafting and with each of its ways; notes on what they cannot be asked.

    Raises:
        InputError: a kind of drafting that none of them has.
    """
    numbers = options.peer_num_drafts, options.peer_lookup_num_drafts
    ways = {backend.name: backend.draftings(*numbers) for backend in backends}
    _check_kinds(options, backends, {str(way.kind) for own in ways.values() for way in own})
    found: list[Contender] = []
    notes: list[str] = []
    for backend in backends:
        can, name = backend.capabilities, backend.name
        notes += backend.notes()
        if not can.conversations and any(prompt.messages and not prompt.text for prompt in prompts):
            notes.append(f"{name} was not measured: it renders no conversations. Measure local too, which does.")
            continue
        if can.plain:
            found.append(Other(backend, Drafting()))
        else:
            notes.append(f"{name} was not measured without drafting: it cannot be asked to answer without.")
        if not can.sampling and any(options.temperatures):
            notes.append(f"{name} was measured greedily only: it does not repeat a sampled answer for a seed.")
        found += [Other(backend, way) for way in ways[name] if {EVERY_KIND, way.kind} & {*options.peer_drafters}]
    return found, notes


def _check_kinds(options: SpeedOptions, backends: Sequence[AnsweringBackend], known: set[str]) -> None:
    """Refuse a kind of drafting that no backend has here."""
    for kind in options.peer_drafters:
        if backends and kind not in (*known, EVERY_KIND):
            why = " ".join(note for backend in backends for note in backend.notes())
            remedy = f"the backends draft here with {', '.join(sorted(known))}; or give {EVERY_KIND}. {why}".strip()
            raise InputError("peer_drafters", kind, remedy)
