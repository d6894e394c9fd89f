"""`draft_dtype`: a draft in another format than its checkpoint, also the target's own copy, and the distribution it
hands over.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import QUANTISED
from foretoken.core import Batch, Draft
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import drafter_key
from foretoken.errors import ConfigError, InputError
from foretoken.model.interface import Segment
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.gguf_files import write_gguf

SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, ignore_eos=True, seed=5)


def drafter_of(llm: LLM, spec: SpecConfig) -> DraftModelDrafter:
    llm.prepare(spec)
    drafter = llm._drafters.drafters[drafter_key(spec)]
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


def spec_of(draft: Path, dtype: str, rule: str = "block") -> SpecConfig:
    return SpecConfig("draft_model", str(draft), num_draft=3, rule=rule, draft_dtype=dtype)


def law_after(folder: Path, ids: list[int], quant: str | None) -> Tensor:
    """Distribution of the token that follows `ids`, from one pass of a model of its own over all of them.

    The drafter's kernels, which give a row's bits however its text is cut: elsewhere rounding would turn codes of
    activations, and with them more than the difference to the full model.
    """
    model = PagedModel(load_decoder(folder, dtype="float32", quant=quant), 64)
    model.open(0)
    logits = model.forward(torch.tensor(ids), [Segment(0, len(ids))]).logits
    return (logits / SAMPLED.temperature).softmax(-1)[0]


@pytest.mark.filterwarnings("ignore:.*drafting costs as much:UserWarning")
def test_a_draft_follows_the_bits_of_its_target(pair: SimpleNamespace, tmp_path: Path) -> None:
    """As a head does. One that is named another format takes that; one whose file holds codes keeps them."""
    coded = write_gguf(tmp_path / "draft.gguf", pair.draft, "Q8_0")
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512, weights="int4") as llm:

        def held(draft: Path, dtype: str) -> str:
            (model,) = drafter_of(llm, spec_of(draft, dtype)).models()
            assert isinstance(model, PagedModel)
            return model.weight_format

        assert [held(pair.draft, dtype) for dtype in ("auto", "int8", "float32")] == ["int4", "int8", "auto"]
        assert held(coded, "auto") == "int8"
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
        assert held(pair.draft, "auto") == "auto"


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_mass_is_the_law_of_the_low_bit_model(
    pair: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the full model, which differs."""
    llm = LLM(pair.target, SpecConfig(), cache_tokens=1024, cache_dtype="model")
    drafter, rounds, prompt = drafter_of(llm, spec_of(pair.draft, kind)), [], token_ids(9)
    propose = drafter.propose

    def record(batch: Batch) -> Draft:
        draft = propose(batch)
        rounds.append((batch.decoding[0].round_start, draft))
        return draft

    monkeypatch.setattr(drafter, "propose", record)
    out = llm.generate([prompt], SAMPLED, spec_of(pair.draft, kind))[0]
    for start, draft in rounds:
        text = [*out.prompt_ids, *out.token_ids][:start]
        assert all(draft.sampled)
        for place in range(draft.num_nodes):
            given = draft.mass.distributions[draft.mass.distribution_of_row[place]]
            before = [*text, *draft.tokens[:place].tolist()]
            torch.testing.assert_close(given, law_after(pair.draft, before, kind), atol=1e-5, rtol=0)
            assert (given - law_after(pair.draft, before, None)).abs().max() > 1e-4
    assert sum(draft.num_nodes for _, draft in rounds) > 10  # the test means something


def test_one_drafter_per_draft_and_format(llm: LLM, pair: SimpleNamespace) -> None:
    """Side by side in one batch each request is judged by the distributions of its own draft."""
    specs = [spec_of(pair.draft, dtype) for dtype in ("auto", *QUANTISED, "float16")]
    models = [drafter_of(llm, spec).model for spec in specs]
    assert len({id(model) for model in models}) == 4
    assert [model.num_parameters for model in models] == [models[0].num_parameters] * 4
    sizes = [model.weight_bytes for model in models]
    assert sizes[0] > sizes[3] > sizes[1] > sizes[2]
    assert [model.dtype for model in models if isinstance(model, PagedModel)] == [torch.float32] + [torch.float16] * 3
    prompts = [token_ids(4 + i, seed=i) for i in range(8)]
    asked = [specs[i % 4] for i in range(8)]
    alone = [llm.generate([prompt], SAMPLED, spec)[0].token_ids for prompt, spec in zip(prompts, asked, strict=True)]
    assert [out.token_ids for out in llm.generate(prompts, SAMPLED, asked)] == alone


def test_the_targets_own_copy_in_fewer_bits_drafts_well_and_is_not_warned_about(
    llm: LLM, pair: SimpleNamespace
) -> None:
    """What counts is what a step reads, not the number of parameters."""
    prompt, params = token_ids(12), SamplingParams(max_tokens=40, ignore_eos=True)
    expected = llm.generate([prompt], params)[0].token_ids
    for kind, least in (("int8", 0.8), ("int4", 0.3)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = llm.generate([prompt], params, spec_of(pair.target, kind, "auto"))[0]
        assert out.token_ids == expected
        assert out.stats.acceptance_rate > least
    with pytest.warns(UserWarning, match="drafting costs as much as decoding"):
        llm.generate([prompt], params, spec_of(pair.target, "float32", "auto"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"drafter": "draft_model", "draft_dtype": "int2"},
            "draft_dtype='int2': choose one of auto, bfloat16, float16, float32, int8, int4",
        ),
        ({"drafter": "draft_model", "draft_dtype": 4}, "draft_dtype=4: choose one of auto"),
        (
            {"drafter": "ngram", "draft_dtype": "int8"},
            "only drafter='draft_model', 'eagle', 'medusa', 'block' or 'mtp' takes it, not drafter='ngram'",
        ),
        (
            {"draft_dtype": "int8"},
            "draft_dtype='int8': only drafter='draft_model', 'eagle', 'medusa', 'block' or 'mtp' takes it",
        ),
    ],
    ids=str,
)
def test_bad_formats(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpecConfig(**values)


def test_drafts_that_cannot_have_the_format(llm: LLM, pair: SimpleNamespace, tmp_path: Path) -> None:
    """Refused by name when the draft is loaded; the engine goes on."""
    other = tiny_checkpoint(tmp_path / "other", "gpt_neox")
    with pytest.raises(ConfigError, match="runs through transformers, which has no quantised weights here"):
        llm.generate([[1]], spec=spec_of(other, "int4"))
    with LLM(pair.target, dtype="float64", cache_tokens=256) as wide:
        with pytest.raises(InputError, match="does not go with dtype='float64'"):
            wide.generate([[1]], spec=spec_of(pair.draft, "int8"))
        assert (
            len(
                wide.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True), spec_of(pair.draft, "float32"))[
                    0
                ].token_ids
            )
            == 2
        )
    assert len(llm.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
