"""The mix: who guesses, that the choice never looks at what is drawn, whose account a guess goes on, and what every
part knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.control.candidates import NO_DRAFT, DraftBudget
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.worth import RETRY_ROUNDS, Offer, Prices, Promise
from foretoken.engine.engine import Engine
from foretoken.model.randomness import RaceNoise
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import ScriptedModel, recite
from tests.helpers.watch import Watched, check_cache

VOCAB = 50
TWO = SpecConfig("mix", "d", parts=("ngram", "draft_model"), num_draft=4)
MERGED = SpecConfig("mix", "d", parts=("ngram", "draft_model"), num_draft=4, combine="merge")


class Clock:
    """Time that passes when a model runs, and only then."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow(ScriptedModel):
    """A model whose every forward takes a while on a given clock."""

    def __init__(
        self, *arguments: object, clock: Clock, seconds: float, row_seconds: float = 0.0, **options: object
    ) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.clock, self.seconds, self.row_seconds = clock, seconds, row_seconds

    def forward(self, tokens: torch.Tensor, *arguments: object, **options: object) -> object:
        self.clock.now_s += self.seconds + self.row_seconds * len(tokens)
        return super().forward(tokens, *arguments, **options)  # type: ignore[arg-type]


def says(answer: Sequence[int], start: int) -> ScriptedModel:
    return ScriptedModel(recite(answer, start), VOCAB)


def mixed_engine(
    target: ScriptedModel, draft: ScriptedModel, spec: SpecConfig, clock: Clock
) -> tuple[Engine, MixDrafter]:
    mix = MixDrafter([NgramDrafter(), DraftModelDrafter(draft)], clock)
    drafters = DrafterGroup(target)
    drafters.drafters[drafter_key(spec)] = Watched(mix, VOCAB)
    engine = Engine(target, drafters)
    # The engine's own times are real ones: here it grants all that can be used, and the mix decides by the scripted
    # clock.
    engine.controller.policy.plan = lambda wishes: [
        DraftBudget(0, wish.arms[0].most) if wish.arms else NO_DRAFT for wish in wishes
    ]
    return engine, mix


def authors_by_place(
    prompt: Sequence[int], answer: Sequence[int], spec: SpecConfig = TWO, draft_s: float = 0.1
) -> list[str | None]:
    """Who guessed each token of `answer`, which the target recites; the draft model is always right and takes a tenth
    of a step.
    """
    clock = Clock()
    target = Slow(recite(answer, len(prompt)), VOCAB, clock=clock, seconds=1.0, row_seconds=0.001)
    draft = Slow(recite(answer, len(prompt)), VOCAB, clock=clock, seconds=draft_s)
    engine, _ = mixed_engine(target, draft, spec, clock)
    state = engine.submit(prompt, SamplingParams(max_tokens=len(answer), ignore_eos=True), spec)
    while engine.has_work:
        engine.step()
    assert state.output_ids == list(answer)
    return [origin.drafter for origin in state.origins]


def test_best_takes_the_lookup_where_text_repeats_and_the_model_where_it_is_new() -> None:
    unit = list(range(1, 25))
    novel = [25, 40, 26, 41, 27, 42, 28, 43, 29, 44, 30, 45, 31, 46, 32, 47]
    authors = authors_by_place([*unit, *unit], [*unit, *novel, *unit])
    assert set(authors[4:24]) <= {"ngram", None}, "the lookup costs nothing and is right"
    assert set(authors[28:40]) <= {"draft_model", None}, "nothing to look up"
    assert authors[28:40].count("draft_model") > 6
    assert authors[48:].count("ngram") > 8, "the text repeats again"


@pytest.mark.parametrize(("draft_s", "asked"), [(0.05, True), (3.0, False)])
def test_a_model_that_costs_more_than_it_brings_is_left_alone(draft_s: float, asked: bool) -> None:
    """With the number left to the engine, nothing is drafted rather than at a loss; now and then it is tried again."""
    answer = [(17 * k) % 49 + 1 for k in range(60)]
    spec = SpecConfig("mix", "d", parts=("ngram", "draft_model"))
    share = authors_by_place([49], answer, spec, draft_s).count("draft_model") / len(answer)
    assert share > 0.4 if asked else share < 0.2


def test_a_part_that_is_passed_over_gets_a_turn_now_and_then() -> None:
    """By counts alone: the rounds in which the model is asked are the same every time."""
    unit = list(range(1, 41))
    answer = unit * 12

    def turns() -> list[int]:
        clock = Clock()
        target = Slow(recite(answer, len(unit)), VOCAB, clock=clock, seconds=1.0, row_seconds=0.001)
        engine, mix = mixed_engine(target, says([0] * 600, len(unit)), TWO, clock)
        engine.submit(unit, SamplingParams(max_tokens=len(answer), ignore_eos=True), TWO)
        asked = []
        for step in itertools.count():
            if not engine.has_work:
                return asked
            before = mix.parts[1].model.num_forwards
            engine.step()
            if mix.parts[1].model.num_forwards > before:
                asked.append(step)

    found = turns()
    assert found == turns()
    late = [step for step in found if step > 20]
    assert late, "never tried again"
    assert all(later - earlier >= RETRY_ROUNDS for earlier, later in itertools.pairwise(late))


