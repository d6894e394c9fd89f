"""The cascade: its tokens have the distribution of the last level, the mass handed over is that distribution, and no
level keeps what was refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.engine import Engine
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.text.randomness import RaceNoise
from foretoken.verify import RULES
from foretoken.verify.base import verdict_at
from tests.helpers.checkpoints import token_ids
from tests.helpers.enumeration import (
    EXACT,
    Case,
    DraftToken,
    RandomTables,
    chained,
    complete,
    emitted_law,
    joint,
    max_error,
)
from tests.helpers.scripted import ScriptedModel, recite
from tests.helpers.watch import Watched, check_cache
from tests.verify.drafters import chain_drafter

VOCAB = 4
PROMPT = (1, 2, 3, 1, 2)  # repeats, so that the lookup drafts
TWO = SpecConfig("cascade", parts=(SpecConfig("draft_model", draft="a"), SpecConfig("draft_model", draft="b")))
ONE = SpecConfig("cascade", "b")


# --- the distribution ---


@pytest.mark.parametrize("rule", ["rejection", "block", "tree"])
@pytest.mark.parametrize("inner", ["model", "point", "coin", "stopped"])
def test_the_mass_to_hand_over_is_the_law_of_the_middle(rule: str, inner: str) -> None:
    """Inner rounds of any drafter under any rule, until two tokens are there; the outer rule is exact with the middle's
    distribution and no other.
    """
    wrong = []
    for seed in range(4):
        target, middle, small = (RandomTables(3, 10 * seed + k) for k in range(3))
        drafters = [chain_drafter(inner, 2, small, seed), chain_drafter(inner, 1, small, seed)]
        made = chained(RULES[rule], drafters, middle, 2)

        def outer(distributions: RandomTables, made: dict = made, target: RandomTables = target) -> float:
            cases = [
                Case((), tuple(DraftToken(token, distributions[text[:k]]) for k, token in enumerate(text)), weight)
                for text, weight in made.items()
            ]
            return max_error(complete(emitted_law(RULES["block"], cases, target), target, 3), joint(target, 3))

        assert outer(middle) < EXACT
        wrong.append(outer(small))
    assert max(wrong) > 0.05, "the distribution of the inner drafter bends the answer"


def tables(seed: int) -> ScriptedModel:
    """A model whose distribution is a table of random logits by the last two tokens."""

    logits = (1.5 * np.random.default_rng(seed).standard_normal((VOCAB, VOCAB, VOCAB))).tolist()
    return ScriptedModel(lambda context: logits[context[-2] if len(context) > 1 else 0][context[-1]], VOCAB)


def entries_of(
    count: int, num_draft: int, spec: SpecConfig, params: SamplingParams, coupled: bool = False
) -> list[BatchEntry]:
    noise = [RaceNoise(seed, VOCAB) if coupled else None for seed in range(count)]
    return [
        BatchEntry(Request(i, PROMPT, params, spec, i), len(PROMPT) - 1, PROMPT[-1:], True, num_draft, noise=noise[i])
        for i in range(count)
    ]


def draft_once(drafter: CascadeDrafter | DraftModelDrafter, entries: list[BatchEntry]) -> Draft:
    for entry in entries:
        drafter.start(entry.request)
    draft = drafter.propose(Batch(tuple(entries)))
    for entry in entries:
        drafter.finish(entry.request.request_id)
    return draft


def law_p_value(drafter: CascadeDrafter, spec: SpecConfig, count: int = 2500) -> float:
    """Chi-square of three drafted tokens against the distribution of the last level."""
    draft = draft_once(drafter, entries_of(count, 3, spec, SamplingParams(temperature=1.0)))
    assert draft.lengths == (3,) * count
    found = draft.tokens.reshape(count, 3)
    counts = (
        torch.bincount(found[:, 0] * VOCAB**2 + found[:, 1] * VOCAB + found[:, 2], minlength=VOCAB**3)
        .numpy()
        .astype(float)
    )
    expected = np.ones(VOCAB**3)
    script = drafter.levels[-1].model.script
    for cell in range(VOCAB**3):
        text = list(PROMPT)
        for token in (cell // VOCAB**2, cell // VOCAB % VOCAB, cell % VOCAB):
            expected[cell] *= torch.tensor(script(tuple(text)), dtype=torch.float64).softmax(-1)[token].item()
            text.append(token)
    rare = expected * count < 5
    expected, counts = (np.append(cells[~rare], cells[rare].sum()) for cells in (expected * count, counts))
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


@pytest.mark.repeated
def test_drafted_tokens_follow_the_last_level() -> None:
    assert law_p_value(CascadeDrafter([tables(2)], NgramDrafter()), ONE) > 1e-4
    assert law_p_value(CascadeDrafter([tables(1), tables(2)]), TWO) > 1e-4
    three = SpecConfig(
        "cascade", parts=(SpecConfig("draft_model", draft="a"), SpecConfig("draft_model", draft="c"), TWO.configs[1])
    )
    models = [tables(1), tables(3), tables(2)]
    assert law_p_value(CascadeDrafter(models), three, 1200) > 1e-4
    assert all(model.num_forwards for model in models), "a level was left out"


def test_a_middle_that_does_not_verify_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All inner draft tokens kept: the tokens then follow the first level, whatever mass is handed over."""
    from foretoken.draft import cascade

    judge = cascade._judge

    def keep_all(chains: Sequence[object], draft: Draft, probs: torch.Tensor) -> Verdict:
        verdict = judge(chains, draft, probs)
        rows = [draft.anchor_row(b) + draft.lengths[b] for b in range(draft.num_requests)]
        return verdict_at(draft, draft.tokens.tolist(), rows, verdict.next_tokens, None) if draft.num_nodes else verdict

    monkeypatch.setattr(cascade, "_judge", keep_all)
    assert law_p_value(CascadeDrafter([tables(1), tables(2)]), TWO) < 1e-8


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("top_k", [0, 2])
def test_the_mass_is_the_law_of_the_last_level(levels: int, top_k: int) -> None:
    """At every row, cut to `draft_top_k`; the row of the last draft token has none."""
    spec = SpecConfig(
        "cascade",
        "b",
        parts=("ngram" if levels == 1 else SpecConfig("draft_model", draft="a"), "draft_model"),
        draft_top_k=top_k,
    )
    drafter = CascadeDrafter([tables(1), tables(2)][-levels:], NgramDrafter() if levels == 1 else None)
    draft = draft_once(drafter, entries_of(40, 4, spec, SamplingParams(temperature=0.7)))
    assert draft.mass is not None
    assert all(draft.sampled)
    for b in range(40):
        for row, path in zip(draft.rows_of([b]), draft.paths(b), strict=True):
            distribution = draft.mass.distribution_of_row[row]
            if len(path) == 4:
                assert distribution == -1
                continue
            expected = (torch.tensor(drafter.levels[-1].model.script(PROMPT + path)) / 0.7).softmax(-1)
            if top_k:
                expected = torch.where(expected >= expected.topk(top_k).values[-1], expected, 0)
            torch.testing.assert_close(draft.mass.distributions[distribution], expected / expected.sum())


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
def test_without_a_draw_the_tokens_are_those_of_the_last_level_alone(coupled: bool, levels: int) -> None:
    """Greedy, and in the race with the noise that the target uses too: whoever drafted below."""
    params = SamplingParams(temperature=1.0 if coupled else 0.0)
    alone = draft_once(DraftModelDrafter(tables(2)), entries_of(60, 5, SpecConfig("draft_model", "b"), params, coupled))
    drafter = CascadeDrafter([tables(1), tables(2)][-levels:], NgramDrafter() if levels == 1 else None)
    draft = draft_once(drafter, entries_of(60, 5, (ONE, TWO)[levels - 1], params, coupled))
    assert draft.tokens.tolist() == alone.tokens.tolist()
    assert draft.mass is None
    assert sum(drafted for drafted, _ in draft.inner) > 0


