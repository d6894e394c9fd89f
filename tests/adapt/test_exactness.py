"""Answers do not depend on what drafters learn: weights that change between every two steps, also for nonsense."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.adapt import adapter as adapter_module
from foretoken.adapt.adaptation import HeadLearner, Weights
from foretoken.adapt.adapter import Adapter
from foretoken.adapt.buffer import Window
from foretoken.control.adaptation import AdaptConfig
from foretoken.core import Draft
from foretoken.draft.base import AdaptableDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.engine.engine import Engine
from foretoken.engine.observers import AdaptationWatcher
from foretoken.engine.request import RequestState
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.heads.base import Head
from foretoken.heads.weights import replace_weights, weights_of
from foretoken.model.interface import SharesWeights
from foretoken.model.paged import PagedModel
from tests.adapt.small_heads import KINDS, drafter_name, drafter_of, small_head
from tests.helpers import faults
from tests.helpers.checkpoints import token_ids
from tests.helpers.distribution import (
    ALARM,
    EOS,
    LENGTH,
    PROMPT,
    exact_law,
    narrow_models,
    p_values,
)
from tests.helpers.tiny_heads import tiny_head

PROMPTS = [token_ids(5 + 6 * i, seed=i) for i in range(5)]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
RULES = ("block", "tree", "rejection", "coupled", "traversal")
REST_S = 0.1  # between answers: the learner's thread has the lowest priority, and other tests run beside this one


class Nonsense:
    """Other random weights after every step: an observer that does what an adapter does."""

    def __init__(self, drafter: AdaptableDrafter) -> None:
        self.drafter, self.num_changes = drafter, 0

    def begin(self, state: RequestState) -> None:
        pass

    def end(self, state: RequestState) -> None:
        pass

    def close(self) -> None:
        pass

    def between_steps(self) -> None:
        self.num_changes += 1
        fixed = tuple(self.drafter.fixed_weights)
        weights = {
            name: 0.5 * torch.randn_like(own)
            for name, own in weights_of(self.drafter.head).items()
            if not (fixed and name.startswith(fixed))
        }
        replace_weights(self.drafter.head, weights)
        self.drafter.drop_computed()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return narrow_models(tmp_path_factory.mktemp("narrow"))


@pytest.mark.repeated
@pytest.mark.parametrize("kind", ["block", "eagle"])  # those that keep what the weights computed
def test_samples_follow_the_distribution_while_weights_change_between_every_two_steps(
    narrow: SimpleNamespace, kind: str
) -> None:
    target = PagedModel(narrow.target.requires_grad_(False), 4096, 16)
    drafter = drafter_of(small_head(kind, narrow.target.config), target)
    group = DrafterGroup(target)
    group.drafters[drafter_key(SpecConfig(kind))] = drafter
    engine = Engine(target, group, limits=SchedulerConfig(64, 200), eos_token_ids=(EOS,))
    engine.watchers.append(watcher := Nonsense(drafter))
    states = []
    for seed in range(500):  # sees a total variation of 0.22 (tests/engine/test_law_broken.py: power)
        rule = RULES[seed % 5]
        tree = "best_first" if rule in ("tree", "traversal") else "chain"
        spec = SpecConfig(kind, num_draft=1 + seed % 4, rule=rule, tree=tree)
        params = SamplingParams(max_tokens=LENGTH + 3, temperature=1.0, ignore_eos=True, seed=seed)
        states.append(engine.submit(PROMPT, params, spec))
    while engine.has_work:
        engine.step()
    assert watcher.num_changes > 30
    assert engine.stats.num_accepted > 200
    assert not engine.stats.num_faults
    answers = np.array([state.output_ids[:LENGTH] for state in states])
    distribution = exact_law(narrow, SamplingParams(temperature=1.0))
    assert min(p_values(answers, distribution)) > ALARM


def with_head(llm: LLM, kind: str, seed: int = 0) -> tuple[SpecConfig, AdaptableDrafter]:
    """An `LLM` that drafts with a random head."""
    spec = SpecConfig(drafter_name(kind), num_draft=3)
    drafter = drafter_of(small_head(kind, llm.target.config, seed), llm.target)
    llm.engine.drafters.add(drafter_key(spec), drafter)
    return spec, drafter


@pytest.fixture(scope="module")
def plain(pair: SimpleNamespace) -> list[list[int]]:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048) as llm:
        return [list(out.token_ids) for out in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_the_target_s_while_weights_change(
    pair: SimpleNamespace, plain: list[list[int]], kind: str
) -> None:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048) as llm:
        spec, drafter = with_head(llm, kind)
        llm.engine.watchers.append(watcher := Nonsense(drafter))
        outs = llm.generate(PROMPTS, GREEDY, spec)
        assert [list(out.token_ids) for out in outs] == plain
        assert watcher.num_changes >= 6
        assert not llm.stats.num_faults


class CheckedDrafts:
    """Compares every draft with that of a drafter that began with the weights in use and read the text anew."""

    def __init__(self, drafter: AdaptableDrafter, target: SharesWeights) -> None:
        self.drafter, self.target, self.num_compared, self.read = drafter, target, 0, []
        self.inner_read, self.inner_propose = drafter.read_hidden, drafter.propose
        drafter.read_hidden, drafter.propose = self.read_hidden, self.propose  # type: ignore[method-assign]

    def read_hidden(self, rows: Sequence[object]) -> None:
        self.read += rows
        self.inner_read(rows)

    def propose(self, batch: object) -> Draft:
        draft = self.inner_propose(batch)
        twin = drafter_of(self.drafter.head, self.target)
        for request in {entry.request.request_id: entry.request for entry in batch.decoding}.values():
            twin.start(request)
            twin.read_hidden([rows for rows in self.read if rows.request_id == request.request_id])
        fresh = twin.propose(batch)
        assert draft.tokens.tolist() == fresh.tokens.tolist()
        self.num_compared += len(draft.tokens)
        return draft


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_old_weights_computed_is_left(pair: SimpleNamespace, kind: str) -> None:
    """Fails where keys and values outlive the weights, or features are computed by weights that change."""
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048) as llm:
        spec, drafter = with_head(llm, kind)
        checked = CheckedDrafts(drafter, llm.target)
        llm.engine.watchers.append(Nonsense(drafter))
        llm.generate(PROMPTS[:2], GREEDY, spec)
        assert checked.num_compared > 60


class NonsenseLearner:
    """Offers random weights, and lies about how good they are."""

    def __init__(self, head: Head, target: SharesWeights, fixed: Sequence[str]) -> None:
        self.learner, self.count = HeadLearner(head, target, fixed), 0

    def learn(self, window: Window) -> None:
        pass

    def score(self, weights: Weights, window: Window) -> float:
        return float(next(iter(weights.values())).flatten()[0]) + window.number % 2 * 1e-6

    def weights(self) -> Weights:
        self.count += 1
        found = {name: torch.randn_like(own) for name, own in self.learner.weights().items()}
        next(iter(found.values())).flatten()[0] = self.count
        return found

    def restart(self, weights: Weights) -> None:
        raise AssertionError("it is never worse")


def adapted(llm: LLM) -> Adapter:
    config = AdaptConfig(share=1.0, buffer_tokens=4096, swap_interval_s=0.0)
    adapter = Adapter(llm.target, llm.engine.drafters.drafters, config)
    llm.engine.drafters.hidden_states.listener = adapter
    llm.engine.watchers.append(AdaptationWatcher(adapter))
    return adapter


def served_until(llm: LLM, spec: SpecConfig, plain: list[list[int]], condition: object, limit_s: float = 120.0) -> None:
    began = time.monotonic()
    while not condition():  # type: ignore[operator]
        outs = llm.generate(PROMPTS, GREEDY, spec)
        assert [list(out.token_ids) for out in outs] == plain
        assert time.monotonic() - began < limit_s
        time.sleep(REST_S)


@pytest.mark.parametrize("kind", ["medusa", "block"])
def test_a_learner_that_offers_nonsense_changes_no_answer(
    pair: SimpleNamespace, plain: list[list[int]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048) as llm:
        spec, _ = with_head(llm, kind)
        monkeypatch.setattr(adapter_module, "HeadLearner", NonsenseLearner)
        adapter = adapted(llm)
        served_until(llm, spec, plain, lambda: adapter.states and adapter.states[0].num_swaps >= 3)
        assert adapter.states[0].version >= 2
        assert not llm.stats.num_faults
        llm.engine.watchers[-1].close()


class BrokenLearner(NonsenseLearner):
    """Raises when it is to learn."""

    def learn(self, window: Window) -> None:
        raise RuntimeError("no gradient")


def test_a_learner_that_raises_ends_learning_and_nothing_else(
    pair: SimpleNamespace, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048) as llm:
        spec, _ = with_head(llm, "medusa")
        monkeypatch.setattr(adapter_module, "HeadLearner", BrokenLearner)
        adapter = adapted(llm)
        faults.expect("a learner that raises")
        with pytest.warns(UserWarning, match="AdaptationWatcher raised RuntimeError: no gradient"):
            served_until(llm, spec, plain, lambda: llm.stats.num_faults > 0)
        served_until(llm, spec, plain, iter([False, True]).__next__)
        assert not any(isinstance(watcher, AdaptationWatcher) for watcher in llm.engine.watchers)
        assert adapter.states[0].num_kept_tokens == 0, "texts are forgotten"
        assert llm.stats.num_faults == 1


def test_learning_is_off_unless_it_is_asked_for(pair: SimpleNamespace, plain: list[list[int]]) -> None:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048) as llm:
        spec, drafter = with_head(llm, "medusa")
        before = weights_of(drafter.head)
        llm.generate(PROMPTS, GREEDY, spec)
        assert llm.adaptations == ()
        assert llm.engine.drafters.hidden_states.listener is None
        assert all(torch.equal(own, before[name]) for name, own in weights_of(drafter.head).items())


def test_an_engine_that_is_dropped_without_closing_is_freed_while_it_learns(
    pair: SimpleNamespace, tmp_path: Path
) -> None:
    """The learner's thread keeps neither the target nor itself alive."""
    head = tiny_head(tmp_path / "head", pair.target, "medusa")
    spec, before = SpecConfig("medusa", head=str(head), num_draft=3), set(threading.enumerate())
    llm = LLM(pair.target, spec, dtype="float32", cache_tokens=2048, adapt=True)
    llm.generate(PROMPTS, GREEDY)
    (learner,) = (one for one in set(threading.enumerate()) - before if one.name == "foretoken-adapt")
    target = weakref.ref(llm.target)
    del llm
    gc.collect()
    learner.join(60)
    gc.collect()
    assert not learner.is_alive()
    assert target() is None


def test_a_head_learns_while_it_serves(pair: SimpleNamespace) -> None:
    """Sampled, so that every learnt bit shows; under the coupled rule answers are the same with any draft."""
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(5)]
    config = AdaptConfig(share=1.0, buffer_tokens=4096, swap_interval_s=0.0)
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048, adapt=config) as llm:
        spec, drafter = with_head(llm, "medusa")
        before, began = weights_of(drafter.head), time.monotonic()
        first = [out.token_ids for out in llm.generate(PROMPTS, params, spec)]
        while llm.adaptations[0].version < 1:
            assert [out.token_ids for out in llm.generate(PROMPTS, params, spec)] == first
            assert time.monotonic() - began < 120
            time.sleep(REST_S)
        state = llm.adaptations[0]
        assert state.drafter == "medusa"
        assert state.num_swaps >= 1
        assert state.num_learnt_tokens > 0
        assert not all(torch.equal(own, before[name]) for name, own in weights_of(drafter.head).items())
    assert llm.adaptations == ()
