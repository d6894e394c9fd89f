"""Requests that give their cache back and are read again: nobody can tell from an answer, and no block is lost."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup
from foretoken.draft.mix import MixDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.model.hf import TransformersModel
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.text.tokenizer import load_tokenizer
from tests.helpers.audit import check_idle, open_sequences
from tests.helpers.checkpoints import token_ids
from tests.helpers.specs import bare_drafter, key_of, predicting, spec_of
from tests.helpers.usual import some_of
from tests.helpers.watch import Watched

BLOCK = 4
DRAFTERS = (
    "draft_model",
    "draft_model/static",
    "ngram",
    "suffix",
    "recycling",
    "predicted",
    "early_exit",
    "lookahead",
    "cascade",
    "mix",
)
PROMPTS = [token_ids(2 + 3 * i, seed=i) if i % 2 else token_ids(1 + i, seed=i) * 2 for i in range(12)]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
Asked = tuple[list[int], SamplingParams, SpecConfig]


class Bench:
    """An engine with every drafter, each draft model with a cache of its own; all caches are checked after every
    step.
    """

    def __init__(
        self, pair: SimpleNamespace, num_slots: int, draft_slots: int = 4096, limits: SchedulerConfig | None = None
    ) -> None:
        self.pair, self.target = pair, PagedModel(load_decoder(pair.target), num_slots, BLOCK)
        self.drafts: list[PagedModel] = []
        group = DrafterGroup(self.target)
        for name in DRAFTERS:
            key = key_of(name, str(pair.draft))
            if key not in group.drafters:
                draft = self.target
                if name != "early_exit":
                    draft = PagedModel(load_decoder(pair.draft), draft_slots, BLOCK)
                    self.drafts.append(draft)
                group.drafters[key] = Watched(bare_drafter(name, draft, self.target.vocab_size), self.target.vocab_size)
        self.engine = Engine(self.target, group, load_tokenizer(pair.target), limits)

    def step(self) -> None:
        self.engine.step()
        for model in (self.target, *self.drafts):
            model.check()
        scheduler = self.engine.scheduler
        assert open_sequences(self.target) == list(scheduler.running)
        assert {s.request_id for s in scheduler.waiting} | set(scheduler.running) == set(self.engine.states)
        assert scheduler.waiting == sorted(scheduler.waiting, key=scheduler.key)

    def run(self, asked: Iterable[Asked]) -> list[RequestState]:
        states = [self.engine.submit(prompt, predicting(spec, params), spec) for prompt, params, spec in asked]
        while self.engine.has_work:
            self.step()
        check_idle(self.engine)
        for state in states:
            assert state.error is None
            assert state.stats.num_emitted == len(state.output_ids) == len(state.provenance)
            assert {origin.step for origin in state.provenance} == set(range(state.stats.num_steps))
            assert state.stats.num_accepted == sum(origin.kind == "accepted" for origin in state.provenance)
        assert self.engine.stats.num_preempted == sum(watched.stats.num_preempted for watched in states) + self.before
        self.before = self.engine.stats.num_preempted
        return states

    before = 0


@pytest.fixture(scope="module")
def roomy(pair: SimpleNamespace) -> Bench:
    return Bench(pair, 8192)


def alone(bench: Bench, asked: Sequence[Asked]) -> list[RequestState]:
    return [bench.run([one])[0] for one in asked]


def spec(name: str, pair: SimpleNamespace, **options: Any) -> SpecConfig:
    return spec_of(name, str(pair.draft), **options)


@pytest.mark.parametrize(
    ("num_slots", "draft_slots", "chunk", "rule"),
    some_of(
        [(56, 4096, 512, "coupled"), (64, 64, 7, "greedy"), (96, 40, 16, "coupled")],
        {(64, 64, 7, "greedy"), (96, 40, 16, "coupled")},
    ),
)
def test_every_drafter_in_one_batch(
    pair: SimpleNamespace, roomy: Bench, num_slots: int, draft_slots: int, chunk: int, rule: str
) -> None:
    """Caches of the target and of the drafts too small for a third of the requests: every token is that of plain
    decoding alone.
    """
    bench = Bench(pair, num_slots, draft_slots, SchedulerConfig(8, chunk, cache_reserve=0.0))
    params = [replace(GREEDY, temperature=0.8, seed=i) if rule == "coupled" else GREEDY for i in range(24)]
    prompts = [PROMPTS[i % 12] for i in range(24)]
    specs = [spec(DRAFTERS[i % 10], pair, num_draft=(4, "auto", 7)[i % 3]) for i in range(24)]
    expected = alone(roomy, [(p, one, SpecConfig()) for p, one in zip(prompts, params, strict=True)])
    states = bench.run(zip(prompts, params, specs, strict=True))
    assert [state.output_ids for state in states] == [state.output_ids for state in expected]
    assert bench.engine.stats.num_preempted > 10
    assert bench.engine.stats.num_recomputed_tokens > 50
    resumed_and_drafted = [s for s in states if s.stats.num_preempted and s.stats.num_accepted]
    assert len({s.request.spec.drafter for s in resumed_and_drafted}) > 2


@pytest.mark.parametrize("rule", some_of(["rejection", "block", "tree"], {"block", "tree"}))
def test_a_seed_draws_the_same_in_any_company(pair: SimpleNamespace, rule: str) -> None:
    """Under rules where the draft length matters, results are those of the request alone in this cache.

    Compared are tokens, provenance and counts.
    """
    names = ("draft_model", "draft_model/static", "ngram", "predicted", "early_exit", "lookahead")
    params = [replace(GREEDY, temperature=0.7, seed=i) for i in range(12)]
    asked = [(PROMPTS[i], params[i], spec(names[i % 6], pair, num_draft=2 + i % 4, rule=rule)) for i in range(12)]
    bench = Bench(pair, 60, limits=SchedulerConfig(8, 16, cache_reserve=0.0))
    expected = alone(bench, asked)
    assert not bench.engine.stats.num_preempted
    states = bench.run(asked)
    assert bench.engine.stats.num_preempted > 5
    for state, other in zip(states, expected, strict=True):
        assert state.output_ids == other.output_ids
        assert [(o.drafter, o.kind, o.step) for o in state.provenance] == [
            (o.drafter, o.kind, o.step) for o in other.provenance
        ]
        assert (state.stats.num_drafted, state.stats.num_probed, state.stats.num_steps) == (
            *(other.stats.num_drafted, other.stats.num_probed, other.stats.num_steps),
        )


def test_log_probabilities_are_told_once(pair: SimpleNamespace, roomy: Bench) -> None:
    """Of output tokens and of prompts, also of those that are preempted half read."""
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    asked = [
        (PROMPTS[i % 12], replace(params, max_tokens=6 + 2 * (i % 8)), spec("draft_model", pair, num_draft=3))
        for i in range(16)
    ]
    expected = alone(roomy, asked)
    bench = Bench(pair, 56, limits=SchedulerConfig(8, 5, cache_reserve=0.0))
    half_read, preempt = [], bench.engine.scheduler.preempt

    def watched(state: RequestState) -> None:
        half_read.append(not state.provenance and len(state.prompt_logprobs) > 1)
        preempt(state)

    bench.engine.scheduler.preempt = watched  # type: ignore[method-assign]
    states = bench.run(asked)
    assert any(half_read)
    assert not all(half_read)
    for state, other in zip(states, expected, strict=True):
        assert state.output_ids == other.output_ids
        assert len(state.prompt_logprobs) == len(state.request.prompt_ids)
        assert state.prompt_logprobs[0] is None
        for mine, right in zip(
            [*state.prompt_logprobs[1:], *state.logprobs], [*other.prompt_logprobs[1:], *other.logprobs], strict=True
        ):
            assert mine is not None
            assert right is not None
            assert (mine.token_id, mine.rank) == (right.token_id, right.rank)
            assert mine.logprob == pytest.approx(right.logprob, abs=1e-4)


def test_text_stops_and_structures_go_on(text_pair: SimpleNamespace) -> None:
    """Stop strings across the gap, penalties, bans, minimum lengths and a grammar keep their state."""
    bench, roomy = Bench(text_pair, 64, limits=SchedulerConfig(8, 9, cache_reserve=0.0)), Bench(text_pair, 4096)
    prompts = [token_ids(3 + 2 * i, 250, seed=i) for i in range(12)]
    plain = alone(roomy, [(prompt, GREEDY, SpecConfig()) for prompt in prompts])
    options: list[dict[str, Any]] = []
    for i, state in enumerate(plain):
        text = state.text.text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        options.append(
            [
                {"stop": stop or ()},
                {"presence_penalty": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
                {"regex": "[a-z ]{10,30}", "ignore_eos": False},
                {
                    "bad_words": [state.output_ids[2:4]],
                    "min_tokens": 8,
                    "temperature": 0.9,
                    "seed": i,
                    "logit_bias": {7: 2.0},
                },
            ][i % 4]
        )
    names = ("draft_model", "ngram", "suffix", "recycling", "cascade")
    asked = [(prompts[i], replace(GREEDY, **options[i]), spec(names[i % 5], text_pair, num_draft=3)) for i in range(12)]
    expected = alone(roomy, [(prompt, params, SpecConfig()) for prompt, params, _ in asked])
    states = bench.run(asked)
    assert {i % 4 for i, state in enumerate(states) if state.stats.num_preempted} == {0, 1, 2, 3}
    for state, other in zip(states, expected, strict=True):
        assert (state.output_ids, state.text.text, state.finish_reason) == (
            other.output_ids,
            other.text.text,
            other.finish_reason,
        )
    assert {state.finish_reason for state in states} == {"stop", "length"}


def models_of(drafter: object) -> list[PagedModel]:
    """The models whose cache a drafter holds."""
    if isinstance(drafter, DraftModelDrafter):
        return [drafter.model]  # type: ignore[list-item]
    if isinstance(drafter, CascadeDrafter):
        return [level.model for level in drafter.levels]  # type: ignore[misc]
    return [model for part in drafter.parts for model in models_of(part)] if isinstance(drafter, MixDrafter) else []


@pytest.mark.parametrize("name", some_of(["draft_model", "draft_model/static", "cascade", "mix"], {"cascade", "mix"}))
def test_a_drafts_cache_is_given_back_too(pair: SimpleNamespace, name: str) -> None:
    """While a request waits its draft holds nothing of it; then it goes on drafting."""
    bench = Bench(pair, 60, limits=SchedulerConfig(8, cache_reserve=0.0))
    states = [
        bench.engine.submit(PROMPTS[i], predicting(own, GREEDY), own)
        for i, own in enumerate([spec(name, pair, num_draft=3)] * 6)
    ]
    watched = bench.engine.drafters.drafters[key_of(name, str(pair.draft))]
    models, waited = models_of(watched.inner), set()  # type: ignore[attr-defined]
    assert models
    while bench.engine.has_work:
        bench.step()
        for state in bench.engine.scheduler.waiting:
            if state.provenance:
                assert [model.length(state.request_id) for model in models] == [0] * len(models)
                assert [model.tables[state.request_id].blocks for model in models] == [[]] * len(models)
                waited.add((state.request_id, state.stats.num_accepted))
    assert waited
    assert any(states[number].stats.num_accepted > accepted for number, accepted in waited)
    check_idle(bench.engine)


@pytest.mark.parametrize("name", some_of(["draft_model", "draft_model/static", "cascade", "mix"], {"cascade", "mix"}))
def test_a_full_draft_cache_means_fewer_draft_tokens(pair: SimpleNamespace, roomy: Bench, name: str) -> None:
    """With room for one or two requests in the draft's cache the others are answered without; nothing is taken from
    anybody.
    """
    bench = Bench(pair, 4096, 48)
    asked = [(prompt, GREEDY, spec(name, pair, num_draft=4)) for prompt in PROMPTS[:8]]
    states = bench.run(asked)
    expected = alone(roomy, [(prompt, GREEDY, SpecConfig()) for prompt in PROMPTS[:8]])
    assert [state.output_ids for state in states] == [state.output_ids for state in expected]
    assert states[0].stats.num_drafted > 0


def test_what_was_computed_is_adopted_again(pair: SimpleNamespace) -> None:
    """A preempted request begins with its own blocks, those of its answer too, as far as nobody needed them."""
    bench = Bench(pair, 128, limits=SchedulerConfig(8, cache_reserve=0.0))
    state = bench.engine.submit(token_ids(60, seed=4), replace(GREEDY, max_tokens=20), SpecConfig())
    while len(state.tokens) < 71:
        bench.step()
    bench.engine.scheduler.preempt(state)
    assert bench.target.num_free_tokens() == 128
    bench.step()
    assert bench.engine.stats.num_recomputed_tokens == 70 - 68  # 17 whole blocks of 4
    assert len(state.tokens) == 71  # two tokens are read, then the last one decodes
    while bench.engine.has_work:
        bench.step()
    assert state.stats.num_preempted == 1


def test_room_that_came_to_nothing_is_used_first(pair: SimpleNamespace) -> None:
    """Blocks that a request keeps for rejected draft tokens are taken back before anybody gives way."""
    bench = Bench(pair, 60, limits=SchedulerConfig(8, cache_reserve=0.0))
    drafting, plain = spec("recycling", pair, num_draft=8), SpecConfig()
    asked = [(token_ids(4, seed=1), replace(GREEDY, max_tokens=40), drafting), (token_ids(4, seed=2), GREEDY, plain)]
    assert [state.stats.num_preempted for state in bench.run(asked)] == [0, 0]


def test_a_transformers_target(pair: SimpleNamespace, roomy: Bench) -> None:
    """A model without blocks and without shared beginnings: everything is read again."""
    target = TransformersModel(pair.target, "float32", "cpu", 70)
    drafters = DrafterGroup(target)
    for name in ("draft_model", "ngram"):
        drafters.drafters[key_of(name, str(pair.draft))] = bare_drafter(
            name, TransformersModel(pair.draft, "float32", "cpu", 200), target.vocab_size
        )
    engine = Engine(target, drafters, limits=SchedulerConfig(4, 9, cache_reserve=0.0))
    asked = [(PROMPTS[i], GREEDY, spec(("draft_model", "ngram")[i % 2], pair, num_draft=3)) for i in range(6)]
    states = [engine.submit(*one) for one in asked]
    while engine.has_work:
        engine.step()
    check_idle(engine)
    expected = alone(roomy, [(prompt, GREEDY, SpecConfig()) for prompt, _, _ in asked])
    assert [state.output_ids for state in states] == [state.output_ids for state in expected]
    assert engine.stats.num_recomputed_tokens > 10 * engine.stats.num_preempted > 0


def test_the_most_urgent_is_never_preempted(pair: SimpleNamespace) -> None:
    forever_s = 1e9  # or the first seven and the last might come in two periods, which is worth as much as the priority
    bench = Bench(pair, 56, limits=SchedulerConfig(8, cache_reserve=0.0, aging_s=forever_s))
    states = bench.run([(PROMPTS[i], replace(GREEDY, priority=-(i == 7)), SpecConfig()) for i in range(8)])
    assert states[7].stats.num_preempted == 0
    assert sum(state.stats.num_preempted for state in states) > 2


@pytest.mark.parametrize("seed", some_of(range(4), {3}))
def test_random_arrivals_aborts_and_priorities(pair: SimpleNamespace, roomy: Bench, seed: int) -> None:
    """Requests of all drafters come and go, urgent and patient, some after others' prompts; who stays gets the answer
    of who is alone.
    """
    rng = random.Random(seed)
    limits = SchedulerConfig(
        rng.choice((2, 5, 8)),
        rng.choice((4, 32)),
        max_step_tokens=rng.choice((None, 14, 40)),
        cache_reserve=rng.choice((0.0, 0.2)),
        aging_s=0.01,
    )
    bench = Bench(pair, rng.choice((60, 80, 120)), rng.choice((48, 96, 1024)), limits)
    served: list[RequestState] = []
    for _ in range(40):
        for _ in range(rng.choice((0, 0, 1, 3))):
            params = replace(
                GREEDY,
                max_tokens=rng.randint(1, 20),
                priority=rng.randint(-2, 2),
                deadline_s=rng.choice((None, 0.01, 5.0)),
            )
            if rng.random() < 0.5:
                params = replace(params, temperature=1.0, seed=rng.randrange(1000))
            drafter = rng.choice((None, *DRAFTERS))
            drafting = SpecConfig() if drafter is None else spec(drafter, pair, num_draft=rng.choice((1, 5, "auto")))
            params = replace(predicting(drafting, params), tenant=rng.choice(("", "b")))
            served.append(bench.engine.submit(rng.choice(PROMPTS)[: rng.randint(1, 30)], params, drafting))
        if bench.engine.states and rng.random() < 0.15:
            bench.engine.abort(rng.choice(list(bench.engine.states)))
        bench.step()
    while bench.engine.has_work:
        bench.step()
    check_idle(bench.engine)
    for state in served:
        if state.finish_reason == "abort":
            continue
        if state.finish_reason == "length":
            params = replace(state.request.params, prediction=None)
            plain = roomy.run([(list(state.request.prompt_ids), params, SpecConfig())])[0]
            assert state.output_ids == plain.output_ids
        else:
            pytest.fail(f"{state.finish_reason}: {state.error}")


@pytest.mark.parametrize("moment", ["waiting", "reading", "decoding", "preempted"])
def test_abort_at_any_moment(pair: SimpleNamespace, moment: str) -> None:
    """Target and drafts hold nothing of it any more, and the others get their answers."""
    bench = Bench(pair, 64, limits=SchedulerConfig(6, 5, cache_reserve=0.0))
    states = [
        bench.engine.submit(PROMPTS[i], predicting(own, GREEDY), own)
        for i, own in enumerate(spec(name, pair, num_draft=3) for name in DRAFTERS[:10])
    ]
    scheduler = bench.engine.scheduler
    found = {
        "waiting": lambda s: s in scheduler.waiting and not s.stats.num_preempted,
        "reading": lambda s: (
            s.request_id in scheduler.running and 0 < bench.target.length(s.request_id) < len(s.request.prompt_ids)
        ),
        "decoding": lambda s: s.request_id in scheduler.running and len(s.output_ids) > 3,
        "preempted": lambda s: s in scheduler.waiting and s.stats.num_preempted > 0,
    }[moment]
    while not (victims := [state for state in states if found(state)]):
        bench.step()
    bench.engine.abort(victims[0].request_id)
    for model in bench.drafts:
        assert victims[0].request_id not in model.tables
    while bench.engine.has_work:
        bench.step()
    check_idle(bench.engine)
    assert [state.finish_reason for state in states].count("abort") == 1
    assert all(len(state.output_ids) == 20 for state in states if state is not victims[0])


@pytest.mark.parametrize(
    "options",
    [{"drafter": "auto"}, {"drafter": "draft_model", "num_draft": 3, "draft_vocabulary": "intersection"}],
    ids=str,
)
def test_requests_of_a_whole_engine(text_pair: SimpleNamespace, options: dict[str, Any]) -> None:
    """Who follows a text with several drafters, or with one that has another vocabulary, goes on as well."""
    drafting = SpecConfig(draft=str(text_pair.draft), **options)
    prompts, params = [token_ids(20 + i, 250, seed=i) for i in range(6)], replace(GREEDY, max_tokens=60)
    with LLM(text_pair.target, dtype="float32", cache_tokens=192, cache_reserve=0.0) as llm:
        expected = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        outputs = llm.generate(prompts, params, drafting)
        assert [out.token_ids for out in outputs] == expected
        assert sum(out.stats.num_preempted for out in outputs) == llm.stats.num_preempted > 2
        assert any(out.stats.num_preempted and out.stats.num_drafted for out in outputs)
        check_idle(llm)
