"""Drafts with another tokenizer over every number of draft tokens and size of batch; the tests take some."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken import LLM
from tests.draft import test_other_vocabulary as other_vocabulary
from tests.draft.test_other_vocabulary import folders, foreign, watched
from tests.helpers.watch import Watched

__all__ = ["folders", "foreign", "watched"]  # fixtures
pytestmark = other_vocabulary.pytestmark


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("num_draft", [0, 1, 3, 8])
def test_greedy_equals_plain(
    foreign: LLM, folders: dict[str, Path], watched: list[Watched], num_draft: int, batch: int
) -> None:
    other_vocabulary.test_greedy_equals_plain(foreign, folders, watched, num_draft, batch)
