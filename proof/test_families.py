"""Every causal family that transformers registers is run exactly, refused by name, or cannot be built here;
docs/models.md says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from proof import families
from tests.helpers.family_trial import HOWS, NOT_BUILT, REFUSED, Finding
from tests.helpers.usual import some_of


@pytest.fixture(scope="module")
def find() -> Iterator[Callable[[str], Finding]]:
    """`families.find` in a process of its own: what a family leaves behind touches no other test."""
    with families.new_pool(1) as pool:
        yield lambda family: pool.apply(families.find, (family,))


@pytest.mark.parametrize("family", some_of(families.families(), families.MECHANISMS, pytest.mark.release))
def test_e4_every_family_is_exact_or_refused_by_name(family: str, find: Callable[[str], Finding]) -> None:
    """And it is what its line of the page says."""
    finding = find(family)
    assert finding.how in HOWS
    assert finding.differences == ()
    assert finding.note or finding.how not in (REFUSED, NOT_BUILT)
    lines = families.TABLE.read_text(encoding="utf-8").splitlines()
    assert families.row(finding) in lines, f"run `python -m proof.families --write {family}`"


def test_the_page_has_every_family_and_all_that_is_said_about_them() -> None:
    written = families.read_page()
    assert set(written) == set(families.families())
    found = families.page([Finding(family, how, note) for family, (how, note) in written.items()])
    assert families.TABLE.read_text(encoding="utf-8") == found, "run `python -m proof.families --write`"
