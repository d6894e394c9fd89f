"""Settings of other engines in a speed measurement: every backend that `--backends` names beside our own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from foretoken.backend.answering import Answer, AnsweringBackend, Drafting, Question
from foretoken.backend.registry import LOCAL, open_backend
from foretoken.bench.measure import Contender, SpeedSetting, question_of
from foretoken.bench.speed_options import EVERY_KIND, SpeedOptions
from foretoken.bench.workload import Prompt
from foretoken.config import SamplingParams
from foretoken.errors import InputError


class Other:
    """A backend with one way to draft."""

    def __init__(self, backend: AnsweringBackend, drafting: Drafting) -> None:
        self.backend, self.drafting = backend, drafting
        self.setting = _setting(backend, drafting)

    def answer(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """Answer one prompt, with nothing that was drafted from earlier answers as far as the engine can forget it.

        Raises:
            ForetokenError: see `AnsweringBackend.answer`.
        """
        return self.ask(question_of(prompt, params))

    def ask(self, question: Question) -> Answer:
        """The same for a question.

        Raises:
            ForetokenError: see `AnsweringBackend.answer`.
        """
        self.backend.reset()
        return self.backend.answer(question, self.drafting)


def _setting(backend: AnsweringBackend, drafting: Drafting) -> SpeedSetting:
    number = "" if drafting.num_draft is None else str(drafting.num_draft)
    return SpeedSetting(
        name="-".join(filter(None, (backend.name, drafting.kind, drafting.options, number))),
        engine=backend.name,
        drafter=drafting.kind,
        num_draft="auto" if drafting.num_draft is None and drafting.kind is not None else drafting.num_draft,
        options=drafting.options,
        counterpart=drafting.counterpart,
        free=drafting.is_free,
        samples=backend.capabilities.sampling,
    )


def open_others(options: SpeedOptions, stack: ExitStack) -> list[AnsweringBackend]:
    """The backends that are not our own; `stack` closes them.

    Raises:
        ForetokenError: see `open_backend`.
    """
    found = []
    for name in options.backends:
        if name != LOCAL:
            backend = open_backend(
                name,
                options.target,
                options.draft,
                dtype=options.dtype,
                device=options.device,
                threads=options.num_threads,
            )
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
    ways = {
        backend.name: backend.draftings(options.peer_num_drafts, options.peer_lookup_num_drafts) for backend in backends
    }
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