class Recording(DraftModelDrafter):
    """A draft model that notes when it is asked to draw."""

    asked = 0

    def propose(self, batch: Batch) -> Draft:
        self.asked += 1
        return super().propose(batch)


@pytest.mark.parametrize("spec", [TWO, MERGED], ids=lambda spec: spec.combine)
def test_the_choice_does_not_look_at_what_is_drawn(spec: SpecConfig) -> None:
    """Whatever the seeds, and so the draws, of this round: the same parts are asked for the same number of nodes,
    before any draw.
    """
    prompt = [1, 2, 3, 4, 9, 1, 2, 5, 6, 8, 1, 2]
    flat = ScriptedModel(lambda context: [0.0] * 10, 10)
    shapes, texts = set(), set()
    for seed in range(30):
        model = Recording(flat)
        mix = MixDrafter([NgramDrafter(), model], Clock())
        request = Request(seed, tuple(prompt), SamplingParams(temperature=1.0), spec, seed)
        mix.start(request)
        draft = mix.propose(Batch((BatchEntry(request, len(prompt) - 1, (2,), True, 4),)))
        shapes.add((model.asked, draft.authors(0).count("draft_model"), draft.sampled[:2]))
        texts.add(tuple(draft.tokens.tolist()))
        mix.finish(seed)
    assert len(shapes) == 1
    assert len(texts) > 1 if spec is MERGED else len(texts) == 1


def test_no_model_is_asked_where_a_lookup_goes() -> None:
    model = Recording(says([0] * 99, 0))
    mix = MixDrafter([NgramDrafter(), model], Clock())
    prompt = list(range(1, 12)) * 3
    request = Request(0, tuple(prompt), SamplingParams(), TWO, 0)
    mix.start(request)
    draft = mix.propose(Batch((BatchEntry(request, len(prompt) - 1, (prompt[-1],), True, 4),)))
    assert draft.authors(0) == ["ngram"] * 4
    assert model.asked == 0


# --- accounts and state ---


def specs_of(pair: SimpleNamespace) -> list[SpecConfig]:
    """Mixes of different parts, side by side."""
    draft = str(pair.draft)
    mixed = ("ngram", "suffix", "recycling", "predicted", "draft_model")
    few = SpecConfig("recycling", num_draft=2)
    inner = SpecConfig("cascade", draft, parts=("ngram", "draft_model"))
    return [
        *(SpecConfig("mix", draft, num_draft=n, combine=how) for n in (1, 4, 9) for how in ("best", "merge")),
        SpecConfig("mix", draft, parts=mixed, num_draft=6, combine="merge"),
        SpecConfig("mix", draft, parts=mixed),
        SpecConfig("mix", num_draft=5, combine="merge"),
        SpecConfig("mix", parts=("recycling", inner), num_draft=5, combine="merge"),
        SpecConfig("mix", draft, parts=("ngram", inner, "draft_model"), num_draft=5),
        SpecConfig(
            "mix", draft, parts=("ngram", few, "draft_model"), draft_probability=0.6, num_draft=6, combine="merge"
        ),
        SpecConfig("mix", draft, num_draft=6, combine="merge", rule="block"),
        SpecConfig("mix", draft, num_draft=6, combine="merge", rule="traversal"),
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_guess_is_on_one_account(
    llm: LLM, pair: SimpleNamespace, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accounts of the parts add up, in batches of requests with different parts; all parts' state is checked after
    every round.
    """
    specs = [
        replace(spec, rule="tree") if spec.rule == "auto" and temperature and i % 2 else spec
        for i, spec in enumerate(specs_of(pair))
    ]
    watch_all(llm, specs, monkeypatch)
    prompts = [token_ids(4 + i, seed=i) * 2 for i in range(len(specs))]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=i) for i in range(len(specs))
    ]
    seen: set[str] = set()
    for _ in range(2):
        for out, spec in zip(llm.generate(prompts, params, specs), specs, strict=True):
            stats = out.stats
            assert sum(stats.drafted_by.values()) == stats.num_drafted
            assert (
                sum(stats.accepted_by.values())
                == stats.num_accepted
                == sum(origin.kind == "accepted" for origin in out.provenance)
            )
            assert all(stats.accepted_by[name] <= stats.drafted_by[name] for name in stats.accepted_by)
            assert set(stats.drafted_by) <= {part.drafter for part in spec.configs}
            seen |= set(stats.accepted_by)
    assert {"recycling", "draft_model", "cascade"} <= seen


def watch_all(llm: LLM, specs: Sequence[SpecConfig], monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """New drafters, which have learnt nothing from other tests, one for each kind of `specs`."""
    found = {drafter_key(spec): spec for spec in specs}
    watched = {key: Watched(llm._factory.make(spec), llm.target.vocab_size) for key, spec in found.items()}
    for key, one in watched.items():
        monkeypatch.setitem(llm._drafters.drafters, key, one)
    return list(watched.values())


@pytest.mark.filterwarnings("ignore:the draft has")
@pytest.mark.parametrize("which", ["draft", "target"])
def test_a_model_in_company_keeps_the_cache_of_the_text(
    llm: LLM, pair: SimpleNamespace, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged with lookups that lead elsewhere, its cache follows the path that stood; a model that is the target is
    always right greedily.
    """
    model = str(getattr(pair, which))
    specs = [
        SpecConfig(
            "mix", model, num_draft=2 + i, combine="merge", parts=("ngram", "recycling", "draft_model"), rule="auto"
        )
        for i in range(6)
    ]
    watched = watch_all(llm, specs, monkeypatch)
    elsewhere: list[int] = []

    def audit(_: object) -> None:
        for one in watched:
            for sequence, text in one.texts.items():
                check_cache(one.inner.parts[-1].model, sequence, text)

    commit = watched[0].inner.commit

    def note(batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        drawn = [draft.authors(b).count("draft_model") for b in range(draft.num_requests)]
        elsewhere.extend(node for b, path in enumerate(verdict.paths) for node in path if drawn[b] and node >= drawn[b])
        commit(batch, draft, verdict, feedback)

    monkeypatch.setattr(watched[0].inner, "commit", note)
    prompts = [token_ids(4 + i, seed=i) * 3 for i in range(6)]
    for temperature in (0.0, 0.6):
        params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=i) for i in range(6)]
        outputs = llm.generate(
            prompts, params, [replace(spec, rule="tree") if temperature else spec for spec in specs], on_step=audit
        )
        if temperature == 0 and which == "target":
            assert all(
                out.stats.accepted_by["draft_model"] == out.stats.drafted_by["draft_model"] > 0 for out in outputs
            )
    assert elsewhere or which == "target", "paths that left the model's guesses must be among them"


def test_a_merged_tree_holds_guesses_of_all_and_keeps_the_budget(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SpecConfig("mix", str(pair.draft), num_draft=8, combine="merge", rule="tree")
    prompts = [token_ids(6 + i, seed=i) * 3 for i in range(6)]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.5, seed=i) for i in range(6)]
    (watched,), drafts = watch_all(llm, [spec], monkeypatch), []
    original = watched.inner.propose
    monkeypatch.setattr(watched.inner, "propose", lambda batch: drafts.append(original(batch)) or drafts[-1])
    outputs = llm.generate(prompts, params, spec)
    assert all(out.stats.num_drafted <= 8 * out.stats.num_steps for out in outputs)
    totals = [sum(out.stats.drafted_by.get(name, 0) for out in outputs) for name in ("draft_model", "recycling")]
    assert min(totals) > 0
    assert sum(not draft.is_chain(b) for draft in drafts for b in range(draft.num_requests)) > 5


