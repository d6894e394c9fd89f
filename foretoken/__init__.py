"""foretoken: speculative decoding, exact and measured."""

from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.engine.output import GenerateOutput
from foretoken.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    ForetokenError,
    GateError,
    InputError,
    MismatchError,
    ModelError,
    NumericsError,
    StorageError,
    UnsupportedModelError,
)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "ForetokenError",
    "GateError",
    "GenerateOutput",
    "InputError",
    "MismatchError",
    "ModelError",
    "NumericsError",
    "SamplingParams",
    "SpecConfig",
    "StorageError",
    "UnsupportedModelError",
]
