"""The registry, the choice of a rule by name and by what was drafted, and what each rule says of itself."""

import pytest
import torch

from foretoken.core import Draft, Mass, Uniforms
from foretoken.errors import ConfigError
from foretoken.verify import RULES, first_max, is_lossless, needs_race, needs_uniforms, resolve, rule_for, takes_trees

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


@pytest.mark.parametrize(
    ("name", "value"), [("greedy", "rule='greedy'"), ("typical", "rule='typical'"), ("nonsense", "rule='nonsense'")]
)
def test_resolve_refuses(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value) as caught:
        resolve(name, greedy=False)
    assert caught.value.field == "rule"
    assert "auto" in caught.value.remedy


def test_nobody_is_seeded_by_default() -> None:
    assert resolve("auto", greedy=False) == "auto"


def test_the_rule_does_not_follow_from_what_was_drawn() -> None:
    assert resolve("auto", greedy=False, shape_follows_draws=True) == "tree"
    assert resolve("auto", greedy=False, seeded=True, shape_follows_draws=True) == "coupled"
    assert resolve("auto", greedy=True, shape_follows_draws=True) == "greedy"


def test_a_lossy_rule_runs_only_where_it_was_allowed() -> None:
    assert resolve("typical", greedy=False, allow_lossy=True) == "typical"
    with pytest.raises(ConfigError, match="lossy"):
        resolve("typical", greedy=True, seeded=True)
    with pytest.raises(ConfigError, match="temperature"):
        resolve("greedy", greedy=False, allow_lossy=True)


def test_every_rule_says_what_it_is() -> None:
    assert all(rule.name == name for name, rule in RULES.items())
    assert [name for name in ("auto", *RULES) if is_lossless(name)] == [
        "auto",
        "greedy",
        "rejection",
        "block",
        "coupled",
        "tree",
        "traversal",
    ]
    assert [name for name in ("auto", *RULES) if needs_race(name)] == ["coupled"]
    assert [name for name in ("auto", *RULES) if not takes_trees(name)] == ["rejection", "block"]
    assert [name for name in ("auto", *RULES) if not needs_uniforms(name)] == ["greedy", "coupled"]


@pytest.mark.parametrize("name", [name for name in RULES if not needs_uniforms(name)])
def test_a_rule_that_needs_no_uniforms_reads_none(name: str) -> None:
    """It decides the same when they are no numbers."""
    generator = torch.Generator().manual_seed(0)
    draft = Draft(torch.tensor([3, 1, 3, 2]), (-1, 0, -1, 0), (0, 2, 2, 4), ("toy",) * 3)
    verdicts = []
    for trial in range(20):
        probs = torch.rand(7, 5, generator=generator)
        race = tuple(torch.rand(rows, 5, generator=generator) for rows in (3, 1, 3))
        for fill in (0.0, 1.0 - 2**-53, torch.nan):
            verdicts.append(
                RULES[name].verify(draft, probs, Uniforms(torch.full((4,), fill), torch.full((3,), fill), race))
            )
        assert verdicts[3 * trial] == verdicts[3 * trial + 1] == verdicts[3 * trial + 2]
    assert len({verdict.accepted for verdict in verdicts}) > 3


def test_the_first_of_the_largest() -> None:
    """As `Tensor.argmax`, in every precision, ties and numbers that are none included."""
    rows = torch.randint(-9, 9, (50, 12), generator=torch.Generator().manual_seed(1)).float()
    rows[0, 5], rows[1] = torch.nan, -torch.inf
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        found = first_max(rows.to(dtype))
        assert found.dtype == torch.int64
        assert (
            found.tolist()
            == rows.argmax(-1).tolist()
            == [5, 0, *((row == row.max()).nonzero()[0].item() for row in rows[2:])]
        )
    assert first_max(rows[:0]).shape == (0,)


def test_auto_is_settled_by_what_was_drafted() -> None:
    distributions = torch.full((1, 4), 0.25)

    def draft(parents: tuple[int, ...], sampled: tuple[bool, ...], distribution_of_row: tuple[int, ...]) -> Draft:
        """Behind a request without draft tokens, so that its rows do not start at 0."""
        mass = (
            Mass(distributions, (-1, *distribution_of_row))
            if any(distribution >= 0 for distribution in distribution_of_row)
            else None
        )
        return Draft(
            torch.zeros(len(parents), dtype=torch.int64),
            parents,
            (0, 0, len(parents)),
            ("toy",) * 2,
            sampled if mass else (),
            mass,
        )

    none = (False, False)
    assert rule_for(draft((), (), (-1,)), 1) == "rejection"
    assert rule_for(draft((-1, 0), none, (-1, -1, -1)), 1) == "rejection"
    assert rule_for(draft((-1, -1), none, (-1, -1, -1)), 1) == "tree"
    assert rule_for(draft((-1, 0), (False, True), (-1, 0, -1)), 1) == "block"
    assert rule_for(draft((), (), (0,)), 1) == "block"
    assert rule_for(draft((-1, 0), none, (-1, -1, 0)), 1) == "block"
    assert (
        rule_for(draft((-1, 0), (False, False), (0, -1, -1)), 1) == "tree"
    )  # a missing draw beside a deterministic child
    assert rule_for(draft((-1, 0), (False, True), (-1, 0, -1)), 0) == "rejection"
    unmarked = Draft(
        torch.zeros(2, dtype=torch.int64), (-1, 0), (0, 2), ("toy",), (), Mass(distributions, (-1, 0, -1))
    )  # all deterministic
    assert rule_for(unmarked, 0) == "tree"
    unequal = Draft(torch.zeros(2, dtype=torch.int64), (-1, -1), (0, 2), ("toy",))
    assert rule_for(unequal, 0) == "tree"
