"""The dials of the policy: each explained once, in docs/controller.md too, and what the study of them measures."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from foretoken.control.config import DEFAULT
from studies.dials import __main__ as study
from studies.dials.dials import NEUTRAL, named_dials, table, variants, with_dials
from studies.worlds import data
from studies.worlds.worlds import World

PAGE = Path(__file__).parents[2] / "docs" / "controller.md"


def test_the_documentation_lists_every_dial() -> None:
    page = PAGE.read_text(encoding="utf-8")
    listed = page.partition("<!-- dials -->\n")[2].partition("<!-- end of dials -->")[0]
    assert listed.strip().splitlines() == table(), "python -m studies.dials --table"


def test_dials_are_frozen_and_named_once() -> None:
    names = [name for name, _ in named_dials()]
    assert len(names) == len(set(names)) >= 40
    with pytest.raises(FrozenInstanceError):
        DEFAULT.cost.pace_ratio = 1.0  # type: ignore[misc]


def test_other_values() -> None:
    changed = with_dials({"cost.pace_ratio": 4.0, "first_rows": 2})
    assert (changed.cost.pace_ratio, changed.first_rows) == (4.0, 2)
    assert with_dials({}) == DEFAULT
    for one in variants():
        assert set(named_dials(one.config)) - set(named_dials()) == {(one.dial, one.value)}
    assert {one.dial for one in variants(("neutral",))} == set(NEUTRAL)


def test_worse_is_beyond_the_scatter_of_the_seeds() -> None:
    assert study.is_worse([0.97, 0.98, 0.97, 0.98, 0.97])
    assert not study.is_worse([0.80, 1.05, 0.99, 1.02, 0.98])
    assert not study.is_worse([1.0] * 5)


def test_an_interrupted_study_goes_on_and_writes_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    run = study.run
    monkeypatch.setattr(study, "run", lambda *told: ran.append(told[-1]) or run(*told))
    world = World(sorted(data.profiles())[0], ("edit",), 1)
    kept, wanted = tmp_path / "dials.jsonl", variants(("neutral",))[:1]
    first = study.measure(kept, [world], 2, wanted)
    assert ran == [0, 1, 0, 1]
    kept.write_text("".join(kept.read_text("utf-8").splitlines(keepends=True)[:-1]), "utf-8")
    assert study.measure(kept, [world], 2, wanted) == first
    assert ran == [0, 1, 0, 1, 1]
    raw = study.write(tmp_path, first, "python -m studies.dials")
    assert wanted[0].dial in raw.with_suffix(".md").read_text("utf-8")
