"""How a worker builds its engine; imports torch, and so is imported late."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.llm import LLM
from foretoken.engine_config import EngineConfig
from foretoken.errors import CheckpointError, SpeculationWarning, StorageError, UnsupportedModelError

_log = logging.getLogger("foretoken.worker")

# Faults of a draft that is missing or broken. One that does not fit its target (MismatchError) always ends the start.
_BROKEN_DRAFT = (CheckpointError, StorageError, UnsupportedModelError)


def build_engine(config: EngineConfig, max_waiting: int, draft_required: bool) -> tuple[AsyncEngine, str | None]:
    """An engine that is ready for requests, and the draft that it runs without: one that cannot be loaded is done
    without, with a warning, unless it is required.

    Raises:
        ForetokenError: the engine cannot be built.
    """
    missing = None
    try:
        llm = LLM(config, on_profile=_say)
    except _BROKEN_DRAFT as error:
        if draft_required or config.spec is None or config.spec.draft is None:
            raise
        llm = LLM(replace(config, spec=None), on_profile=_say)  # raises the same where the target is at fault
        missing = str(config.spec.draft)
        words = f"serving without the draft {missing}: {error}; --draft-required makes an error of this"
        warnings.warn(SpeculationWarning(words), stacklevel=1)
    llm.engine.admission.warm()
    return AsyncEngine(llm, max_waiting), missing


def _say(text: str) -> None:
    _log.info("%s", text)
