"""foretoken: speculative decoding, exact and measured.

What needs torch is imported when it is first asked for: torch takes seconds, and the errors, the configurations and the
version do not need it.
"""

import importlib
import typing

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig
from foretoken.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    DraftError,
    DrafterWarning,
    DraftTimeout,
    EngineError,
    ForetokenError,
    GateError,
    InputError,
    MismatchError,
    ModelError,
    NumericsError,
    OverloadedError,
    RankError,
    StorageError,
    UnavailableError,
    UnsupportedModelError,
    WorkerDiedError,
)

if typing.TYPE_CHECKING:
    from foretoken.engine.async_engine import AsyncEngine
    from foretoken.engine.drafters import add_drafter
    from foretoken.engine.llm import LLM
    from foretoken.engine.request import GenerateOutput
    from foretoken.engine.ticket import Ticket
    from foretoken.measure.ab.run import ab
    from foretoken.measure.advise.run import advise
    from foretoken.measure.certify.run import certify
    from foretoken.measure.diagnose.run import diagnose

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "DraftError",
    "DraftTimeout",
    "DrafterWarning",
    "EngineConfig",
    "EngineError",
    "ForetokenError",
    "GateError",
    "GenerateOutput",
    "InputError",
    "MismatchError",
    "ModelError",
    "NumericsError",
    "OverloadedError",
    "RankError",
    "RoutingRules",
    "SamplingParams",
    "SpecConfig",
    "StorageError",
    "Ticket",
    "UnavailableError",
    "UnsupportedModelError",
    "WorkerDiedError",
    "ab",
    "add_drafter",
    "advise",
    "certify",
    "diagnose",
]

_MODULES = {
    "LLM": "foretoken.engine.llm",
    "AsyncEngine": "foretoken.engine.async_engine",
    "Ticket": "foretoken.engine.ticket",
    "GenerateOutput": "foretoken.engine.request",
    "add_drafter": "foretoken.engine.drafters",
    "ab": "foretoken.measure.ab.run",
    "diagnose": "foretoken.measure.diagnose.run",
    "certify": "foretoken.measure.certify.run",
    "advise": "foretoken.measure.advise.run",
}

if not typing.TYPE_CHECKING:  # a type checker would take it for a module that has every name

    def __getattr__(name: str) -> object:
        """Import one of the names of `_MODULES`."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        """Names that are not imported yet, too."""
        return sorted({*globals(), *__all__})
