"""What an engine keeps from one answer to the next, emptied: otherwise a repeat is drafted from its own earlier answer.

Every drafter is made anew, not only those that are known to keep something: a new kind of drafter cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Protocol

from foretoken.config import SpecConfig
from foretoken.draft.base import Drafter, DrafterKey
from foretoken.draft.group import own_drafters


class DrafterTable(Protocol):
    """The loaded drafters of an engine."""

    @property
    def drafters(self) -> MutableMapping[DrafterKey, Drafter]: ...  # noqa: D102


class HasDrafterTable(Protocol):
    """An engine with its drafters."""

    @property
    def drafters(self) -> DrafterTable: ...  # noqa: D102


class Renewable(Protocol):
    """The part of `foretoken.LLM` that is used."""

    @property
    def engine(self) -> HasDrafterTable:
        """Its drafters are taken out between two answers."""
        ...

    def prepare(self, spec: SpecConfig) -> None:
        """Make the drafters of `spec` that are missing."""
        ...


def renew_drafters(llm: Renewable, spec: SpecConfig) -> None:
    """Replace every drafter that serves `spec` by a new one without state, between two answers.

    The old ones are dropped last, so that the weights of their draft models are shared and not loaded again. Drafters
    of other configurations stay as they are.

    Raises:
        InputError, ModelError, StorageError: see `LLM.prepare`.
    """
    loaded = llm.engine.drafters.drafters
    old = [loaded.pop(key) for key in own_drafters(spec) if key in loaded]
    llm.prepare(spec)
    old.clear()


def take_drafters(llm: Renewable, spec: SpecConfig) -> dict[DrafterKey, Drafter]:
    """The drafters that serve `spec`, taken out of the engine with all they keep."""
    loaded = llm.engine.drafters.drafters
    return {key: loaded.pop(key) for key in own_drafters(spec) if key in loaded}


def put_drafters(llm: Renewable, drafters: MutableMapping[DrafterKey, Drafter]) -> None:
    """Let the engine use drafters that `take_drafters` returned."""
    llm.engine.drafters.drafters.update(drafters)
