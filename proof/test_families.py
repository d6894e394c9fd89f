"""Every causal family that transformers registers is run exactly, refused by name, or cannot be built here;
docs/models.md says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.pool import AsyncResult

import pytest

from proof import families
from tests.helpers.family_trial import HOWS, NOT_BUILT, REFUSED, Finding

FAMILIES = families.families()


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, AsyncResult[Finding]]]:
    with families.sweep(FAMILIES) as results:
        yield results


@pytest.mark.parametrize("family", FAMILIES)
def test_e4_every_family_is_exact_or_refused_by_name(family: str, results: dict[str, AsyncResult[Finding]]) -> None:
    finding = results[family].get()
    assert finding.how in HOWS
    assert finding.differences == ()
    assert finding.note or finding.how not in (REFUSED, NOT_BUILT)


def test_the_page_is_what_was_found(results: dict[str, AsyncResult[Finding]]) -> None:
    found = families.page([result.get() for result in results.values()])
    assert families.TABLE.read_text(encoding="utf-8") == found, "run `python -m proof.families --write`"
