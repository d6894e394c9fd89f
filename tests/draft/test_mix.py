"""The mix: what is merged, that it never depends on what is drawn, which drafter a draft token is counted for, and what
every part knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Feedback, variants_of
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import drafter_key
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.text.randomness import RaceNoise
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import ScriptedModel, recite
from tests.helpers.watch import Watched, check_cache

VOCAB = 50
MIXED = SpecConfig("mix", "d", parts=("ngram", "draft_model"), num_draft=4)


def says(answer: Sequence[int], start: int) -> ScriptedModel:
    return ScriptedModel(recite(answer, start), VOCAB)


class Recording(DraftModelDrafter):
    """A draft model that notes when it is asked to draw."""

    asked = 0

    def propose(self, batch: Batch) -> Draft:
        self.asked += 1
        return super().propose(batch)


@pytest.mark.parametrize("takes_trees", [True, False])
@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 9, 1, 2, 5, 6, 8, 1, 2], [1, 3, 5, 7, 2]], ids=["found", "nothing"])
def test_the_choice_does_not_depend_on_what_is_drawn(prompt: list[int], takes_trees: bool) -> None:
    """Whatever the seeds, and so the draws, of this round: the same parts draft the same number of nodes, which is
    settled before any draw.
    """
    flat = ScriptedModel(lambda context: [0.0] * 10, 10)
    shapes, texts = set(), set()
    for seed in range(30):
        model = Recording(flat)
        mix = MixDrafter([NgramDrafter(), model])
        request = Request(seed, tuple(prompt), SamplingParams(temperature=1.0), MIXED, seed)
        mix.start(request)
        draft = mix.propose(Batch((BatchEntry(request, len(prompt) - 1, (2,), True, 4, takes_trees=takes_trees),)))
        shapes.add((model.asked, draft.provenance_of(0).count("draft_model"), draft.sampled[:2]))
        texts.add(tuple(draft.tokens.tolist()))
        assert takes_trees or draft.is_chain(0)
        mix.finish(seed)
    assert len(shapes) == 1
    assert len(texts) > 1, "something is drawn"


def proposed(prompt: Sequence[int], takes_trees: bool, num_draft: int = 4) -> tuple[Draft, Recording]:
    """A greedy draft after `prompt` of a lookup and a model that says 0 again and again."""
    model = Recording(says([0] * 99, 0))
    mix = MixDrafter([NgramDrafter(), model])
    request = Request(0, tuple(prompt), SamplingParams(), MIXED, 0)
    mix.start(request)
    entry = BatchEntry(request, len(prompt) - 1, (prompt[-1],), True, num_draft, takes_trees=takes_trees)
    return mix.propose(Batch((entry,))), model


def test_a_rule_for_chains_gets_the_likelier_chain() -> None:
    """A long match is likelier than the model's constant chances, nothing found is not."""
    draft, model = proposed(list(range(1, 12)) * 3, takes_trees=False)
    assert (draft.provenance_of(0), model.asked) == (["ngram"] * 4, 0)
    draft, model = proposed([1, 3, 5, 7, 2], takes_trees=False)
    assert (draft.provenance_of(0), model.asked) == (["draft_model"] * 4, 1)


def test_a_tree_holds_what_is_likeliest() -> None:
    """The model's first places are ranked with the lookup's draft tokens; a sure lookup leaves it fewer of them."""
    sure, _ = proposed(list(range(1, 12)) * 3, takes_trees=True)
    found, _ = proposed([1, 2, 3, 4, 9, 1, 2, 5, 6, 8, 1, 2], takes_trees=True)
    alone, _ = proposed([1, 3, 5, 7, 2], takes_trees=True)
    drawn = [draft.provenance_of(0).count("draft_model") for draft in (sure, found, alone)]
    assert drawn[0] < drawn[1] < drawn[2] == 4
    assert all(draft.lengths == (4,) for draft in (sure, found, alone))


def test_only_one_part_may_be_without_a_draft_to_show() -> None:
    with pytest.raises(ConfigError, match=r"all parts of a mix but one must show their drafts; use drafter='auto'"):
        MixDrafter([DraftModelDrafter(says([0], 0)), NgramDrafter(), DraftModelDrafter(says([0], 0))])


