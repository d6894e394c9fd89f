"""From cells to the answer in words, its reasons and the routing rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.control.routing import RoutingRules
from foretoken.measure.advise.cells import SpeedCell
from foretoken.measure.advise.costs import DrafterCosts, LoadCosts
from foretoken.measure.advise.verdict import Finding, candidate_verdict, verdict_of
from foretoken.measure.stats import Estimate
from foretoken.plan.profile import Curve

COSTS = LoadCosts(
    16, 32, 0.0, {1: Curve(((0, 1.0), (4, 2.0)))}, {"d": DrafterCosts(True, {}, 10.0), "e": DrafterCosts(False, {})}
)


def cell(concurrency: int, speedup: float, slice_name: str = "", name: str = "d", half: float = 0.05) -> SpeedCell:
    found = Estimate(speedup, speedup - half, speedup + half)
    return SpeedCell(
        name,
        slice_name,
        concurrency,
        3,
        found,
        speedup,
        2.0,
        1.2,
        1.4,
        10.0,
        10.0,
        speedup,
        1.0,
        concurrency,
        concurrency,
    )


def answer(*cells: SpeedCell, findings: tuple[Finding, ...] = ()) -> object:
    names = dict.fromkeys(one.candidate for one in cells)
    verdicts = [candidate_verdict(name, [one for one in cells if one.candidate == name], findings) for name in names]
    return verdict_of(verdicts, cells, COSTS, {})


def test_yes_where_it_pays_at_every_load() -> None:
    found = answer(cell(1, 2.0), cell(8, 1.5))
    assert (found.answer, found.candidate, found.num_draft) == ("yes", "d", 3)
    assert found.sentence.startswith("Speculate with d: answers come 2.00x [1.95, 2.05] as fast with 1 request at once")
    assert found.routing == {"min_tokens_to_speculate": 20}  # 10 s of reading, 0.5 s saved a token


def test_only_under_a_load_becomes_a_routing_rule() -> None:
    found = answer(cell(1, 2.0, name="e"), cell(4, 1.2, name="e"), cell(8, 0.8, name="e"))
    assert found.answer == "only under this load"
    assert "but only up to 4 requests at once" in found.sentence
    assert "8: 0.80x" in found.sentence
    assert found.routing == {"max_speculating_requests": 4}
    assert RoutingRules(**found.routing).max_speculating_requests == 4
    assert any("with 8 requests at once a step emits 2.00 tokens" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("speedups", "words", "most"),
    [
        ((0.9, 1.5, 1.3), "only from 4 requests at once on: answers come 1.50x", None),
        ((0.9, 1.5, 0.8), "only with 4 requests at once: answers", 4),
        ((2.0, 0.8, 1.3), "only up to 1 request at once", 1),
    ],
)
def test_a_load_that_loses_below_one_that_pays_is_named(
    speedups: tuple[float, ...], words: str, most: int | None
) -> None:
    found = answer(*(cell(load, speedup, name="e") for load, speedup in zip((1, 4, 8), speedups, strict=True)))
    assert words in found.sentence
    assert found.routing.get("max_speculating_requests") == most
    fewer = "; with fewer, it does not pay (1: 0.90x [0.85, 0.95]), and no setting stops drafting there"
    assert (fewer in found.sentence) == (speedups[0] < 1)
    assert ("beyond, it does not pay at every load (4: 0.80x" in found.sentence) == (speedups[0] > 1)


def test_a_load_at_which_it_may_pay_is_not_said_to_lose() -> None:
    found = answer(cell(1, 2.0, name="e"), cell(4, 1.2, name="e", half=0.3))
    assert "beyond, it is not shown to pay, and more prompts may tell (4: 1.20x" in found.sentence
    assert "beyond, it does not pay" in answer(cell(1, 2.0, name="e"), cell(4, 0.8, name="e")).sentence


def test_only_for_the_slices_that_gain() -> None:
    found = answer(cell(1, 0.9), cell(1, 1.6, "edit"), cell(1, 1.3, "code"), cell(1, 0.6, "chat"))
    assert found.answer == "only for these slices"
    assert found.sentence.startswith("Speculate only on edit and code, with d")
    assert "edit 1.60x" in found.sentence
    assert "chat" not in found.sentence


def test_no_gives_the_rule_that_is_broken_before_the_figures() -> None:
    broken = Finding("draft size", "d", "draft 'd' is only 2.0 times smaller than the target", "", rules_out=True)
    found = answer(cell(1, 0.7), findings=(broken,))
    assert (found.answer, found.candidate, found.nearest) == ("no", None, "d")
    assert found.sentence.startswith("Don't speculate with d: draft 'd' is only 2.0 times smaller")
    assert "takes 1.40 plain steps (0.70x" in found.sentence


def test_a_gain_within_its_interval_is_none() -> None:
    assert answer(cell(1, 1.1, half=0.2)).answer == "no"
    assert answer(cell(1, 1.02, half=0.0)).answer == "no"


def test_memory_and_texts_without_anything_to_draft_are_named() -> None:
    starved = replace(cell(8, 1.5), served=1, tokens_per_s=0.2)
    assert "only 1 fit into the memory beside it, and 8 without" in answer(starved).sentence
    nowhere = replace(cell(1, 1.5), served=0, plain_served=0, tokens_per_s=0.0, plain_tokens_per_s=0.0)
    refused = answer(nowhere)
    assert refused.answer == "no"
    assert "with 1 request at once none fits into the memory, not even without drafts" in refused.sentence
    assert "1.50x" not in refused.sentence
    idle = replace(cell(1, 1.0), accepted_per_draft=None)
    assert "finds nothing to draft" in answer(idle).sentence


def test_the_best_of_several_is_the_one_that_brings_most_where_it_may_be_switched_off() -> None:
    found = answer(cell(1, 1.3), cell(8, 1.2), cell(1, 2.5, name="e"), cell(8, 0.5, name="e"))
    assert (found.answer, found.candidate) == ("only under this load", "e")
    slices_only = (cell(1, 0.9, name="e"), cell(1, 9.0, "edit", name="e"))
    assert answer(cell(1, 1.2), *slices_only).candidate == "d"


def test_nothing_that_can_draft() -> None:
    found = verdict_of([], [], COSTS, {"d": "no such folder"})
    assert found.answer == "no"
    assert "d: no such folder" in found.sentence


@pytest.mark.parametrize("losing", ["chat", "text"])
def test_texts_that_lose_are_named_with_a_yes(losing: str) -> None:
    found = answer(cell(1, 1.5), cell(1, 2.0, "code"), cell(1, 0.9, losing))
    assert f"; not on {losing}" in found.sentence
