"""C1, C5: every verb prints hostile strings whole and harmless; a third of the strings for each verb here, the whole
product in `proof/`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.helpers.hostile_scenes import SCENES, play
from tests.helpers.hostile_strings import ENCODINGS, STRINGS, WIDTHS, check

_PLACES = list(itertools.product(WIDTHS, ENCODINGS))


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.filterwarnings("default::UserWarning")
def test_c1_every_verb_prints_hostile_strings_whole(
    scene: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strings, widths and encodings take turns, in another order for each verb."""
    first = list(SCENES).index(scene)
    for place, (name, text) in enumerate(list(STRINGS.items())[first % 3 :: 3]):
        width, encoding = _PLACES[(first + place) % len(_PLACES)]
        played, done = play(monkeypatch, tmp_path, scene, text, width, encoding)
        try:
            check(played, done, text, width, encoding)
        except AssertionError as error:
            raise AssertionError(
                f"{name}, {width} columns, {encoding}: {error}\n{done.out[:3000]}\n{done.err[:3000]}"
            ) from error
