"""A draft model's own cache beside the target's: whole after rejections, too small, and read in pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import QUANTISED
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup
from foretoken.engine.engine import Engine
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.draft.test_contract import LONG, PROMPTS, Outputs, llm, pair, plain, watch
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import ScriptedModel, recite
from tests.helpers.specs import key_of
from tests.helpers.watch import Watched, check_cache

__all__ = ["llm", "pair", "plain"]  # fixtures

TREES_OF_A_MODEL = ("chain", "static", "best_first")


@pytest.mark.filterwarnings("ignore:the draft has")
@pytest.mark.parametrize("tree", TREES_OF_A_MODEL)
def test_a_draft_that_is_the_target_is_always_right(
    llm: LLM, pair: SimpleNamespace, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An off-by-one in the draft's cache leaves the text right and lowers the acceptance: here it must be 100 %, in a
    tree that of one path from the root to a leaf.

    After every step the caches of target and draft are compared with a fresh run over the text.
    """
    spec = SpecConfig("draft_model", str(pair.target), num_draft=3)
    watched = watch(llm, spec, monkeypatch)
    assert isinstance(watched.inner, DraftModelDrafter)

    def audit(_: object) -> None:
        for sequence, text in watched.texts.items():
            own = llm.engine.states[sequence].tokens
            assert own[: len(text)] == text  # told so far; `Watched` asserts that nothing is missing when it drafts
            assert llm.target.length(sequence) in (len(own) - 1, 0)  # I1; 0 while it waits
            check_cache(llm.target, sequence, own)
            check_cache(watched.inner.model, sequence, own)

    params = [
        SamplingParams(max_tokens=17 + i, ignore_eos=True, temperature=(0.0, 1.0)[i % 2], seed=i) for i in range(6)
    ]
    rules = ("auto", "coupled", "tree", "tree", "auto", "traversal")  # a seed makes auto coupled
    specs = [SpecConfig("draft_model", str(pair.target), num_draft=1 + i, tree=tree, rule=rules[i]) for i in range(6)]
    outputs = llm.generate(PROMPTS[:6], params, specs, on_step=audit)
    if tree == "chain":
        assert [out.stats.acceptance_rate for out in outputs] == [1.0] * 6
        assert watched.num_full_rounds > 20
    assert watched.num_walks_to_a_leaf == watched.num_walks > 20
    assert all(origin.kind != "residual" for out in outputs for origin in out.provenance)


# The caches know neither the rule nor how weights are stored: each kind of weights and each rule meets each shape.
@pytest.mark.parametrize(
    ("dtype", "tree", "rule"),
    [
        *(("auto", tree, rule) for tree in TREES_OF_A_MODEL for rule in ("auto", "tree", "traversal")),
        *((dtype, tree, "auto") for dtype in QUANTISED for tree in TREES_OF_A_MODEL),
    ],
)
def test_caches_hold_the_text_after_rejections_too(
    llm: LLM, pair: SimpleNamespace, dtype: str, tree: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SpecConfig(
        "draft_model", str(pair.draft), num_draft=4 if tree == "chain" else 9, draft_dtype=dtype, tree=tree, rule=rule
    )
    watched = watch(llm, spec, monkeypatch)

    def audit(_: object) -> None:
        for sequence, text in watched.texts.items():
            check_cache(llm.target, sequence, text)
            check_cache(watched.inner.model, sequence, text)

    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=(0.0, 0.7)[i % 2], seed=i) for i in range(6)]
    outputs = llm.generate(PROMPTS[:6], params, spec, on_step=audit)
    assert (watched.num_trees > 20) == (tree != "chain")
    assert any(0 < out.stats.acceptance_rate < 1 for out in outputs)


def engine_of(pair: SimpleNamespace, draft_slots: int) -> Engine:
    target, draft = (
        PagedModel(load_decoder(folder), slots, 4) for folder, slots in ((pair.target, 4096), (pair.draft, draft_slots))
    )
    drafters = DrafterGroup(target)
    drafters.drafters[key_of("draft_model", "d")] = Watched(DraftModelDrafter(draft), target.vocab_size)
    return Engine(target, drafters)


@pytest.mark.parametrize("draft_slots", [4, 40, 80])
def test_a_draft_without_room_drafts_less_and_changes_nothing(
    pair: SimpleNamespace, plain: Outputs, draft_slots: int
) -> None:
    engine = engine_of(pair, draft_slots)
    states = [engine.submit(PROMPTS[i], LONG, SpecConfig("draft_model", "d", num_draft=5)) for i in range(8)]
    while engine.has_work:
        engine.step()
    assert [tuple(state.output_ids) for state in states] == plain[:8]


@pytest.mark.filterwarnings("ignore:the draft has")
def test_a_long_prompt_reaches_the_draft_in_pieces(
    llm: LLM, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.draft.own_cache._PIECE_TOKENS", 7)
    prompt = token_ids(50, seed=9)
    expected = llm.generate([prompt], LONG)[0].token_ids
    for length in (49, 50):  # 7 times 7, and one more
        spec = SpecConfig("draft_model", str(pair.target), num_draft=2)
        with pytest.MonkeyPatch.context() as patch:
            watched = watch(llm, spec, patch)
            out = llm.generate([prompt[:length]], LONG, spec)[0]
            assert out.stats.acceptance_rate == 1.0
            assert not watched.texts
    assert out.token_ids == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_the_draft_model_does_not_reach_the_answer(temperature: float) -> None:
    """The draft overflows now and then; the target's own answer stands."""
    answer = [token % 7 + 1 for token in range(30)]

    def broken(context: tuple[int, ...]) -> list[float]:
        return (
            [float("nan")] * 9
            if len(context) % 3 == 0
            else [8.0 * (token == context[-1] % 7 + 1) for token in range(9)]
        )

    sharp = recite(answer)
    target = ScriptedModel(lambda context: [60.0 * (token == sharp(context)) for token in range(9)], 9)
    drafters = DrafterGroup(target)
    drafters.drafters[key_of("draft_model", "d")] = DraftModelDrafter(ScriptedModel(broken, 9))
    engine = Engine(target, drafters)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    states = [engine.submit([3], params, SpecConfig("draft_model", "d", num_draft=n)) for n in (1, 2, 4)]
    while engine.has_work:
        engine.step()
    assert [state.output_ids for state in states] == [answer] * 3
