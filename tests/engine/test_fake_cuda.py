"""Whole steps of the engine on a device that does not exist: nothing is left on the CPU, and few transfers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from foretoken import SamplingParams, SpecConfig
from foretoken.draft.base import Drafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine import engine as engine_module
from foretoken.engine.engine import Engine
from foretoken.text.processors import RequestProcessors
from tests.helpers.fake_cuda import Transfers, fake_cuda, fake_model

PLAIN = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
PROCESSED = SamplingParams(
    max_tokens=40,
    ignore_eos=True,
    temperature=0.8,
    top_p=0.9,
    top_k=20,
    min_p=0.05,
    min_tokens=30,
    logit_bias={3: 1.0},
    bad_words=[[5], [6, 7]],
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
)


def _raise(engine: object, error: BaseException) -> None:
    raise error


@pytest.fixture(autouse=True)
def no_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that raises fails the test instead of being repeated; no row is said to have no token left."""
    monkeypatch.setattr(engine_module, "recover", _raise)
    take = RequestProcessors.take
    monkeypatch.setattr(
        RequestProcessors, "take", lambda self, flags: take(self, [[False] * len(one) for one in flags])
    )


def engine_with(spec: SpecConfig, drafter: Drafter) -> Engine:
    target = fake_model("llama")
    group = DrafterGroup(target)
    group.add(drafter_key(spec), drafter)
    return Engine(target, group)


def steps(engine: Engine, transfers: Transfers, count: int) -> list[int]:
    """The transfers of each of so many steps."""
    found = []
    for _ in range(count):
        before = len(transfers.lengths)
        outputs = engine.step()
        assert all(output.error is None for output in outputs), outputs
        found.append(len(transfers.lengths) - before)
    assert engine.stats.num_faults == 0
    return found


NUM_TOKENS = 12  # of the vocabulary, which made-up tokens are: whatever comes has stood in the prompt
PROMPT = list(range(NUM_TOKENS)) * 2

DRAFTERS = {
    "lookup": (SpecConfig("ngram", num_draft=3), NgramDrafter),
    "chain": (SpecConfig("draft_model", "toy", num_draft=3), lambda: DraftModelDrafter(fake_model("llama-mqa"))),
    "tree": (
        SpecConfig("draft_model", "toy", num_draft=5, tree="best_first"),
        lambda: DraftModelDrafter(fake_model("llama-mqa")),
    ),
}


@pytest.mark.parametrize(
    ("drafter", "rule", "most"),
    [
        ("lookup", "greedy", 2),  # what the forward and the verdict bring
        ("lookup", "coupled", 3),  # and the drafted tokens, for the processors
        pytest.param("lookup", "rejection", 4, marks=pytest.mark.repeated),
        pytest.param("lookup", "block", 4, marks=pytest.mark.repeated),
        ("lookup", "tree", 4),  # and the tokens drawn from residuals
        pytest.param("chain", "greedy", 3, marks=pytest.mark.repeated),  # the draft is checked as well
        ("chain", "block", 9),  # also its distributions; tokens for its processors, twice; sums of residuals
        ("tree", "greedy", 8),  # a level of the tree at a time, five at most
    ],
)
def test_a_step_waits_as_often_for_many_requests_as_for_one(drafter: str, rule: str, most: int) -> None:
    """Requests with every kind of sampling parameter, first their prompts, then rounds with drafts."""
    counts = []
    spec, make = DRAFTERS[drafter]
    spec = dataclasses.replace(spec, rule=rule)
    for num_requests in (1, 3):
        with fake_cuda(vocab_size=NUM_TOKENS) as transfers, torch.inference_mode():
            engine = engine_with(spec, make())
            for _ in range(num_requests):
                engine.submit(PROMPT, PLAIN if rule == "greedy" else PROCESSED, spec)
            counts.append(steps(engine, transfers, 3))
            assert engine.stats.num_drafted > 0
    assert max(max(counts[0]), max(counts[1])) == most if drafter != "tree" else max(counts[1]) <= most
    assert counts[0] == counts[1] or drafter == "tree"  # how deep a tree grows follows from the made-up numbers
