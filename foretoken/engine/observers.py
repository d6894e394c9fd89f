"""Observers of the engine: the event log and on-line adaptation.

The event log has one JSON line per event, for other tools to read; its schema is in docs/trace.md.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from foretoken.adapt.adapter import Adapter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView, Watcher
from foretoken.engine_config import EngineConfig
from foretoken.errors import InputError, StorageError
from foretoken.model.interface import SharesWeights

SCHEMA = 1


class Trace(Watcher):
    """Appends one JSON object per line to a file: `begin` and `end` of every request, and each `round`.

    If a line cannot be written, `error` holds the reason; the engine removes the log, and it ends there.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: StorageError | None = None
        try:
            self._file = path.open("a", encoding="utf-8", buffering=1)  # whole lines, so that a crash loses none
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise StorageError(f"cannot write the trace {path}: {error}") from error

    def begin(self, state: RequestState) -> None:
        """A request was queued."""
        request = state.request
        self._write(
            "begin",
            state.request_id,
            num_prompt_tokens=len(request.prompt_ids),
            seed=request.seed,
            drafter=request.spec.drafter,
            draft=request.spec.draft,
            rule=state.rule,
            lossy=state.stats.lossy,
            temperature=request.params.temperature,
            max_tokens=request.params.max_tokens,
        )

    def round(self, view: RoundView) -> None:
        """A round of one request: drafted tokens, their acceptance probabilities, emitted tokens."""
        draft, verdict, output, clock, b = view.draft, view.verdict, view.output, view.clock, view.b
        nodes = slice(draft.offsets[b], draft.offsets[b + 1])
        chances = verdict.probabilities[b] if verdict.probabilities else (None,) * draft.lengths[b]
        self._write(
            "round",
            output.request_id,
            place=view.entry.round_start,
            drafter=draft.drafters[b],
            drafted=draft.host_tokens[nodes],
            parents=list(draft.parents[nodes]),
            num_probed=draft.probe_lengths[b],
            accepted=list(verdict.paths[b]),
            probabilities=[None if chance is None else round(chance, 6) for chance in chances],
            emitted=list(output.token_ids),
            kinds=[origin.kind for origin in output.provenance],
            batch_size=draft.num_requests,
            draft_s=round(clock.draft_s, 6),
            target_s=round(clock.target_s, 6),
            rule_s=round(clock.rule_s, 6),
        )

    def end(self, state: RequestState) -> None:
        """A request finished, failed or was dropped."""
        error = None if state.error is None else str(state.error)
        self._write(
            "end", state.request_id, finish_reason=state.finish_reason, error=error, stats=state.stats.as_dict()
        )

    def close(self) -> None:
        """Close the file; closing again does nothing.

        Raises:
            StorageError: the end of the log could not be written.
        """
        try:
            self._file.close()
        except OSError as error:
            if self.error is None:  # otherwise the same lines fail again
                raise self._failed(error) from error

    def _write(self, event: str, request_id: int, **values: object) -> None:
        line = {"schema": SCHEMA, "event": event, "time_s": round(time.time(), 6), "request": request_id, **values}
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        self.error = StorageError(f"cannot write the trace {self.path}: {error}")
        return self.error


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
