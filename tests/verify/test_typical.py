"""The lossy rule does what it says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foretoken.core import Draft
from foretoken.verify import RULES
from tests.helpers.enumeration import RandomTables, cases_of, check_decisions, complete, emitted_law, joint, max_error
from tests.verify.drafters import tree_drafter


def test_typical_accepts_what_is_plausible() -> None:
    """Sure target: 0.09 is the most that is ever asked for; unsure target: 0.3 exp(-H) is less."""
    distribution = torch.tensor([0.8, 0.1, 0.08, 0.02], dtype=torch.float64)
    flat = torch.full((4,), 0.25, dtype=torch.float64)
    entropy = -(distribution * distribution.log()).sum()
    assert 0.3 * torch.exp(-entropy) > 0.09
    for p, token, expected in ((distribution, 1, 1.0), (distribution, 2, 0.0), (flat, 2, 1.0)):
        draft = Draft(torch.tensor([token]), (-1,), (0, 1), ("toy",))
        assert RULES["typical"].accept_probabilities(draft, torch.stack((p, p))).tolist() == [expected]
    edge = torch.tensor([0.91, 0.09], dtype=torch.float64)  # as likely as it must be exceeded
    draft = Draft(torch.tensor([1]), (-1,), (0, 1), ("toy",))
    assert RULES["typical"].accept_probabilities(draft, torch.stack((edge, edge))).tolist() == [0.0]
    wide = torch.full((20,), 0.04, dtype=torch.float64)
    wide[0] = 1 - wide[1:].sum()  # 0.24, and 19 tokens of 0.04 < 0.09
    assert 0.3 * float(torch.exp((wide * wide.log()).sum())) < 0.04
    draft = Draft(torch.tensor([7]), (-1,), (0, 1), ("toy",))
    assert RULES["typical"].accept_probabilities(draft, torch.stack((wide, wide))).tolist() == [1.0]


@pytest.mark.parametrize("kind", ["fixed", "uneven", "siblings"])
def test_typical_takes_the_deepest_plausible_path(kind: str) -> None:
    target = RandomTables(3, seed=81)
    cases = cases_of(tree_drafter(kind, 2, RandomTables(3, seed=82), 83), {(): 1.0})
    assert check_decisions(RULES["typical"], cases, target) > 0
    for case in cases:
        deepest = max((len(text) for text in case.layout.texts if _plausible(target, text)), default=0)
        distribution = emitted_law(RULES["typical"], [replace(case, weight=1.0)], target)
        assert {len(text) - 1 for text in distribution} == {deepest}
    distribution = emitted_law(RULES["typical"], cases, target)
    assert max_error(complete(distribution, target, 3), joint(target, 3)) > 0.05


def _plausible(target: RandomTables, text: tuple[int, ...]) -> bool:
    """Whether every token of `text` passes the test where it stands."""
    for i, token in enumerate(text):
        p = target[text[:i]]
        if p[token] <= min(0.09, 0.3 * float(np.exp((p * np.log(p)).sum()))):
            return False
    return True
