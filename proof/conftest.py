"""The long proofs run under the same conditions as the tests: seeded, with a cache folder of their own, audited after each."""

from __future__ import annotations

from tests.conftest import conserved, llm, own_cache, pair, pytest_collection_modifyitems, pytest_runtest_setup, text_pair

__all__ = ["conserved", "llm", "own_cache", "pair", "pytest_collection_modifyitems", "pytest_runtest_setup", "text_pair"]