def test_variants_are_those_of_the_model_part() -> None:
    mix = MixDrafter([NgramDrafter(), DraftModelDrafter(says([0], 0))])
    assert variants_of(mix, MIXED) == (MIXED,)
    found = variants_of(mix, replace(MIXED, draft_probability="auto", parts=("ngram", "draft_model")))
    assert [spec.draft_probability for spec in found] == [0.25, 0.5, 0.75, 1.0]
    assert [spec.configs[1].draft_probability for spec in found] == [0.25, 0.5, 0.75, 1.0]


# --- provenance and state ---


def specs_of(pair: SimpleNamespace) -> list[SpecConfig]:
    """Mixes of different parts, side by side."""
    draft = str(pair.draft)
    mixed = ("ngram", "suffix", "recycling", "predicted", "draft_model")
    few = SpecConfig("recycling", num_draft=2)
    inner = SpecConfig("cascade", draft, parts=("ngram", "draft_model"))
    return [
        *(SpecConfig("mix", draft, num_draft=n) for n in (1, 4, 9)),
        SpecConfig("mix", draft, parts=mixed, num_draft=6),
        SpecConfig("mix", draft, parts=mixed),
        SpecConfig("mix", num_draft=5),
        SpecConfig("mix", parts=("recycling", inner), num_draft=5),
        SpecConfig("mix", parts=("ngram", inner), num_draft=5, rule="block"),
        SpecConfig("mix", draft, parts=("ngram", few, "draft_model"), draft_probability=0.6, num_draft=6),
        SpecConfig("mix", draft, num_draft=6, rule="block"),
        SpecConfig("mix", draft, num_draft=6, rule="traversal"),
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_draft_token_is_counted_for_one_part(
    llm: LLM, pair: SimpleNamespace, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of the parts add up, in batches of requests with different parts; all parts' state is checked after
    every round.
    """
    specs = [
        replace(spec, rule="tree") if spec.rule == "auto" and temperature and i % 2 else spec
        for i, spec in enumerate(specs_of(pair))
    ]
    watch_all(llm, specs, monkeypatch)
    prompts = [token_ids(4 + i, seed=i) * 2 for i in range(len(specs))]
    params = [
        SamplingParams(
            max_tokens=14,
            ignore_eos=True,
            temperature=temperature,
            seed=i,
            prediction=token_ids(12, seed=3) if "predicted" in spec.leaves else None,
        )
        for i, spec in enumerate(specs)
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
    watched = {key: Watched(llm._loader.factory.make(spec), llm.target.vocab_size) for key, spec in found.items()}
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
        SpecConfig("mix", model, num_draft=2 + i, parts=("ngram", "recycling", "draft_model"), rule="auto")
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
        drawn = [draft.provenance_of(b).count("draft_model") for b in range(draft.num_requests)]
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
    assert elsewhere or which == "target", "paths that left the model's draft tokens must be among them"


def test_a_merged_tree_holds_draft_tokens_of_all_and_keeps_the_budget(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SpecConfig("mix", str(pair.draft), num_draft=8, rule="tree")
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


def test_auto_does_not_depend_on_the_shape_of_a_merged_draft(llm: LLM, pair: SimpleNamespace) -> None:
    """Which may tell what was drawn; where nothing is drawn, the shape decides."""
    params = SamplingParams(max_tokens=8, temperature=0.9)
    for spec, rule in ((SpecConfig("mix", str(pair.draft)), "tree"), (SpecConfig("mix"), "auto")):
        assert llm.generate([token_ids(6) * 3], params, spec)[0].stats.rule == rule


def test_a_race_keeps_the_model_in_step_with_the_target() -> None:
    """Under the coupled rule a merged draft has no distributions at all."""
    mix = MixDrafter([NgramDrafter(), DraftModelDrafter(says([7] * 99, 0))])
    prompt = [1, 2, 3, 1, 2]
    request = Request(0, tuple(prompt), SamplingParams(temperature=1.0), MIXED, 0)
    mix.start(request)
    draft = mix.propose(Batch((BatchEntry(request, len(prompt) - 1, (2,), True, 4, noise=RaceNoise(0, VOCAB)),)))
    assert draft.mass is None
    assert set(draft.provenance_of(0)) == {"ngram", "draft_model"}
