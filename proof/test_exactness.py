"""Greedy and seeded answers of every drafter with every prompt, draft length and temperature; the tests take some."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken import LLM
from tests.engine import test_coupled as coupled
from tests.engine import test_exactness as exactness
from tests.engine.test_exactness import reference

__all__ = ["reference"]  # a fixture


# Every `stride`-th turn: in each, every prompt meets another drafter. Four neighbours in a batch, or the sizes of batch
# in turn, leave no drafter out.
STRIDES = [3, pytest.param(1, marks=pytest.mark.release)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_greedy_equals_transformers(
    llm: LLM, pair: SimpleNamespace, reference: exactness.Answers, batch: int, stride: int
) -> None:
    exactness.test_greedy_equals_transformers(llm, pair, reference, batch, stride)


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.release)])
@pytest.mark.parametrize("temperature", coupled.TEMPERATURES)
def test_the_text_of_a_seed_is_the_text_without_drafts(
    llm: LLM, pair: SimpleNamespace, temperature: float, stride: int
) -> None:
    coupled.check_texts(llm, pair, temperature, first_turn=0, stride=stride)
