"""Loads the drafters that requests name, each once, while other requests run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from foretoken.config import SpecConfig
from foretoken.draft.base import AdaptableDrafter, Drafter, ModelDrafter, parts_of
from foretoken.draft.group import DrafterGroup, own_drafters
from foretoken.draft.head_drafter import HeadDrafter
from foretoken.engine.drafters import DrafterFactory, limit_of
from foretoken.engine.turns import Turns
from foretoken.heads.weights import head_bytes
from foretoken.model.interface import LanguageModel


class DrafterLoader:
    """Makes drafters in the thread that asks and adds them to `group` between two steps.

    `check_open` raises when the engine was closed meanwhile; `on_load` is called with a drafter's configuration, the
    models of its own that it runs, and the memory of its trained heads.
    """

    def __init__(
        self,
        factory: DrafterFactory,
        group: DrafterGroup,
        turns: Turns,
        check_open: Callable[[], object],
        on_load: Callable[[SpecConfig, Sequence[LanguageModel], int], object],
    ) -> None:
        self.factory, self._group, self._turns = factory, group, turns
        factory.between_steps = lambda: turns.lock
        self._check_open, self._on_load = check_open, on_load
        self._loading = threading.Lock()  # one drafter at a time: two threads may want the same one

    def has_all(self, spec: SpecConfig) -> bool:
        """Whether every drafter that `spec` names is loaded."""
        return all(key in self._group.drafters for key in own_drafters(spec))

    def load(self, spec: SpecConfig) -> None:
        """Load what `spec` names and is not loaded yet; only adding a drafter waits for the step that runs.

        Raises:
            InputError, ModelError, StorageError: see `DrafterFactory.make`.
        """
        if self.has_all(spec):
            return
        with self._loading:
            for key, own in own_drafters(spec).items():
                if key not in self._group.drafters:
                    made = self.factory.make(own)
                    with self._turns.lock:  # a step goes through all drafters
                        self._check_open()
                        self._group.add(key, made, limit_of(own))
                    parts = [part for _, part in parts_of(own, made)]
                    models = [model for part in parts if isinstance(part, ModelDrafter) for model in part.models()]
                    self._on_load(own, models, sum(map(_head_bytes, parts)))


def _head_bytes(drafter: Drafter) -> int:
    """Memory of a drafter's trained head and its full cache; 0 without a head."""
    if not isinstance(drafter, HeadDrafter) or not isinstance(drafter, AdaptableDrafter):
        return 0
    return head_bytes(drafter.head) + drafter.cache_bytes
