"""The long proofs run under the same conditions as the tests: seeded, with a cache folder of their own, audited after
each.
"""

from __future__ import annotations

from tests.conftest import (
    conserved,
    failed_drafters,
    llm,
    mtp_llm,
    mtp_pair,
    own_cache,
    pair,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_setup,
    smollm2_file,
    sound_drafters,
    text_pair,
    usual_pair,
)

__all__ = [
    "conserved",
    "failed_drafters",
    "llm",
    "mtp_llm",
    "mtp_pair",
    "own_cache",
    "pair",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_setup",
    "smollm2_file",
    "sound_drafters",
    "text_pair",
    "usual_pair",
]
