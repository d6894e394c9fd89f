"""Options of `foretoken train`: of runs of heads and of draft models, and of the trainer of language models."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from foretoken.engine_config import THREADS, EngineConfig
from foretoken.errors import ConfigError, StorageError
from foretoken.files import read_json, read_text
from foretoken.option import Settings, option, same_option

_setting = Settings()
_Config = TypeVar("_Config")


@dataclass(frozen=True)
class TrainConfig:
    """One run of the trainer; lengths in tokens, times in seconds."""

    tokens: int = _setting(60_000_000, "Tokens to train on in the whole run.")
    batch_tokens: int = _setting(8192, "Tokens per optimiser step.")
    length: int = _setting(512, "Tokens per training window; the last part of the run uses longer ones.")
    final_length: int = 1024  # window length during the last `final_share` of the run
    final_share: float = 0.15
    matrix_rate: float = 4e-3
    vector_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_share: float = 0.35
    clip_norm: float = 1.0
    seed: int = _setting(0, "Random seed of weights and data order.")
    compile: bool = _setting(True, "Compile the step (needs a C compiler).", name="compile_model", flags=("--compile",))
    save_every_s: float = 240.0
    report_every_steps: int = 50
    validate_every_steps: int = 500

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "length", "final_length"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, getattr(self, name), "must be positive")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "must lie between 0 and 2**63 - 1")
        if self.batch_tokens < max(self.length, self.final_length):
            remedy = "must hold at least one window of `final_length` tokens"
            raise ConfigError("batch_tokens", self.batch_tokens, remedy)
        for name in ("final_share", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "must lie between 0 and 1")

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_tokens

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps in the whole run."""
        return max(1, self.tokens // self.batch_tokens)

    def length_at(self, step: int) -> int:
        """Window length at `step`."""
        return self.final_length if step >= self.num_steps * (1 - self.final_share) else self.length


@dataclass(frozen=True)
class RunOptions:
    """A run: for which target, from which text, into which folder. `config` is a file of the run's settings, `tokens`
    and `state_cache_bytes` come before it, `settings`, texts NAME=VALUE, before both.
    """

    target: str = field(metadata=same_option(EngineConfig, "model"))
    out: Path = field(metadata=option("Folder of the run; a run that was interrupted is continued."))
    answers: Path | None = field(
        default=None,
        metadata=option(
            "Answers of the target (`foretoken train answers`); without them, the standard library's source is the "
            "text, which only a target with that text's tokenizer reads."
        ),
    )
    corpus: Path | None = field(
        default=None, metadata=option("Folder of another run whose tokens of the standard library to use.")
    )
    tokens: int | None = _setting(None, "Tokens to train on in the whole run (train.tokens).")
    state_cache_bytes: int | None = _setting(
        None, "Keep up to this many bytes of the target's hidden states on disk (train.state_cache_bytes); 0: none."
    )
    config: Path | None = field(default=None, metadata=option("File of settings, JSON or TOML."))
    settings: tuple[str, ...] = _setting(
        (),
        "A setting, such as train.loss.kind=tv or head.num_layers=2; may be given several times.",
        flags=("--set",),
        repeats=True,
    )
    device: str = field(default="auto", metadata=same_option(EngineConfig, "device"))
    threads: int | None = field(default=None, metadata=THREADS)


@dataclass(frozen=True)
class HeadOptions(RunOptions):
    """A run that trains a head; with `dry_run` it only says what the run would take."""

    init: str | None = _setting(
        None, "Start from the weights of this head and keep its shape; without it, from random weights."
    )
    dry_run: bool = _setting(False, "Print the memory, time and disk space of the run, without training.")


@dataclass(frozen=True)
class DraftOptions(RunOptions):
    """A run that distils a draft model."""

    init: str | None = _setting(None, "Start from this draft model; without it, from random weights.")
    on_policy: bool = _setting(False, "The answers are those of the draft model --init, not of the target.")


def read_settings(path: Path) -> Mapping[str, Any]:
    """The object of a .json or .toml file.

    Raises:
        StorageError: it cannot be read.
        ConfigError: it is no object.
    """
    if path.suffix == ".toml":
        try:
            return tomllib.loads(read_text("config", path))
        except tomllib.TOMLDecodeError as error:
            raise StorageError(f"config: cannot read {path}: {error}") from error
    found = read_json("config", path)
    if not isinstance(found, dict):
        raise ConfigError("config", str(path), "must hold an object of settings")
    return found


def with_settings(config: _Config, settings: Mapping[str, Any], prefix: str = "") -> _Config:
    """`config` (a frozen dataclass) with the values of `settings`, nested as the dataclasses are.

    Raises:
        ConfigError: an unknown name, with the nearest known one; or a value of another type.
    """
    kinds = typing.get_type_hints(type(config))
    changed: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(prefix + one for one in kinds)}"
            raise ConfigError(f"{prefix}{name}", value, f"no such setting; {hint}")
        own = getattr(config, name)
        if dataclasses.is_dataclass(own) and not isinstance(own, type):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{name}", value, "is a group of settings: give an object")
            changed[name] = with_settings(own, value, f"{prefix}{name}.")
        else:
            changed[name] = _typed(f"{prefix}{name}", value, kinds[name])
    return dataclasses.replace(config, **changed)  # type: ignore[type-var]


def with_overrides(config: _Config, overrides: Sequence[str]) -> _Config:
    """`config` with texts such as `loss.kind=tv`.

    Raises:
        ConfigError: of another form, and as `with_settings` does.
    """
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError("set", text, "write NAME=VALUE, such as loss.kind=tv")
        settings: Any = value
        for part in reversed(name.split(".")):
            settings = {part: settings}
        config = with_settings(config, settings)
    return config


def _typed(name: str, value: Any, kind: Any) -> Any:  # noqa: ANN401 - a setting of any type
    """`value` as `kind`, read from a text if it is one."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None or value == "none":
            return None
        (kind,) = (part for part in parts if part is not type(None))
        return _typed(name, value, kind)
    if origin is typing.Literal:
        chosen = {str(part): part for part in parts}.get(str(value))
        if chosen is None:
            raise ConfigError(name, value, f"choose one of {', '.join(map(str, parts))}")
        return chosen
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, Sequence):
            raise ConfigError(name, value, "must be a list")
        return tuple(_typed(name, item, parts[0]) for item in items)
    return _plain(name, value, kind)


def _plain(name: str, value: Any, kind: type) -> Any:  # noqa: ANN401
    if kind is bool:
        known = {"true": True, "false": False, "True": True, "False": False}
        if isinstance(value, bool) or value in known:
            return value if isinstance(value, bool) else known[value]
        raise ConfigError(name, value, "must be true or false")
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return kind(float(value)) if kind is int and "e" in str(value).lower() else kind(value)
    except (TypeError, ValueError):
        shown = {int: "a whole number", float: "a number"}.get(kind, "a text")
        raise ConfigError(name, value, f"must be {shown}") from None