def test_inner_numbers_are_never_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.draft import cascade

    seen: list[tuple[int, int, int]] = []
    original = cascade.draft_numbers

    def record(purpose: object, entries: Sequence[BatchEntry], indices: Sequence[int]) -> object:
        places = zip(entries, indices, strict=True)
        seen.extend((entry.request.seed, entry.round_start, index) for entry, index in places)
        return original(purpose, entries, indices)

    monkeypatch.setattr(cascade, "draft_numbers", record)
    target = tables(3)
    drafters = DrafterGroup(target)
    drafters.drafters[drafter_key(TWO)] = CascadeDrafter([tables(1), tables(2)])
    engine = Engine(target, drafters)
    for seed in range(4):
        engine.submit(
            PROMPT,
            SamplingParams(max_tokens=25, temperature=1.0, seed=seed),
            SpecConfig("cascade", parts=TWO.parts, num_draft=4, rule="block"),
        )
    while engine.has_work:
        engine.step()
    assert len(seen) > 300
    assert len(set(seen)) == len(seen)


# --- cost and limits ---


def test_good_drafts_below_save_forwards_above() -> None:
    """The last level recites what the prompt holds: the lookup drafts it, and a draft of six tokens takes two
    forwards.
    """
    text = list(range(1, 12))
    model = ScriptedModel(recite(text[2:], len(text) + 2), 20)
    entry = BatchEntry(Request(0, (*text, 1, 2), SamplingParams(), ONE, 0), len(text) + 1, (2,), True, 6)
    draft = draft_once(CascadeDrafter([model], NgramDrafter()), [entry])
    assert draft.tokens.tolist() == text[2:8]
    assert model.num_forwards <= 2
    assert draft.inner[0][1] >= 4


