"""Rounds that were seen, by hand; a profile put right by steps; built-in traces against their rates."""

from __future__ import annotations

from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.simulate.sim_request import Record, Round, chain
from studies.validation.records import behind, record_of

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
#   0 - 1 - 3      0, 2, 4 stood
#     \ 2 - 4 - 5
TREE = Round((-1, 0, 0, 1, 2, 4), (0, 2, 4))


def test_a_smaller_budget_gets_the_first_nodes() -> None:
    assert TREE.within(9) is TREE
    assert TREE.within(3) == Round((-1, 0, 0), (0, 2))
    assert TREE.within(2) == Round((-1, 0), (0,))
    assert TREE.within(0) == Round() == chain(0, 0)
    assert chain(3, 2) == Round((-1, 0, 1), (0, 1))


def test_what_is_behind_a_draft_token_that_stood() -> None:
    assert behind(TREE) == Round((-1, -1, 0, 1, 3), (1, 3))
    assert behind(behind(TREE)) == Round((-1, 0), (0,))
    assert behind(behind(behind(TREE))) == Round((-1,), ())
    assert behind(chain(3, 1)) == chain(2, 0)


def test_a_record_by_hand() -> None:
    """Two of three draft tokens were accepted, then none was made, then one failed: each place has its own round."""
    seen = {0: (4, chain(3, 2)), 3: (4, Round()), 4: (4, chain(1, 0))}
    record = record_of(seen)
    assert record == Record((chain(3, 2), chain(2, 1), chain(1, 0), Round(), chain(1, 0)))
    assert [record.at(place, 1).path for place in (0, 2, 3, 5)] == [(0,), (), (), (0,)]
    assert record_of({}) is record_of({0: (0, Round())}) is None


def test_a_draft_that_its_budget_cut_goes_on() -> None:
    """Behind a failure with draft tokens that fail; behind one that stood with the round that came, or with a failure,
    drawn.
    """
    failed = record_of({0: (2, chain(2, 1)), 2: (2, chain(1, 0))})
    assert failed.rounds[0] == chain(24, 1)
    assert failed.at(0, 2) == chain(2, 1)
    after = {seed: record_of({0: (2, chain(2, 2)), 3: (4, chain(3, 1))}, seed).rounds for seed in range(40)}
    lengths = {len(rounds[0].path) for rounds in after.values()}
    assert lengths == {2, 4}  # 2, or 2 + the one never judged + 1
    assert all(rounds[0].within(2) == chain(2, 2) for rounds in after.values())
    assert all(len(rounds[1].path) == len(rounds[0].path) - 1 for rounds in after.values())
    assert all(rounds[-1] == chain(2, 0) for rounds in after.values())
