"""Whole steps of the engine on a device that does not exist: nothing is left on the CPU, and every wait is counted.

The instrument is torch's fake tensors with a mode that refuses what a GPU would wait for (`fake_cuda`), and not real
CPU tensors under another name: fake tensors have the operators' own rules for devices and shapes, so that an index on
the CPU, a copy that waits and a shape that depends on numbers raise where they are written. The one way to the host
that is left, `transfer.to_host`, gives made-up numbers and is what the tables count.

The contract is one wait a step. Where a table says more, it may only go down.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from foretoken import SamplingParams, SpecConfig
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.failures import DrafterFailures
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine import engine as engine_module
from foretoken.engine.engine import Engine
from foretoken.model.paged import PagedModel
from foretoken.registry import DRAFTERS as KNOWN
from foretoken.text.processors import RequestProcessors
from foretoken.verify import RULES
from tests.helpers.fake_cuda import Transfers, fake_cuda, fake_model
from tests.helpers.fake_drafters import DRAFTERS, Made, fake_draft
from tests.helpers.usual import some_of

NUM_TOKENS = 12  # of the vocabulary, which made-up tokens are: whatever comes has stood in the prompt
PROMPT = list(range(NUM_TOKENS)) * 2
PLAIN = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
SAMPLED = replace(PLAIN, temperature=0.8, top_p=0.9, top_k=20, min_p=0.05)
PROCESSED = replace(
    SAMPLED,
    min_tokens=30,
    logit_bias={3: 1.0},
    bad_words=[[0], [7, 6]],  # lookups in the prompt propose the next number: their tokens are not refused
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
)

# Waits of a greedy round. One for what the target and the rule say, and:
GREEDY_WAITS = {
    **dict.fromkeys(("ngram", "suffix", "predicted"), 1),
    "recycling": 2,  # the runners-up of every row
    "lookahead": 3,  # whether the probes spoilt the logits, and what the target says behind them
    # What was drafted, checked before the target reads it.
    **dict.fromkeys(("draft_model", "eagle", "eagle:1", "mtp", "medusa"), 2),
    **dict.fromkeys(("early_exit", "early_exit:adapter", "early_exit:search"), 3),  # and which rows ran early
    "block": 6,  # with `min_confidence`: the confidences, and whether each place is sure enough
    "mix": 2,
    # A level of the tree at a time.
    "draft_model/best_first": 5,
    "draft_model/static": 5,
    "eagle/best_first": 5,
    "block/best_first": 5,
    "medusa/static": 4,
    "cascade": 5,  # a verdict of the draft model on the lookup's tokens each time
}
# Waits of a round in which one request is greedy, one sampled with every kind of processor and log-probabilities, and
# one sampled with a seed: three rules, and processors that read what was drafted.
MIXED_WAITS = dict.fromkeys(DRAFTERS, 13) | {"cascade": 22, "block": 16}


def _raise(engine: object, error: BaseException) -> None:
    raise error


@pytest.fixture(autouse=True)
def no_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step or a drafter that raises fails the test; no row is said to have no token left."""
    monkeypatch.setattr(engine_module, "recover", _raise)
    monkeypatch.setattr(DrafterFailures, "attempt", lambda self, key, drafter, ids, call, must_succeed=False: call())
    take = RequestProcessors.take
    monkeypatch.setattr(
        RequestProcessors, "take", lambda self, flags: take(self, [[False] * len(one) for one in flags])
    )


def engine_with(spec: SpecConfig, make: Made, target: PagedModel | None = None) -> Engine:
    target = target or fake_model("llama")
    group = DrafterGroup(target)
    group.add(drafter_key(spec), make(target))
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


def test_every_kind_of_drafter_is_here() -> None:
    kinds = {name.partition("/")[0].partition(":")[0] for name in DRAFTERS}
    assert kinds == KNOWN.keys() - {"auto"}  # which chooses among the others


# One of each way to draft; its relatives are left to `make proof`.
USUAL = {"ngram", "mix", "draft_model/best_first", "early_exit", "eagle", "medusa", "block"}


@pytest.mark.parametrize("name", some_of(DRAFTERS, USUAL))
def test_every_drafter(name: str) -> None:
    """A prompt and two greedy rounds, whose waits are counted; then requests with every kind of parameter join."""
    spec, make = DRAFTERS[name]
    with fake_cuda(vocab_size=NUM_TOKENS) as transfers, torch.inference_mode():
        engine = engine_with(spec, make)
        known = {"prediction": PROMPT} if spec.drafter == "predicted" else {}
        engine.submit(PROMPT, replace(PLAIN, **known), spec)
        prompt, *rounds = steps(engine, transfers, 3)
        assert prompt <= 3
        assert max(rounds) == GREEDY_WAITS[name], rounds
        engine.submit(PROMPT, replace(PROCESSED, logprobs=2, **known), spec)
        engine.submit(PROMPT, replace(PROCESSED, seed=5, **known), spec)
        assert max(steps(engine, transfers, 2)) <= MIXED_WAITS[name]
        assert engine.stats.num_drafted > 0


# Waits of a sampled round by rule, over tokens that the host looked up and over those that a draft model sampled.
RULE_WAITS = {
    "greedy": (1, 2),
    "coupled": (1, 4),  # the drafted tokens before each place, for the processors
    "rejection": (1, 4),
    "typical": (1, 4),
    "block": (2, 6),  # the sums of the residuals come first
    "tree": (2, 5),  # sampled siblings one after another
    "traversal": (2, 6),
}


@pytest.mark.parametrize(
    ("drafter", "rule"),
    some_of(
        itertools.product(("ngram", "draft_model"), RULES),
        {*(("ngram", rule) for rule in RULES), ("draft_model", "greedy"), ("draft_model", "traversal")},
    ),
)
def test_a_step_waits_as_often_for_many_requests_as_for_one(drafter: str, rule: str) -> None:
    spec = SpecConfig(drafter, None if drafter == "ngram" else "toy", num_draft=3, rule=rule, allow_lossy=True)
    make = {"ngram": lambda _: NgramDrafter(), "draft_model": lambda _: DraftModelDrafter(fake_draft())}[drafter]
    counts = []
    for num_requests in (1, 3):
        with fake_cuda(vocab_size=NUM_TOKENS) as transfers, torch.inference_mode():
            engine = engine_with(spec, make, fake_model("llama", num_hidden_layers=1))
            for _ in range(num_requests):
                engine.submit(PROMPT, PLAIN if rule == "greedy" else PROCESSED, spec)
            counts.append(max(steps(engine, transfers, 3)))
            assert engine.stats.num_drafted > 0
    assert counts[0] == counts[1] == RULE_WAITS[rule][drafter == "draft_model"]


# Without Triton, experts are found on the host: a wait for each layer.
FAMILIES = {"gemma2": 1, "gemma3": 1, "phi3": 1, "olmo2": 1, "glm4": 1, "cohere2": 1, "mixtral": 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    spec, make = DRAFTERS["ngram"]
    with fake_cuda(vocab_size=5) as transfers, torch.inference_mode():  # made-up numbers are experts too
        engine = engine_with(spec, make, fake_model(family))
        engine.submit(PROMPT, PLAIN, spec)
        assert max(steps(engine, transfers, 2)) == FAMILIES[family]
