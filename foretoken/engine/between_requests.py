"""The drafters of an `LLM`, loaded while it answers; and what requests leave for later ones, put away between them, so
that measured answers are independent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from foretoken.config import SpecConfig
from foretoken.control.chooser import Policy
from foretoken.draft.base import Drafter, DrafterKey
from foretoken.engine.admission import check_spec
from foretoken.engine.drafters import DrafterLoader
from foretoken.engine.driver import Driver, Turns
from foretoken.errors import InputError


class BetweenRequests(ABC):
    """The methods of `LLM` that load drafters, and reset or exchange them and the controller's policy while no request
    runs.
    """

    folder: Path
    _turns: Turns

    def prepare(self, spec: SpecConfig) -> None:
        """Load the drafters that `spec` names, each once; requests go on meanwhile.

        Raises:
            InputError, ModelError, StorageError: see `DrafterFactory.make`.
        """
        check_spec(spec)
        self._open_loader().load(spec)

    def loaded_drafters(self, spec: SpecConfig | None = None) -> tuple[Drafter, ...]:
        """The loaded drafters of `spec` in its order; None: all.

        Raises:
            InputError: no `SpecConfig`, or closed.
        """
        if spec is not None:
            check_spec(spec)
        return tuple(self._open_loader().loaded(spec).values())

    def reset_drafters(self, spec: SpecConfig | None = None) -> None:
        """Let the drafters of `spec` (None: all that are loaded) forget earlier requests, as if each had just been
        loaded; those of `spec` that are missing are loaded. Weights stay, and the target's prefix cache does: give
        requests a `SamplingParams.tenant` each where they may not share it.

        A drafter without a `reset` (`draft.base.Resets`) is made anew.

        Raises:
            InputError: requests are running; see `prepare` for the rest.
        """
        loader = self._open_loader()
        if spec is not None:
            check_spec(spec)
            spec = loader.with_head_kind(spec)
        with self._turns.lock:
            self._check_idle("drafters are reset")
            replaced = loader.reset(spec)
        if spec is not None:
            loader.load(spec)
        replaced.clear()  # not before: what is loaded shares the weights of what is in use

    def take_drafters(self, spec: SpecConfig) -> dict[DrafterKey, Drafter]:
        """Take the drafters of `spec` out, with all they remember.

        Raises:
            InputError: requests are running.
        """
        check_spec(spec)
        loader = self._open_loader()
        spec = loader.with_head_kind(spec)
        with self._turns.lock:
            self._check_idle("drafters are exchanged")
            return {key: loader.group.drafters.pop(key) for key in loader.loaded(spec)}

    def put_drafters(self, drafters: Mapping[DrafterKey, Drafter]) -> None:
        """Use drafters that `take_drafters` returned, or others under their keys (`draft.group.drafter_key`), from the
        next request on.

        Raises:
            InputError: requests are running.
        """
        loader = self._open_loader()
        with self._turns.lock:
            self._check_idle("drafters are exchanged")
            loader.group.drafters.update(drafters)

    def reset_controller(self, policy: Policy | None = None) -> Policy:
        """Let the controller forget what it has observed (step times, acceptance), except the costs it began with; or
        let it go on with `policy`, which an earlier call returned. Returns the policy in use from now on.

        Raises:
            InputError: requests are running.
        """
        with self._turns.lock:
            self._check_idle("the controller is reset")
            return self._check_free().engine.chooser.reset(policy)

    @abstractmethod
    def _open_loader(self) -> DrafterLoader:
        """What loads drafters; refuses when this was closed."""

    @abstractmethod
    def _check_free(self) -> Driver:
        """What runs the engine; refuses when this was closed or has an owner."""

    def _check_idle(self, what: str) -> None:
        """Refuse while there are requests, whose drafters and policy know about them."""
        if self._check_free().engine.has_work:
            remedy = f"still answers requests, and {what} between requests: let them end, or close their streams"
            raise InputError("llm", str(self.folder), remedy)