def test_stats_show_what_the_levels_did(llm: LLM, pair: SimpleNamespace) -> None:
    prompts = [token_ids(6, seed=i) * 3 for i in range(4)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for out in llm.generate(prompts, params, SpecConfig("cascade", str(pair.draft), num_draft=4)):
        assert 0 <= out.stats.num_inner_accepted <= out.stats.num_inner_drafted
        assert out.stats.drafted_by == {"cascade": out.stats.num_drafted}
        assert out.stats.accepted_by.get("cascade", 0) == out.stats.num_accepted
        assert out.stats.as_dict()["num_inner_drafted"] == out.stats.num_inner_drafted > 0
        assert {origin.drafter for origin in out.provenance} <= {"cascade", None}
    (out,) = llm.generate(prompts[:1], params, SpecConfig("ngram", num_draft=4))
    assert out.stats.num_inner_drafted == 0


def test_a_part_hands_over_at_most_its_own_number() -> None:
    model = tables(2)
    few = SpecConfig(
        "cascade", parts=(SpecConfig("ngram", num_draft=1), SpecConfig("draft_model", draft="b", num_draft=3))
    )
    entries = entries_of(1, 8, few, SamplingParams())
    draft = draft_once(CascadeDrafter([model], NgramDrafter()), entries)
    assert draft.lengths == (3,)
    assert draft.inner[0][0] <= 2  # one before the first token, one before the second, none before the last


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_level_that_is_unsure_stops_before_the_draw(temperature: float) -> None:
    """Where, its distribution alone decides: the tokens before are the same, and the place after the last draft token
    leaves no mass.
    """
    params = SamplingParams(temperature=temperature)
    drafter = CascadeDrafter([tables(2)], NgramDrafter())
    whole = draft_once(drafter, entries_of(50, 5, ONE, params))
    sure = draft_once(drafter, entries_of(50, 5, SpecConfig("cascade", "b", min_confidence=0.6), params))
    assert 0 < sure.num_nodes < whole.num_nodes
    for b in range(50):
        own, full = sure.paths(b)[-1], whole.paths(b)[-1]
        assert own == full[: len(own)]
        confidence = [
            torch.tensor(drafter.levels[-1].model.script(PROMPT + full[:k])).softmax(-1).max().item() for k in range(5)
        ]
        assert len(own) == next((k for k in range(5) if confidence[k] < 0.6), 5)
        assert sure.mass is None or sure.mass.distribution_of_row[sure.rows_of([b])[-1]] == -1


@pytest.mark.parametrize("slots", [4, 40, 80])
def test_a_level_without_room_drafts_less_and_changes_nothing(llm: LLM, pair: SimpleNamespace, slots: int) -> None:
    prompts, params = [token_ids(3 + i, seed=i) * 2 for i in range(8)], SamplingParams(max_tokens=20, ignore_eos=True)
    plain = [out.token_ids for out in llm.generate(prompts, params)]
    target = PagedModel(load_decoder(pair.target), 4096, 4)
    drafters = DrafterGroup(target)
    levels = [PagedModel(load_decoder(pair.draft), 4096, 4), PagedModel(load_decoder(pair.draft), slots, 4)]
    drafters.drafters[drafter_key(TWO)] = Watched(CascadeDrafter(levels), llm.target.vocab_size)
    engine = Engine(target, drafters)
    states = [engine.submit(prompt, params, SpecConfig("cascade", parts=TWO.parts, num_draft=5)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    assert [tuple(state.output_ids) for state in states] == plain


# --- state ---


@pytest.mark.filterwarnings("ignore:the draft has")
def test_caches_of_all_levels_hold_the_text(llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled requests side by side, also with a last level that is the target itself: then every draft
    token stands.
    """
    for top, always in ((pair.draft, False), (pair.target, True)):
        spec = SpecConfig(
            "cascade",
            parts=(
                "recycling",
                SpecConfig("draft_model", draft=str(pair.draft)),
                SpecConfig("draft_model", draft=str(top)),
            ),
        )
        llm.prepare(spec)
        watched = Watched(llm._drafters.drafters[drafter_key(spec)], llm.target.vocab_size)
        monkeypatch.setitem(llm._drafters.drafters, drafter_key(spec), watched)

        def audit(_: object, watched: Watched = watched) -> None:
            for sequence, text in watched.texts.items():
                for level in watched.inner.levels:
                    check_cache(level.model, sequence, text)

        prompts = [token_ids(4 + i, seed=i) * 2 for i in range(6)]
        params = [
            SamplingParams(max_tokens=17 + i, ignore_eos=True, temperature=(0.0, 1.0)[i % 2], seed=i) for i in range(6)
        ]
        specs = [SpecConfig("cascade", parts=spec.parts, num_draft=1 + i) for i in range(6)]
        outputs = llm.generate(prompts, params, specs, on_step=audit)
        assert all(out.stats.num_drafted for out in outputs)
        assert sum(out.stats.num_inner_accepted for out in outputs) > 0
        if always:
            assert [out.stats.acceptance_rate for out in outputs] == [1.0] * 6


def test_a_long_prompt_reaches_every_level_in_pieces(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.draft.own_cache._PIECE_TOKENS", 7)
    spec, params = SpecConfig("cascade", str(pair.draft), num_draft=3), SamplingParams(max_tokens=20, ignore_eos=True)
    for length in (49, 50):
        prompt = token_ids(length, seed=9)
        assert llm.generate([prompt], params, spec)[0].token_ids == llm.generate([prompt], params)[0].token_ids
