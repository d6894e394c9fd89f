"""The registry, the choice of a rule by name and by what was drafted, and what each rule says of itself."""

import pytest
import torch

from foretoken.core import Draft, Mass
from foretoken.errors import ConfigError
from foretoken.verify import RULES, is_lossless, needs_race, resolve, rule_for

ON_CHAINS = [name for name, rule in RULES.items() if rule.lossless and name != "greedy"]


@pytest.mark.parametrize(
    ("name", "greedy", "seeded", "expected"),
    [
        ("auto", True, False, "greedy"),
        ("auto", True, True, "greedy"),
        ("auto", False, True, "coupled"),
        ("auto", False, False, "auto"),
        ("greedy", True, False, "greedy"),
        *[(name, greedy, seeded, name) for name in ON_CHAINS for greedy in (True, False) for seeded in (True, False)],
    ],
)
def test_resolve(name: str, greedy: bool, seeded: bool, expected: str) -> None:
    assert resolve(name, greedy, seeded) == expected


@pytest.mark.parametrize(("name", "value"), [("greedy", "rule='greedy'"), ("typical", "rule='typical'"), ("nonsense", "rule='nonsense'")])
def test_resolve_refuses(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value) as caught:
        resolve(name, greedy=False)
    assert caught.value.field == "rule"
    assert "auto" in caught.value.remedy


def test_nobody_is_seeded_by_default() -> None:
    assert resolve("auto", greedy=False) == "auto"


def test_a_lossy_rule_runs_only_where_it_was_allowed() -> None:
    assert resolve("typical", greedy=False, allow_lossy=True) == "typical"
    with pytest.raises(ConfigError, match="lossy"):
        resolve("typical", greedy=True, seeded=True)
    with pytest.raises(ConfigError, match="temperature"):
        resolve("greedy", greedy=False, allow_lossy=True)


def test_every_rule_says_what_it_is() -> None:
    assert all(rule.name == name for name, rule in RULES.items())
    assert [name for name in ("auto", *RULES) if is_lossless(name)] == ["auto", "greedy", "rejection", "block", "coupled", "tree", "traversal"]
    assert [name for name in ("auto", *RULES) if needs_race(name)] == ["coupled"]
    assert [name for name, rule in RULES.items() if not rule.takes_trees] == ["rejection", "block"]


def test_auto_is_settled_by_what_was_drafted() -> None:
    laws = torch.full((1, 4), 0.25)

    def draft(parents: tuple[int, ...], sampled: tuple[bool, ...], law_of_row: tuple[int, ...]) -> Draft:
        """Behind a request without guesses, so that its rows do not start at 0."""
        mass = Mass(laws, (-1, *law_of_row)) if any(law >= 0 for law in law_of_row) else None
        return Draft(torch.zeros(len(parents), dtype=torch.int64), parents, (0, 0, len(parents)), ("toy",) * 2, sampled if mass else (), mass)

    none = (False, False)
    assert rule_for(draft((), (), (-1,)), 1) == "rejection"
    assert rule_for(draft((-1, 0), none, (-1, -1, -1)), 1) == "rejection"
    assert rule_for(draft((-1, -1), none, (-1, -1, -1)), 1) == "tree"
    assert rule_for(draft((-1, 0), (False, True), (-1, 0, -1)), 1) == "block"
    assert rule_for(draft((), (), (0,)), 1) == "block"
    assert rule_for(draft((-1, 0), none, (-1, -1, 0)), 1) == "block"
    assert rule_for(draft((-1, 0), (False, False), (0, -1, -1)), 1) == "tree"  # a missing draw beside a deterministic child
    assert rule_for(draft((-1, 0), (False, True), (-1, 0, -1)), 0) == "rejection"
    unmarked = Draft(torch.zeros(2, dtype=torch.int64), (-1, 0), (0, 2), ("toy",), (), Mass(laws, (-1, 0, -1)))  # all deterministic
    assert rule_for(unmarked, 0) == "tree"
    unequal = Draft(torch.zeros(2, dtype=torch.int64), (-1, -1), (0, 2), ("toy",))
    assert rule_for(unequal, 0) == "tree"
