"""On-line adaptation as an observer of the engine."""

from __future__ import annotations

from foretoken.adapt.adapter import Adapter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView
from foretoken.engine_config import EngineConfig
from foretoken.errors import InputError
from foretoken.model.interface import SharesWeights


class AdaptationWatcher:
    """Tells an `Adapter` what happens; see `watch.RoundWatcher`. Answers do not depend on what it changes."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def begin(self, state: RequestState) -> None:
        """A request was queued."""
        self._adapter.begin(state.request)

    def round(self, view: RoundView) -> None:
        """A draft token was rejected where the rule corrected it, or where the target chose another token than it."""
        num_accepted = len(view.verdict.accepted[view.b])
        if view.draft.lengths[view.b] and view.verdict.next_kinds[view.b] == "residual":
            self._adapter.rejected(view.entry.request.request_id, view.entry.round_start + num_accepted)

    def end(self, state: RequestState) -> None:
        """A request is over."""
        self._adapter.end(state.request_id)

    def between_steps(self) -> None:
        """The place where weights change."""
        self._adapter.between_steps()

    def close(self) -> None:
        """Learning ends."""
        self._adapter.close()


def adapt(engine: Engine, config: EngineConfig) -> Adapter | None:
    """Let the drafters of `engine` learn while it serves, where `config` asks for it.

    Raises:
        InputError: the target has no weights that trained heads share.
    """
    if config.adaptation is None:
        return None
    if not isinstance(engine.target, SharesWeights):
        raise InputError("adapt", config.adapt, "trained heads need a target that our own decoder runs")
    adapter = Adapter(engine.target, engine.drafters.drafters, config.adaptation)
    engine.drafters.hidden_states.listener = adapter
    engine.watchers.append(AdaptationWatcher(adapter))
    return adapter
