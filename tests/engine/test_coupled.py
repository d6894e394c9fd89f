"""Under the coupled rule a seed fixes the text: whoever drafts, however far, in whatever company and order."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.text.randomness import RaceNoise, race_noise
from tests.helpers.checkpoints import token_ids
from tests.helpers.specs import predicting, spec_of

PROMPTS = [token_ids(2 + 3 * i, seed=70 + i) if i % 3 else token_ids(4 + i, seed=i) * 2 for i in range(12)]
TEMPERATURES = (0.3, 0.7, 1.0, 1.3)


def params_of(temperature: float, i: int, **values: object) -> SamplingParams:
    return SamplingParams(
        max_tokens=24, ignore_eos=True, temperature=temperature, top_p=(1.0, 0.9)[i % 2], seed=300 + i, **values
    )


EXPECTED = PROMPTS[1] + PROMPTS[2]
MIXED = ("ngram", "suffix", "recycling", "predicted", "draft_model")


def specs_of(pair: SimpleNamespace) -> list[SpecConfig]:
    """Every drafter and number of draft tokens, and ways to draft less."""
    draft = str(pair.draft)
    return [
        *(SpecConfig("draft_model", draft, num_draft=n) for n in (1, 2, 3, 5, 8)),
        *(SpecConfig(name, num_draft=n) for name in ("ngram", "suffix", "recycling", "lookahead") for n in (1, 4, 8)),
        SpecConfig("predicted"),
        *(SpecConfig("draft_model", draft, num_draft=4, draft_dtype=kind) for kind in ("int8", "int4")),
        *(SpecConfig("cascade", draft, num_draft=n) for n in (1, 5)),
        SpecConfig(
            "cascade", draft, parts=("recycling", "draft_model", "draft_model"), num_draft=6, min_confidence=0.1
        ),
        *(SpecConfig("mix", draft, num_draft=n) for n in (2, 7)),
        SpecConfig("mix", draft, parts=MIXED),
        SpecConfig("draft_model", draft, num_draft=4, draft_probability=0.5),
        SpecConfig("draft_model", draft, num_draft=6, min_confidence=0.2, draft_top_k=5),
        SpecConfig("draft_model", draft, draft_probability="auto"),
        *(SpecConfig("early_exit", exit_layer=1, num_draft=n) for n in (1, 3, 8)),
        SpecConfig("early_exit", skip_layers=[0], num_draft=3),
        SpecConfig("early_exit", num_draft=4),
        *(
            SpecConfig("draft_model", draft, num_draft=n, tree=tree)
            for tree in ("static", "best_first")
            for n in (3, 9)
        ),
        *(
            spec_of(name, draft, num_draft=n)
            for name in ("eagle", "eagle:1", "eagle/static", "eagle/best_first")
            for n in (2, 7)
        ),
        *(
            spec_of(name, draft, num_draft=n)
            for name in ("medusa", "medusa:hydra/static", "medusa/best_first", "block", "block:cut/best_first")
            for n in (2, 7)
        ),
        *(SpecConfig("auto", draft, num_draft=n, parts=MIXED) for n in ("auto", 3, 9)),
        SpecConfig(
            "draft_model", draft, num_draft=7, tree="best_first", branching=(3, 2, 1), min_confidence=0.1, draft_top_k=8
        ),
    ]


def check_texts(llm: LLM, pair: SimpleNamespace, temperature: float, first_turn: int, stride: int) -> None:
    """Drafters, numbers of draft tokens, batch sizes and orders of arrival against plain decoding one by one; each turn
    begins at another drafter, and neighbours in a batch have neighbouring drafters.
    """
    each = [params_of(temperature, i) for i in range(len(PROMPTS))]
    plain = [llm.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, each, strict=True)]
    specs, accepted = specs_of(pair), 0
    for turn, batch in zip(range(first_turn, len(specs), stride), itertools.cycle((12, 3, 1))):
        order = np.random.default_rng(turn).permutation(len(PROMPTS)).tolist()
        for start in range(0, len(PROMPTS) if batch > 1 else 4, batch):
            chosen = order[start : start + batch]
            own = [specs[(turn + i) % len(specs)] for i in chosen]
            params = [predicting(spec, each[i], EXPECTED) for i, spec in zip(chosen, own, strict=True)]
            outputs = llm.generate([PROMPTS[i] for i in chosen], params, own)
            assert [out.token_ids for out in outputs] == [plain[i] for i in chosen]
            assert all(out.stats.rule == "coupled" for out in outputs)
            accepted += sum(out.stats.num_accepted for out in outputs)
    assert accepted > 100, "drafts must matter for this to prove anything"


def test_arrival_one_by_one(llm: LLM, pair: SimpleNamespace) -> None:
    """Requests that join while others run."""
    specs, each = specs_of(pair), [params_of(TEMPERATURES[i % 4], i) for i in range(len(PROMPTS))]
    plain = [llm.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, each, strict=True)]
    states = {}
    for i in reversed(range(len(PROMPTS))):
        spec = specs[i % len(specs)]
        states[i] = llm.submit(PROMPTS[i], predicting(spec, each[i], EXPECTED), spec)
        llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    assert [tuple(states[i].output_ids) for i in range(len(PROMPTS))] == plain


@pytest.mark.parametrize(
    "values",
    [
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.4, "logit_bias": {5: 3.0}},
        {"bad_words": ([7], [3, 9]), "min_tokens": 6},
        {"top_k": 8, "min_p": 0.02, "n": 3},
    ],
    ids=str,
)
def test_sampling_parameters_follow_the_drafted_tokens(llm: LLM, pair: SimpleNamespace, values: dict) -> None:
    """Whatever depends on earlier tokens sees the drafted ones: the text is the plain text."""
    each = [params_of(1.0, i, **values) for i in range(len(PROMPTS))]
    plain = llm.generate(PROMPTS, each)
    specs = specs_of(pair)
    own = [specs[i % len(specs)] for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, [predicting(*one, EXPECTED) for one in zip(own, each, strict=True)], own)
    assert [[c.token_ids for c in out.choices] for out in outputs] == [
        [c.token_ids for c in out.choices] for out in plain
    ]
    assert sum(out.stats.num_accepted for out in outputs) > 20


def test_a_named_rule_needs_no_seed(llm: LLM, pair: SimpleNamespace) -> None:
    out = llm.generate(
        [PROMPTS[0]], SamplingParams(max_tokens=8, temperature=1.0), SpecConfig("ngram", rule="coupled")
    )[0]
    assert out.stats.rule == "coupled"


def test_noise_is_a_function_of_seed_and_position() -> None:
    """Exponential with mean 1, independent between positions and seeds, the same whenever asked."""
    noise = RaceNoise(11, 50_000)
    rows = noise.at([4, 5, 4]).double().numpy()
    assert (rows[0] == rows[2]).all()
    assert (rows[0] == race_noise(11, 4, 50_000)).all()
    assert abs(rows[:2].mean() - 1) < 0.01
    assert abs(np.corrcoef(rows[0], rows[1])[0, 1]) < 0.02
    assert abs(np.corrcoef(rows[0], race_noise(12, 4, 50_000))[0, 1]) < 0.02
    assert np.isfinite(rows).all()
    assert (rows > 0).all()
    noise.forget(5)
    assert set(noise._rows) == {5}
    assert (noise.at([4])[0].numpy() == rows[0]).all()
