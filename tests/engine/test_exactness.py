"""Speculative answers are the plain answers: token for token when greedy, in distribution when sampled, whoever the
neighbours are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import QUANTISED
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.errors import ConfigError
from tests.helpers.checkpoints import token_ids
from tests.helpers.specs import predicting
from tests.helpers.usual import some_of

NUM_TOKENS = 32
PROMPTS = [token_ids(2 + 3 * i, seed=50 + i) if i % 3 else token_ids(4 + i, seed=i) * 2 for i in range(16)]
LONG = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
Answers = list[tuple[int, ...]]


def all_specs(draft: Path) -> list[SpecConfig]:
    """Every drafter with every number of draft tokens, and plain; those that ask no model draft trees."""
    return [
        SpecConfig(),
        *(SpecConfig("draft_model", str(draft), num_draft=n) for n in range(9)),
        *(
            SpecConfig("draft_model", str(draft), num_draft=n, draft_dtype=kind)
            for kind in QUANTISED
            for n in (1, 3, 6)
        ),
        *(SpecConfig("ngram", num_draft=n) for n in range(9)),
        *(SpecConfig(name, num_draft=n) for name in ("suffix", "recycling", "lookahead") for n in (1, 2, 4, 7, 12)),
        SpecConfig("lookahead", num_draft=6, lookahead_window=7, lookahead_ngram=5),
        *(SpecConfig("predicted", num_draft=n) for n in (1, 3, 8)),
        *(SpecConfig("early_exit", exit_layer=1, num_draft=n) for n in (1, 2, 4, 7)),
        SpecConfig("early_exit", skip_layers=[0], num_draft=3),
        *(SpecConfig("cascade", str(draft), num_draft=n) for n in (1, 4, 9)),
        *(SpecConfig("mix", str(draft), num_draft=n) for n in (1, 5, 10)),
        SpecConfig("mix", str(draft)),
        *(SpecConfig("auto", str(draft), num_draft=n) for n in (1, 6, "auto")),
        SpecConfig(
            "auto",
            str(draft),
            parts=("ngram", "early_exit", SpecConfig("draft_model", str(draft), tree="best_first")),
            exit_layer=1,
        ),
        SpecConfig("ngram"),
        SpecConfig("draft_model", str(draft)),
        SpecConfig("early_exit"),
        *(
            SpecConfig("draft_model", str(draft), num_draft=n, tree=tree)
            for tree in ("static", "best_first")
            for n in (1, 4, 11)
        ),
    ]


@pytest.fixture(scope="module")
def reference(pair: SimpleNamespace) -> Answers:
    """transformers' own greedy answers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
        answers.append(tuple(out[0, len(prompt) :].tolist()))
    return answers


@pytest.mark.parametrize(
    ("batch", "stride"), some_of([(1, 8), (4, 16), (16, 16)], [(4, 16)])
)  # every pairing: proof/test_exactness.py
def test_greedy_equals_transformers(
    llm: LLM, pair: SimpleNamespace, reference: Answers, batch: int, stride: int
) -> None:
    """Every drafter and number of draft tokens meets prompts of every length, side by side in one batch."""
    specs = all_specs(pair.draft)
    for turn in range(0, len(specs), stride):
        for start in range(0, 16 if batch > 1 else 3, batch):
            chosen = range(start, start + batch)
            own = [specs[(turn + i) % len(specs)] for i in chosen]
            params = [replace(predicting(spec, LONG, PROMPTS[4] * 2), slice="code") for spec in own]
            outputs = llm.generate([PROMPTS[i] for i in chosen], params, own)
            assert [out.token_ids for out in outputs] == [reference[i] for i in chosen]


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "tree", "traversal"])
def test_every_lossless_rule_is_greedy_at_temperature_0(
    llm: LLM, pair: SimpleNamespace, reference: Answers, rule: str
) -> None:
    """The target's distribution is a point there, and so are those of the drafts."""
    specs = [SpecConfig("draft_model", str(pair.draft), num_draft=3, rule=rule), SpecConfig("ngram", rule=rule)]
    outputs = llm.generate(PROMPTS[:8], LONG, [specs[i % 2] for i in range(8)])
    assert [out.token_ids for out in outputs] == reference[:8]
    assert {out.stats.rule for out in outputs} == {rule}


def test_the_rule_that_auto_takes(llm: LLM, pair: SimpleNamespace) -> None:
    """Greedy at temperature 0, coupled with a seed, tree for trees whose shape may depend on draws, else settled by the
    shape of the draft: block for sampled chains.
    """
    params = [
        SamplingParams(max_tokens=6, temperature=t, seed=seed, ignore_eos=True)
        for t, seed in ((0.0, None), (0.0, 3), (1.0, 3), (1.0, None))
    ]
    outputs = llm.generate([PROMPTS[0]] * 4, params, SpecConfig("draft_model", str(pair.draft), num_draft=3))
    assert [out.stats.rule for out in outputs] == ["greedy", "greedy", "coupled", "auto"]
    trees = llm.generate(
        [PROMPTS[0]] * 4, params, SpecConfig("draft_model", str(pair.draft), num_draft=3, tree="best_first")
    )
    assert [out.stats.rule for out in trees] == ["greedy", "greedy", "coupled", "tree"]
    assert not any(out.stats.lossy for out in outputs)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "tree", "traversal"])
@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_a_seed_repeats_under_every_rule(llm: LLM, pair: SimpleNamespace, rule: str, drafter: str) -> None:
    """Alone and in a batch of other rules, on chains the sampled rules agree in pairs."""
    draft = str(pair.draft) if drafter == "draft_model" else None
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.9, seed=4)
    spec = SpecConfig(drafter, draft, num_draft=3, rule=rule)
    one = llm.generate([PROMPTS[0]], params, spec)[0]
    rules = ["block", "typical", rule, "coupled", "tree"]
    mixed = [SpecConfig(drafter, draft, num_draft=3, rule=name, allow_lossy=True) for name in rules]
    assert llm.generate([PROMPTS[0]] * 5, params, mixed)[2].token_ids == one.token_ids


