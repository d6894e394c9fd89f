"""What must hold after every test: no block is lost, and nothing is kept for a request that is over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from foretoken.draft.block import BlockDrafter
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.eagle import EagleDrafter, MtpDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.draft.medusa import MedusaDrafter
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.other_vocabulary import OtherVocabularyDrafter
from foretoken.draft.own_cache import OwnCache
from foretoken.draft.predicted import PredictedDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.llm import LLM
from foretoken.engine.startup.profiling import StandInDrafter
from foretoken.model.paged import PagedModel
from tests.helpers import faults
from tests.helpers.scripted import ScriptedModel

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
_num_faults: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # those that were looked at

# What a drafter still keeps, by request; a new drafter adds a line.
KEPT_BY_DRAFTER: dict[type, Callable[[Any], object]] = {
    NgramDrafter: lambda drafter: drafter._indexes,
    SuffixDrafter: lambda drafter: drafter._indexes or drafter._requests,
    PredictedDrafter: lambda drafter: drafter._indexes,
    LookaheadDrafter: lambda drafter: drafter._requests,
    RecyclingDrafter: lambda drafter: None,  # the matrix is everybody's
    DraftModelDrafter: lambda drafter: drafter._texts or drafter._held or kept_in(drafter._cache),
    EarlyExitDrafter: lambda drafter: drafter._recent,
    OtherVocabularyDrafter: lambda drafter: drafter._texts or drafter._cached or kept_in(drafter._cache),
    CascadeDrafter: lambda drafter: (
        drafter._texts
        or any(level.ran or kept_in(level.cache) for level in drafter.levels)
        or (drafter.lookup is not None and kept_by(drafter.lookup))
    ),
    MixDrafter: lambda drafter: drafter._drawn or any(kept_by(part) for part in drafter.parts),
    EagleDrafter: lambda drafter: drafter._texts or kept_states(drafter),
    MtpDrafter: lambda drafter: drafter._texts or kept_states(drafter),
    MedusaDrafter: lambda drafter: drafter._requests,
    BlockDrafter: lambda drafter: kept_states(drafter),
    StandInDrafter: lambda drafter: None,
}


def kept_by(drafter: Any) -> object:
    """What a drafter still keeps, by request."""
    return KEPT_BY_DRAFTER[type(drafter)](drafter)


def kept_states(drafter: EagleDrafter | BlockDrafter) -> object:
    """What a head with a cache still keeps, by request."""
    return drafter.kept or drafter.cache.tables or drafter.cache.check()  # type: ignore[func-returns-value]


def kept_in(cache: OwnCache) -> object:
    """What the cache of a drafter's model still keeps, by request."""
    return cache._tenants or cache._used or cache._readers or open_sequences(cache.model)


def watch() -> None:
    """Remember every engine and paged model from now on."""
    for kind in (Engine, PagedModel):

        def remember(self: Any, *arguments: Any, _made: Callable[..., None] = kind.__init__, **options: Any) -> None:
            _made(self, *arguments, **options)
            _seen.add(self)

        kind.__init__ = remember  # type: ignore[method-assign]


def open_sequences(model: object) -> list[int]:
    """Sequences that a model still holds."""
    model = getattr(model, "inner", model)  # with other columns
    if isinstance(model, PagedModel):
        return list(model.tables)
    if isinstance(model, ScriptedModel):
        return list(model.sequences)
    return list(model._sequences)  # type: ignore[attr-defined]


def check_all() -> None:
    """Every model conserves its blocks; every idle engine holds nothing; no engine has contained a fault that no test
    injected.
    """
    told = faults.were_raised()
    for thing in list(_seen):
        if isinstance(thing, Engine):
            before, _num_faults[thing] = _num_faults.get(thing, 0), thing.stats.num_faults
            assert told or thing.stats.num_faults == before, "something raised inside the engine, see the warnings"
        if isinstance(thing, PagedModel):
            thing.check()
        elif not thing.states:
            check_idle(thing)


def check_idle(engine: Engine | LLM) -> None:
    """Nothing is left of any request: queue, caches, drafters."""
    if isinstance(engine, LLM):
        engine = engine.engine
    assert not engine.states
    assert not engine.has_work
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert not engine.scheduler._lost
    assert not engine.scheduler.urgencies
    assert not open_sequences(engine.target)
    assert engine.target.num_free_tokens() == engine.target.capacity_tokens
    for drafter in engine.drafters.drafters.values():
        assert not kept_by(getattr(drafter, "inner", drafter))  # a `Watched` one
