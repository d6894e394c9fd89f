"""What every drafter owes the engine, over every draft length, size of batch and rule; the tests take some."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest

from foretoken import LLM, SpecConfig
from tests.draft import test_contract as contract
from tests.draft.test_contract import llm, name, pair, plain, spec, watched
from tests.helpers.usual import some_of
from tests.helpers.watch import Watched

__all__ = ["llm", "name", "pair", "plain", "spec", "watched"]  # fixtures

BATCHES = (1, 4, 16)
# Every number of draft tokens in one size of batch, and every size with three numbers, none of which the tests take.
USUAL = {(num_draft, BATCHES[(num_draft + 2) % 3]) for num_draft in range(9)}


@pytest.mark.parametrize(
    ("num_draft", "batch"), some_of(itertools.product(range(9), BATCHES), USUAL, pytest.mark.release)
)
def test_greedy_equals_plain(
    llm: LLM,
    pair: SimpleNamespace,
    watched: Watched,
    spec: functools.partial[SpecConfig],
    plain: contract.Outputs,
    num_draft: int,
    batch: int,
) -> None:
    contract.test_greedy_equals_plain(llm, pair, watched, spec, plain, num_draft, batch)


@pytest.mark.parametrize("rule", ["rejection"])
def test_chains_under_the_other_chain_rule(
    llm: LLM, watched: Watched, spec: functools.partial[SpecConfig], name: str, plain: contract.Outputs, rule: str
) -> None:
    contract.test_trees_where_the_rule_takes_them_and_chains_elsewhere(llm, watched, spec, name, plain, rule)


@pytest.mark.parametrize("temperature", [0.3])
def test_sampled_drafts_keep_the_contract_at_another_temperature(
    llm: LLM, watched: Watched, spec: functools.partial[SpecConfig], plain: contract.Outputs, temperature: float
) -> None:
    contract.check_sampled_drafts(llm, watched, spec, plain, temperature)
