"""Drafters that ask the same draft model hold its weights once, each with a cache of its own."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.draft.group import drafter_key
from foretoken.draft.own_cache import OwnCache
from foretoken.model.footprint import shape_of
from foretoken.model.hf import TransformersModel
from foretoken.model.paged import PagedModel
from foretoken.plan.memory import Load, account
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import tiny_checkpoint, token_ids

PROMPTS = [token_ids(5 + 4 * i, seed=i) * 2 for i in range(6)]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
pytestmark = pytest.mark.filterwarnings("ignore:the draft has")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shared")
    tiny_checkpoint(folder / "target", "llama", 0, num_hidden_layers=2)
    tiny_checkpoint(folder / "draft", "llama", 1, num_hidden_layers=1)
    tiny_checkpoint(folder / "opt", "opt", 2)
    return {name: folder / name for name in ("target", "draft", "opt")}


def specs(draft: Path) -> list[SpecConfig]:
    """Four ways to ask one draft model; the third through a link in the path."""
    name, other = str(draft), str(draft.parent / "." / ".." / draft.parent.name / draft.name)
    return [
        SpecConfig("draft_model", name, num_draft=3),
        SpecConfig("mix", name, num_draft=3, parts=("ngram", "draft_model")),
        SpecConfig("cascade", other, num_draft=3),
        SpecConfig("cascade", num_draft=3, parts=(SpecConfig("draft_model", name), SpecConfig("draft_model", name))),
    ]


def models(drafter: object) -> list[object]:
    """The models of a drafter and of its parts."""
    found = [getattr(drafter, "_cache", None), *(level.cache for level in getattr(drafter, "levels", ()))]
    own = [cache.model for cache in found if isinstance(cache, OwnCache)]
    return own + [model for part in getattr(drafter, "parts", ()) for model in models(part)]


def models_of(llm: LLM, asked: list[SpecConfig]) -> list[object]:
    for spec in asked:
        llm.prepare(spec)
    return [model for spec in asked for model in models(llm._drafters.drafters[drafter_key(spec)])]


def weights(model: object) -> list[int]:
    """Where every parameter lies; packed ones are the module that holds them."""
    if isinstance(model, TransformersModel):
        return [parameter.data_ptr() for parameter in model._model.parameters()]
    assert isinstance(model, PagedModel)
    return [id(model.decoder), *(parameter.data_ptr() for parameter in model.decoder.parameters())]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["draft", "opt"])
def test_one_set_of_weights_and_a_cache_for_each(folders: dict[str, Path], name: str, dtype: str) -> None:
    with LLM(folders["target"], dtype=dtype, cache_tokens=1024) as llm:
        found = models_of(llm, specs(folders[name]))
        assert len(found) == 5
        assert all(weights(model) == weights(found[0]) for model in found)
        assert len(set(map(id, found))) == 5
        assert all(model.capacity_tokens == found[0].capacity_tokens for model in found)
        if name == "draft":
            assert len({model.pool.keys[0].data_ptr() for model in found}) == 5
            shape = shape_of(folders[name], name, dtype)
            planned = account(shape_of(folders["target"], "t", dtype), shape, Load(1, 32, 3)).draft_weight_bytes
            tables = found[0].decoder.rotaries[0].cos.nbytes + found[0].decoder.rotaries[0].sin.nbytes
            assert len({id(model.decoder) for model in found}) * (found[0].weight_bytes + tables) == planned


@pytest.mark.parametrize("name", ["draft", "opt"])
def test_answers_are_those_of_plain_decoding(folders: dict[str, Path], name: str) -> None:
    """All drafters at once over the same weights: none writes where another reads."""
    with LLM(folders["target"], dtype="float32", cache_tokens=4096) as llm:
        plain = [out.token_ids for out in llm.generate(PROMPTS, GREEDY)]
        drafted = llm.generate(PROMPTS, GREEDY, [specs(folders[name])[i % 4] for i in range(len(PROMPTS))])
        assert [out.token_ids for out in drafted] == plain
        assert sum(out.stats.num_drafted for out in drafted) > 20
        check_idle(llm)


def test_drafts_are_what_they_are_alone(folders: dict[str, Path]) -> None:
    """Drafts, and so how many tokens are accepted, do not depend on who else uses the weights."""
    asked = [specs(folders["draft"])[0], specs(folders["draft"])[3]]
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)

    def counts(together: list[SpecConfig]) -> dict[str | None, list[tuple[int, int]]]:
        with LLM(folders["target"], dtype="float32", cache_tokens=4096) as llm:
            found = {spec.drafter: llm.generate(PROMPTS, params, spec) for spec in together}
        return {name: [(out.stats.num_drafted, out.stats.num_accepted) for out in outs] for name, outs in found.items()}

    assert counts(asked) == counts(asked[:1]) | counts(asked[1:])


def test_other_formats_are_other_weights(folders: dict[str, Path]) -> None:
    """`auto` is the format that the target's options say, so naming that one gives the same weights."""
    draft = str(folders["draft"])
    asked = [SpecConfig("draft_model", draft, draft_dtype=dtype) for dtype in ("auto", "float32", "float16", "int8")]
    with LLM(folders["target"], cache_tokens=512) as llm:
        found = [weights(model) for model in models_of(llm, asked)]
        assert found[0] == found[1]
        assert len({tuple(one) for one in found}) == 3


def test_weights_go_with_their_last_user(folders: dict[str, Path]) -> None:
    """Whoever loaded them: they stay while any drafter has them, and no longer."""
    first, second = specs(folders["draft"])[:2]
    with LLM(folders["target"], cache_tokens=512) as llm:
        (one,) = models_of(llm, [first])
        held, place = weakref.ref(one.decoder), weights(one)
        llm.prepare(second)
        del one, llm._drafters.drafters[drafter_key(first)]
        gc.collect()
        assert [weights(model) for model in models_of(llm, [first, second])] == [place] * 2
        for spec in (first, second):
            del llm._drafters.drafters[drafter_key(spec)]
        gc.collect()
        assert held() is None
        assert len(models_of(llm, [first])) == 1
