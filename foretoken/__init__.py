"""foretoken: speculative decoding, exact and measured."""

from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.drafters import add_drafter
from foretoken.engine.llm import LLM
from foretoken.engine.output import GenerateOutput
from foretoken.engine.ticket import Ticket
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
    StorageError,
    UnsupportedModelError,
)
from foretoken.plan.routing import RoutingRules

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
    "EngineError",
    "ForetokenError",
    "GateError",
    "GenerateOutput",
    "InputError",
    "MismatchError",
    "ModelError",
    "NumericsError",
    "OverloadedError",
    "RoutingRules",
    "SamplingParams",
    "SpecConfig",
    "StorageError",
    "Ticket",
    "UnsupportedModelError",
    "add_drafter",
]
