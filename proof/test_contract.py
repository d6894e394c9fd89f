"""What every drafter owes the engine, over every number of guesses, size of batch and rule; the tests take some."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from foretoken import LLM, SpecConfig
from tests.draft import test_contract as contract
from tests.draft.test_contract import llm, name, pair, plain, spec, watched
from tests.helpers.watch import Watched

__all__ = ["llm", "name", "pair", "plain", "spec", "watched"]  # fixtures


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("num_draft", range(9))
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
