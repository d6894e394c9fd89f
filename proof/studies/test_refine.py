"""A profile corrected by measured steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from foretoken.plan.profile import Curve, DrafterCost, Profile
from studies.validation.refine import Levels, RealStep, refine

UNIT = Profile(
    {},
    {},
    {},
    "",
    "",
    rows=Curve(((1, 1.0),)),
    chunk=Curve(((1, 1.0),)),
    drafters={"ngram": DrafterCost(Curve(((1, 0.5),)))},
)


def test_steps_that_took_twice_as_long() -> None:
    """Each kind gets its own share; a pause counts as four usual steps at most; what was not seen stays."""
    decode = [RealStep(4, (9,) * 4, 0, 2.0) for _ in range(50)] + [RealStep(4, (9,) * 4, 0, 1000.0)]
    drafts = [RealStep(8, (9,), 0, 2.0, longest_draft=4, num_drafting=2, draft_s=1.5) for _ in range(9)]
    few = [RealStep(4, (9,), 60, 7.0) for _ in range(3)]
    found = refine(UNIT, [*decode, *drafts, *few], "ngram")
    assert found.step_s(4, [9] * 4) == pytest.approx((100 + 8) / 51, rel=1e-2)
    assert found.step_s(8, [9]) == pytest.approx(2.0, rel=1e-2)
    assert found.step_s(4, [9], 60) == 1.0  # three steps tell nothing
    assert found.drafters["ngram"].seconds(4, 2) == pytest.approx(1.5)
    assert found.drafters["ngram"].seconds(4, 2, prompt_tokens=9) == 0.5
    assert found.drafters["ngram"].seconds(0) == 0.0
    assert refine(UNIT, [], None).step_s(4, [9]) == 1.0
    assert found.rows == UNIT.rows
    assert "decode" in found.as_dict()


def test_requests_and_rows_are_told_apart() -> None:
    """Steps cost a second, a third for each request but the first, a tenth for each row: half of them foretell the
    other half.

    The profile knows of the second and of half of what rows cost.
    """
    rng, rows = random.Random(3), Curve(((1, 1.05), (101, 6.05)))

    def step(requests: int, rows: int) -> RealStep:
        return RealStep(
            requests * rows, (9,) * requests, 0, (1 + (requests - 1) / 3 + requests * rows / 10) * rng.uniform(0.9, 1.1)
        )

    steps = [step(rng.choice((1, 1, 2, 3, 5, 8, 16)), rng.randint(1, 6)) for _ in range(1600)]
    found = refine(replace(UNIT, rows=rows), steps[::2], None)
    for low, high in ((1, 1), (2, 3), (4, 7), (8, 15), (16, 16)):
        own = [one for one in steps[1::2] if low <= len(one.contexts) <= high]
        said_s = sum(found.step_s(one.decode_rows, one.contexts) for one in own)
        assert said_s == pytest.approx(sum(one.target_s for one in own), rel=0.03), low


def test_shares_between_and_outside() -> None:
    shares = Levels(((2.0, 1.0), (4.0, 2.0)))
    assert [shares.at(size) for size in (1, 2, 3, 4, 50)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert Levels().at(3) == 1.0
