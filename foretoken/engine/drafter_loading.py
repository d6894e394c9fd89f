"""Loads the drafters that requests name, each once, while other requests run, and resets them between requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from foretoken.config import SpecConfig
from foretoken.draft.base import AdaptableDrafter, Drafter, DrafterKey, ModelDrafter, Resets, parts_of
from foretoken.draft.group import DrafterGroup, own_drafters
from foretoken.draft.head_drafter import HeadDrafter
from foretoken.engine.drafters import DrafterFactory, limit_of
from foretoken.engine.turns import Turns
from foretoken.heads.kind import kind_of_head, with_head_kind
from foretoken.heads.weights import head_bytes
from foretoken.model.interface import LanguageModel
from foretoken.registry import DRAFTERS


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
        self._head_kinds: dict[str, str] = {}  # by the head's name
        self._specs: dict[DrafterKey, SpecConfig] = {}  # of every drafter that was loaded
        self._loading = threading.Lock()  # one drafter at a time: two threads may want the same one

    def with_head_kind(self, spec: SpecConfig) -> SpecConfig:
        """`heads.kind.with_head_kind`; the files of each head are read once.

        Raises:
            CheckpointError, UnsupportedModelError, ConfigError: see there.
        """
        return with_head_kind(spec, self._kind_of)

    def _kind_of(self, head: str) -> str:
        if head not in self._head_kinds:
            self._head_kinds[head] = kind_of_head(head)
        return self._head_kinds[head]

    def has_all(self, spec: SpecConfig) -> bool:
        """Whether every drafter that `spec` names is loaded; reads no file."""
        if spec.needs_head_kind and spec.head not in self._head_kinds:
            return False
        spec = self.with_head_kind(spec)
        return all(key in self._group.drafters for key in own_drafters(spec))

    def load(self, spec: SpecConfig) -> None:
        """Load what `spec` names and is not loaded yet; only adding a drafter waits for the step that runs.

        Raises:
            InputError, ModelError, StorageError: see `DrafterFactory.make`.
        """
        if self.has_all(spec):
            return
        spec = self.with_head_kind(spec)
        with self._loading:
            for key, own in own_drafters(spec).items():
                if key not in self._group.drafters:
                    self._specs[key], made = own, self.factory.make(own)
                    with self._turns.lock:  # a step goes through all drafters
                        self._check_open()
                        self._group.add(key, made, limit_of(own))
                    parts = [part for _, part in parts_of(own, made)]
                    models = [model for part in parts if isinstance(part, ModelDrafter) for model in part.models()]
                    self._on_load(own, models, sum(map(_head_bytes, parts)))

    def loaded(self, spec: SpecConfig | None) -> dict[DrafterKey, Drafter]:
        """The drafters of `spec` that are loaded; None: all."""
        found = dict(self._group.drafters)
        if spec is None:
            return found
        return {key: found[key] for key in own_drafters(self.with_head_kind(spec)) if key in found}

    def reset(self, spec: SpecConfig | None) -> list[Drafter]:
        """Reset the loaded drafters of `spec` (None: all) while there is no request. Those that cannot be reset are
        taken out and returned: keep them until new ones are loaded, which then share the weights of draft models.
        """
        replaced: list[Drafter] = []
        with self._turns.lock:
            for key, drafter in self.loaded(spec).items():
                if isinstance(drafter, Resets) and _resets_wholly(self._specs.get(key)):
                    drafter.reset()
                else:
                    replaced.append(self._group.drafters.pop(key))
        return replaced

    def take(self, spec: SpecConfig) -> dict[DrafterKey, Drafter]:
        """The loaded drafters of `spec`, with all they keep; no request uses them until they are `put` back."""
        with self._turns.lock:
            return {key: self._group.drafters.pop(key) for key in self.loaded(spec)}

    def put(self, drafters: Mapping[DrafterKey, Drafter]) -> None:
        """Serve requests with `drafters`, in place of loaded ones of the same keys."""
        with self._turns.lock:
            self._group.drafters.update(drafters)


def _resets_wholly(spec: SpecConfig | None) -> bool:
    """Whether `reset` of a drafter reaches all of its parts: added ones need not have it."""
    return spec is None or not spec.is_composite or spec.leaves <= DRAFTERS.keys()


def _head_bytes(drafter: Drafter) -> int:
    """Memory of a drafter's trained head and its full cache; 0 without a head."""
    if not isinstance(drafter, HeadDrafter) or not isinstance(drafter, AdaptableDrafter):
        return 0
    return head_bytes(drafter.head) + drafter.cache_bytes