def test_auto_does_not_look_at_the_shape_of_a_merged_draft(llm: LLM, pair: SimpleNamespace) -> None:
    for combine, rule in (("best", "auto"), ("merge", "tree")):
        spec = SpecConfig("mix", str(pair.draft), combine=combine)
        assert (
            llm.generate([token_ids(6) * 3], SamplingParams(max_tokens=8, temperature=0.9), spec)[0].stats.rule == rule
        )


def test_a_race_keeps_the_model_in_step_with_the_target() -> None:
    """Under the coupled rule a merged draft has no laws at all."""
    mix = MixDrafter([NgramDrafter(), DraftModelDrafter(says([7] * 99, 0))], Clock())
    prompt = [1, 2, 3, 1, 2]
    request = Request(0, tuple(prompt), SamplingParams(temperature=1.0), MERGED, 0)
    mix.start(request)
    draft = mix.propose(Batch((BatchEntry(request, len(prompt) - 1, (2,), True, 4, noise=RaceNoise(0, VOCAB)),)))
    assert draft.mass is None
    assert set(draft.authors(0)) == {"ngram", "draft_model"}


# --- what parts were worth ---


def test_a_lookup_that_promises_too_much_is_believed_less() -> None:
    shared = Promise()
    own = Promise(shared)
    assert own.factor == 1.0
    for _ in range(30):
        own.observe(4.0, 1.0)
    assert own.factor == pytest.approx(0.25, abs=0.05)
    assert shared.factor == 1.0
    for _ in range(30):
        shared.observe(4.0, 1.0)
    assert Promise(shared).factor == shared.factor < 0.3


def test_the_best_offer_counts_rows_and_drafting() -> None:
    prices = Prices(1)
    few, many = Offer(0, 1.0, 2), Offer(1, 1.5, 20)
    assert prices.best([few, many], 1) == many, "while no step is known, tokens count"
    for rows, seconds in ((1, 1.0), (3, 1.02), (21, 2.0)):
        prices.step.observe(rows, seconds)
    assert prices.best([few, many], 1) == few
    assert prices.best([Offer(0, 1.0, 2, draft_s=2.0), Offer(-1, 0.0, 0)], 1) == Offer(-1, 0.0, 0)
    assert prices.tokens_per_s(Offer(-1, 0.0, 0), 1) == pytest.approx(1.0)
