"""Configurations as values that msgpack has, and back: what arrives is built anew, and so checked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from foretoken.config import SpecConfig, from_mapping
from foretoken.control.adaptation import AdaptConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig


def plain(config: SpecConfig | EngineConfig) -> dict[str, Any]:
    """The fields of a configuration that are not the default, as values that msgpack has."""
    return {
        field.name: _value(value) for field in fields(config) if (value := getattr(config, field.name)) != field.default
    }


def engine_config_of(values: Mapping[str, Any]) -> EngineConfig:
    """What an engine is built from, from `plain` values.

    Raises:
        InputError: a value that cannot be honoured.
        msgspec.ValidationError: one inside `spec`, `routing` or `adapt`.
    """
    kinds: dict[str, Any] = {"spec": SpecConfig, "routing": RoutingRules, "adapt": AdaptConfig | bool}
    built = {name: msgspec.convert(values[name], kind) for name, kind in kinds.items() if name in values}
    return from_mapping(EngineConfig, {**values, **built})


def builtin(value: object) -> object:
    """What msgspec writes in place of a value that it does not know (`enc_hook`).

    Raises:
        TypeError: a value of another kind.
    """
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written")


def _value(value: Any) -> Any:  # noqa: ANN401 - a field of any type
    if isinstance(value, SpecConfig):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    return msgspec.to_builtins(value, enc_hook=builtin)
