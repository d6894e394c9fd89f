"""Sampled answers follow the exact distribution: by rule, by drafter, by sampling parameter, through the whole
engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foretoken import SamplingParams, SpecConfig
from foretoken.config import QUANTISED, TREES
from foretoken.core import Batch, Draft
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.registry import HEADS, MTP
from tests.helpers.distribution import (
    ADAPTED,
    ALARM,
    EAGLE_1,
    LENGTH,
    TWO_LEVELS,
    exact_law,
    narrow_models,
    p_values,
    sample_answers,
)

NUM_REQUESTS = 800
BASE = SamplingParams(max_tokens=LENGTH + 3, temperature=1.0, ignore_eos=True)
EXACT_RULES = ("rejection", "block", "coupled", "tree", "traversal")
# Groups and parameters that have a test of their own here; those of the others, and the mixed batches of all of them,
# are in proof/test_law.py.
GROUPS_HERE = (*EXACT_RULES, "trees", "eagle")
PARAMETERS_HERE = ("bad_words", "all")
PARAMETERS = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.6},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.4},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {"logit_bias": {0: 1.0, 3: -1.5}},
    "bad_words": {"bad_words": ((3,), (1, 2))},
    "min_tokens": {"min_tokens": 3},
    "all": {
        "temperature": 0.8,
        "top_p": 0.9,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {2: 0.5},
        "min_tokens": 2,
    },
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return narrow_models(tmp_path_factory.mktemp("narrow"))


def seeded(params: SamplingParams, count: int, first: int = 0) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(first, first + count)]


def model_specs(rule: str, count: int, draft: str = "reverse", **options: object) -> list[SpecConfig]:
    return [SpecConfig("draft_model", draft, num_draft=1 + i % 4, rule=rule, **options) for i in range(count)]


def tree_specs(count: int, **options: object) -> list[SpecConfig]:
    """A draft model's trees of one to seven nodes, under every rule that takes them."""
    rules, branchings = (
        ("tree", "traversal", "coupled"),
        ((2, 2, 2), (2, 1), (3, 1, 2)),
    )  # few levels: small trees would be chains otherwise
    return [
        SpecConfig(
            "draft_model",
            "reverse",
            num_draft=1 + i % 7,
            rule=rules[i % 3],
            tree=TREES[1 + i % 2],
            branching=branchings[i // 2 % 3],
            **options,
        )
        for i in range(count)
    ]


def free_specs(name: str, count: int) -> list[SpecConfig]:
    """A drafter that asks no model, under rules that take its trees and rules that get chains."""
    rules = ("tree", "traversal", "coupled", "block", "auto", "rejection")
    return [SpecConfig(name, num_draft=5, rule=rules[i % 6]) for i in range(count)]


HEAD_SPECS = {**{name: SpecConfig(name) for name in (*HEADS, MTP)}, "eagle:1": EAGLE_1}


def head_specs(name: str, count: int) -> list[SpecConfig]:
    """A trained head's chains and trees, drawn or of ranks, with and without ways to draft less."""
    head = HEAD_SPECS[name]
    chains = [
        replace(
            head,
            num_draft=1 + i % 4,
            rule=("block", "rejection", "tree", "coupled")[i % 4],
            min_confidence=(0.0, 0.35)[i // 4 % 2],
            draft_probability=(1.0, 0.6)[i // 8 % 2],
        )
        for i in range(count // 2)
    ]
    trees = [
        replace(
            head,
            num_draft=1 + i % 6,
            rule=("tree", "traversal", "coupled")[i % 3],
            tree=TREES[1 + i % 2],
            branching=((2, 2, 2), (3, 1, 2))[i // 2 % 2],
        )
        for i in range(count - len(chains))
    ]
    return [*chains, *trees]


def cascade_specs(count: int) -> list[SpecConfig]:
    """A lookup under a model, and a model under a model."""
    rules = ("block", "rejection", "tree", "coupled")
    return [
        replace((SpecConfig("cascade", "reverse"), TWO_LEVELS)[i % 2], num_draft=1 + i % 5, rule=rules[i // 2 % 4])
        for i in range(count)
    ]


def mix_specs(count: int) -> list[SpecConfig]:
    rules = ("tree", "traversal", "auto", "coupled", "block")
    return [
        SpecConfig(
            "mix",
            "reverse",
            num_draft=1 + i % 6,
            rule=rules[i % 5],
            draft_probability=(1.0, 0.6)[i // 5 % 2],
        )
        for i in range(count)
    ]


def auto_specs(count: int) -> list[SpecConfig]:
    """The drafter is chosen anew in every round, with or without the draft length, under every kind of rule."""
    rules = ("tree", "block", "auto", "coupled", "rejection", "traversal")
    parts = ("ngram", SpecConfig("draft_model", "reverse", tree="best_first", branching=2), "recycling", "draft_model")
    return [
        SpecConfig("auto", "reverse", parts=parts, num_draft=("auto", 1, 4)[i % 3], rule=rules[i // 3 % 6])
        for i in range(count)
    ]


def shuffled_answers(narrow: SimpleNamespace, asked: Sequence[tuple[SamplingParams, SpecConfig]]) -> np.ndarray:
    """Answers in the given order, though the requests came in another one: every batch is a mixture."""
    order = np.random.default_rng(0).permutation(len(asked))
    answers = np.empty((len(asked), LENGTH), dtype=np.int64)
    answers[order] = sample_answers(narrow, [asked[i] for i in order])
    return answers


def groups(count: int) -> dict[str, list[SpecConfig]]:
    """`count` requests of every rule and every drafter, and of plain decoding; lookups draft trees where they may."""
    half = count // 2
    return {
        **{rule: model_specs(rule, count) for rule in EXACT_RULES},
        "coin": [*model_specs("block", half, draft_probability=0.6), *model_specs("tree", half, draft_probability=0.4)],
        "trees": [*tree_specs(half), *tree_specs(half, min_confidence=0.3, draft_top_k=3)],
        "stop": [*model_specs("block", half, min_confidence=0.45), *model_specs("rejection", half, draft_top_k=2)],
        **{
            kind: [spec for rule in ("block", "tree") for spec in model_specs(rule, half, "low", draft_dtype=kind)]
            for kind in QUANTISED
        },
        "ngram": [
            SpecConfig("ngram", num_draft=3, rule=("rejection", "block", "tree", "coupled")[i % 4])
            for i in range(count)
        ],
        **{name: free_specs(name, count) for name in ("suffix", "recycling", "predicted", "lookahead")},
        **{name: head_specs(name, count) for name in HEAD_SPECS},
        "heads in 4 bits": [
            replace(specs[i], draft_dtype="int4")
            for i, specs in zip(range(count), itertools.cycle([head_specs(name, count) for name in HEADS]))
        ],
        "cascade": cascade_specs(count),
        "mix": mix_specs(count),
        "auto": auto_specs(count),
        "plain": [SpecConfig("ngram", num_draft=0, rule=("block", "coupled")[i % 2]) for i in range(count)],
    }


def groups_answers(narrow: SimpleNamespace, count: int) -> dict[str, np.ndarray]:
    """Answers `[count, LENGTH]` by group, all groups mixed in every batch."""
    specs = groups(count)
    asked: list[tuple[SamplingParams, SpecConfig]] = []
    for some in specs.values():  # a seed is used once: equal seeds draw equal numbers in every group
        asked += zip(seeded(BASE, count, first=len(asked)), some, strict=True)
    return dict(zip(specs, np.split(shuffled_answers(narrow, asked), len(specs)), strict=True))


@pytest.mark.parametrize("name", GROUPS_HERE)
@pytest.mark.repeated
def test_every_rule_has_the_law(narrow: SimpleNamespace, name: str) -> None:
    """Each rule by itself: eight tokens, several rounds each."""
    check_group(narrow, name)


def check_group(narrow: SimpleNamespace, name: str) -> None:
    """`NUM_REQUESTS` of one of `groups`, in batches of their own."""
    asked = zip(seeded(BASE, NUM_REQUESTS), groups(NUM_REQUESTS)[name], strict=True)
    assert min(p_values(shuffled_answers(narrow, list(asked)), exact_law(narrow, BASE))) > ALARM


def head_answers(narrow: SimpleNamespace, temperature: float, count: int) -> dict[str, np.ndarray]:
    """Answers `[count, LENGTH]` by trained head, all heads mixed in every batch."""
    asked: list[tuple[SamplingParams, SpecConfig]] = []
    for name in HEAD_SPECS:
        params = seeded(replace(BASE, temperature=temperature), count, first=len(asked))
        asked += zip(params, head_specs(name, count), strict=True)
    return dict(zip(HEAD_SPECS, np.split(shuffled_answers(narrow, asked), len(HEAD_SPECS)), strict=True))


@pytest.mark.repeated
def test_a_target_that_drafts_for_itself_has_the_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exits, one with an adapter, skipped layers, coins and stops side by side: rows of one verify pass begin at
    different layers.

    An open exit changes from round to round.
    """
    propose, exits = EarlyExitDrafter.propose, set()

    def under_variants(drafter: EarlyExitDrafter, batch: Batch) -> Draft:
        entries = []
        for entry in batch.decoding:
            variants = drafter.variants(entry.request.spec)
            chosen = variants[entry.round_start % len(variants)]
            exits.add(chosen.exit_layer)
            entries.append(replace(entry, request=replace(entry.request, spec=chosen)))
        return propose(drafter, Batch(tuple(entries)))

    monkeypatch.setattr(EarlyExitDrafter, "propose", under_variants)
    deep = narrow_models(tmp_path, num_layers=3)
    layers = (
        {"exit_layer": 1},
        {"exit_layer": 2},
        {"skip_layers": (1,)},
        {"skip_layers": (0, 2)},
        {"head": ADAPTED.head},
    )
    rules = ("block", "rejection", "tree", "coupled")
    less = ({}, {"draft_probability": 0.6}, {"min_confidence": 0.3}, {"draft_top_k": 3})
    specs = [
        SpecConfig("early_exit", num_draft=1 + i % 3, rule=rules[i % 4], **layers[i // 4 % 5], **less[i // 20 % 4])
        for i in range(NUM_REQUESTS)
    ]
    automatic = [
        SpecConfig("early_exit", num_draft=3, rule=rules[i % 3], skip_layers=(None, "auto")[i % 2])
        for i in range(NUM_REQUESTS // 2)
    ]
    asked = [pair for some in (specs, automatic) for pair in zip(seeded(BASE, len(some)), some, strict=True)]
    distribution = exact_law(deep, BASE)
    for part in np.split(shuffled_answers(deep, asked), [NUM_REQUESTS]):
        assert min(p_values(part, distribution)) > ALARM
    assert {1, 2} <= exits


def parameter_requests(
    values: dict[str, Any], count: int, first_seed: int = 0
) -> list[tuple[SamplingParams, SpecConfig]]:
    """Requests under the rule that auto takes with a seed, without one, and plain."""
    some = count // 8
    specs = [*model_specs("block", 3 * some), *tree_specs(some), *model_specs("coupled", 2 * some)]
    specs += [SpecConfig()] * (count - len(specs))
    return list(zip(seeded(replace(BASE, **values), count, first_seed), specs, strict=True))


def parameter_answers(narrow: SimpleNamespace, count: int) -> dict[str, np.ndarray]:
    """Answers `[count, LENGTH]` by parameter, all parameters mixed in every batch."""
    asked: list[tuple[SamplingParams, SpecConfig]] = []
    for values in PARAMETERS.values():
        asked += parameter_requests(values, count, first_seed=len(asked))
    return dict(zip(PARAMETERS, np.split(shuffled_answers(narrow, asked), len(PARAMETERS)), strict=True))


def parameter_law(narrow: SimpleNamespace, name: str) -> np.ndarray:
    return exact_law(narrow, replace(BASE, **PARAMETERS[name]))


@pytest.mark.parametrize("name", PARAMETERS_HERE)
@pytest.mark.repeated
def test_every_sampling_parameter_has_the_law(narrow: SimpleNamespace, name: str) -> None:
    """A ban that looks at several tokens, and most parameters together."""
    check_parameter(narrow, name)


def check_parameter(narrow: SimpleNamespace, name: str) -> None:
    """`NUM_REQUESTS` with one of `PARAMETERS`."""
    answers = shuffled_answers(narrow, parameter_requests(PARAMETERS[name], NUM_REQUESTS))
    assert min(p_values(answers, parameter_law(narrow, name))) > ALARM