def test_a_lossy_rule_says_so(llm: LLM, pair: SimpleNamespace) -> None:
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=4, rule="typical", allow_lossy=True)
    out = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True), spec)[0]
    assert out.stats.lossy
    assert out.stats.as_dict()["lossy"] is True
    with pytest.raises(ConfigError, match="allow_lossy"):
        SpecConfig("ngram", rule="typical")


SAMPLED = [
    SamplingParams(
        max_tokens=16, ignore_eos=True, temperature=(0.7, 1.0, 0.0)[i % 3], top_p=(1.0, 0.9)[i % 2], seed=900 + i
    )
    for i in range(16)
]


def sampled_specs(draft: Path) -> list[SpecConfig]:
    return [
        SpecConfig("draft_model", str(draft), num_draft=1 + i % 5) if i % 4 < 2 else SpecConfig(("ngram", None)[i % 2])
        for i in range(16)
    ]


@pytest.fixture(scope="module")
def alone(llm: LLM, pair: SimpleNamespace) -> Answers:
    """Every request of the next tests, run by itself."""
    specs = sampled_specs(pair.draft)
    return [
        llm.generate([prompt], params, spec)[0].token_ids
        for prompt, params, spec in zip(PROMPTS, SAMPLED, specs, strict=True)
    ]


@pytest.mark.parametrize(
    "limits", [(16, 512), (5, 512), (16, 3), (3, 7)], ids=lambda limits: f"batch{limits[0]}-chunk{limits[1]}"
)
def test_a_result_does_not_depend_on_batch_or_chunks(
    llm: LLM, pair: SimpleNamespace, alone: Answers, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on how many run together nor on how the prompts are cut; seeds fixed, sampled and greedy mixed."""
    monkeypatch.setattr(llm.engine.scheduler, "config", SchedulerConfig(*limits))
    outputs = llm.generate(PROMPTS, SAMPLED, sampled_specs(pair.draft))
    assert [out.token_ids for out in outputs] == alone


@pytest.mark.parametrize("length", range(5, 11))
def test_where_a_chunk_ends_does_not_matter(
    llm: LLM, pair: SimpleNamespace, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last chunk of one token looks like a decode step; it must not draft, or the neighbours' chunks would change the
    answer.
    """
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=4)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=length)
    prompt = token_ids(length, seed=length)
    expected = llm.generate([prompt], params, spec)[0].token_ids
    for chunk in (1, 2, 3, 4, 7):
        monkeypatch.setattr(llm.engine.scheduler, "config", SchedulerConfig(16, chunk))
        assert llm.generate([prompt], params, spec)[0].token_ids == expected


def test_a_result_does_not_depend_on_the_order_of_arrival(llm: LLM, pair: SimpleNamespace, alone: Answers) -> None:
    """Requests come one per step, in reverse, while the others run."""
    specs, states = sampled_specs(pair.draft), {}
    for i in reversed(range(16)):
        states[i] = llm.submit(PROMPTS[i], SAMPLED[i], specs[i])
        llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    assert [tuple(states[i].output_ids) for i in range(16)] == alone


def test_a_neighbour_that_leaves_early_changes_nothing(llm: LLM, pair: SimpleNamespace, alone: Answers) -> None:
    specs = sampled_specs(pair.draft)
    states = [llm.submit(PROMPTS[i], SAMPLED[i], specs[i]) for i in range(8)]
    for i in range(0, 8, 2):
        llm.engine.step()
        llm.engine.abort(states[i].request_id)
    while llm.engine.has_work:
        llm.engine.step()
    assert [tuple(states[i].output_ids) for i in range(1, 8, 2)] == [alone[i] for i in range(1, 8, 2)]


@pytest.mark.filterwarnings("ignore:the draft has")
def test_two_draft_models_in_one_batch(llm: LLM, pair: SimpleNamespace) -> None:
    """Each request is judged by the distributions of its own draft."""
    specs = [SpecConfig("draft_model", str((pair.draft, pair.target)[i % 2]), num_draft=3) for i in range(8)]
    expected = [llm.generate([PROMPTS[i]], SAMPLED[i], specs[i])[0].token_ids for i in range(8)]
    assert [out.token_ids for out in llm.generate(PROMPTS[:8], SAMPLED[:8], specs)] == expected


def test_seeds(llm: LLM, pair: SimpleNamespace) -> None:
    """The same seed repeats, another one does not, and without a seed each request draws its own."""
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=3)
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True, seed=seed) for seed in (1, 1, 2, None, None)
    ]
    one, same, other, free, free2 = (out.token_ids for out in llm.generate([PROMPTS[0]] * 5, params, spec))
    assert one == same
    assert len({one, other, free, free2}) == 4


@pytest.mark.gpu
def test_greedy_equality_on_a_gpu(pair: SimpleNamespace) -> None:
    """Drafts of lookups come from the CPU and must reach the target's device."""
    with LLM(pair.target, dtype="float64", device="cuda", cache_tokens=4096) as llm:
        expected = [out.token_ids for out in llm.generate(PROMPTS, LONG)]
        specs = [spec for spec in all_specs(pair.draft) if spec.draft_dtype not in QUANTISED]  # those run on a CPU only
        for turn in range(3):
            outputs = llm.generate(PROMPTS, LONG, [specs[(7 * turn + i) % len(specs)] for i in range(16)])
            assert [out.token_ids for out in outputs] == expected
