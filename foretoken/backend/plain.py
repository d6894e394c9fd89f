"""Configurations as plain maps, and back: what arrives is built anew, and so checked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from foretoken.config import SamplingParams, SpecConfig, from_mapping
from foretoken.control.adaptation import AdaptConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine_config import EngineConfig

_Config = SamplingParams | SpecConfig | EngineConfig | RoutingRules | AdaptConfig


def plain(config: _Config) -> dict[str, Any]:
    """The fields of a configuration that are not the default, as values that msgpack has."""
    return {
        field.name: _value(value) for field in fields(config) if (value := getattr(config, field.name)) != field.default
    }


def sampling_params_of(values: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from `plain` values.

    Raises:
        InputError: a value that cannot be honoured.
    """
    return from_mapping(SamplingParams, values)


def spec_of(values: Mapping[str, Any] | None) -> SpecConfig | None:
    """What to speculate with from `plain` values; None stays None.

    Raises:
        ConfigError: a value that cannot be honoured.
    """
    if values is None:
        return None
    given = dict(values)
    if "parts" in given:
        given["parts"] = tuple(part if isinstance(part, str) else spec_of(part) for part in given["parts"])
    return from_mapping(SpecConfig, given)


def engine_config_of(values: Mapping[str, Any]) -> EngineConfig:
    """What an engine is built from, from `plain` values.

    Raises:
        InputError: a value that cannot be honoured.
    """
    given = dict(values)
    given["spec"] = spec_of(given.get("spec"))
    if given.get("routing") is not None:
        given["routing"] = from_mapping(RoutingRules, given["routing"])
    if isinstance(given.get("adapt"), Mapping):
        given["adapt"] = from_mapping(AdaptConfig, given["adapt"])
    return from_mapping(EngineConfig, given)


def _value(value: Any) -> Any:  # noqa: ANN401 - a field of any type
    if isinstance(value, SpecConfig | RoutingRules | AdaptConfig):
        return plain(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    return value
