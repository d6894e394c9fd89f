"""The shape of a widened model: from a preset or an explicit size to a configuration and a place for every live
part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretoken.errors import InputError
from foretoken.model.architecture import ModelConfig
from foretoken.params import is_count


@dataclass(frozen=True)
class _Preset:
    """About the shape of published models of that size; the intermediate size follows from the total."""

    parameters: int
    hidden: int
    layers: int


PRESETS = {
    "25m": _Preset(25_000_000, 768, 4),  # drafts: shallow and wide, since latency follows depth
    "50m": _Preset(50_000_000, 1024, 4),
    "150m": _Preset(150_000_000, 1024, 12),
    "500m": _Preset(500_000_000, 1536, 16),
    "1b": _Preset(1_000_000_000, 2048, 16),
    "3b": _Preset(3_000_000_000, 3072, 28),
    "8b": _Preset(8_000_000_000, 4096, 32),
}
_KEYS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
}


@dataclass(frozen=True)
class WidenPlan:
    """The large configuration, and which source part each of its parts holds: -1 = none, a dead part.

    `leaky_heads` marks (with 0, others -1) dead query heads that read a live value head: their output is not zero.
    """

    source: ModelConfig
    config: ModelConfig
    layers: tuple[int, ...]  # [L]
    query_heads: tuple[int, ...]  # [H]
    kv_heads: tuple[int, ...]  # [G]
    leaky_heads: tuple[int, ...]  # [H]


def plan(source: ModelConfig, to: str) -> WidenPlan:
    """Lay out a model of size `to` around `source`.

    Raises:
        InputError: unknown preset or key, or a size that is below the source's or cannot hold it.
    """
    size = _explicit(source, to) if "=" in to else _from_preset(source, to)
    _check(source, size, to)
    layers = _spread(source.num_layers, size.num_layers)
    windows = (
        tuple(source.window(live) if live >= 0 else source.window(0) for live in layers)
        if source.sliding_window
        else ()
    )
    query, kv, leaky = _heads(source, size)
    return WidenPlan(source, replace(size, sliding_window=windows), layers, query, kv, leaky)


def _explicit(source: ModelConfig, to: str) -> ModelConfig:
    sizes: dict[str, int] = {}
    for part in to.split(","):
        key, _, value = part.strip().partition("=")
        if key not in _KEYS:
            raise InputError(
                "to", to, f"unknown key {key!r}; known: {', '.join(_KEYS)}, or a preset: {', '.join(PRESETS)}"
            )
        if not is_count(value.strip()):
            raise InputError("to", to, f"{key} must be a whole number")
        sizes[_KEYS[key]] = int(value)
    return ModelConfig(**({name: getattr(source, name) for name in source.__dataclass_fields__} | sizes))


def _from_preset(source: ModelConfig, to: str) -> ModelConfig:
    """The widest shape near the preset's whose intermediate size, solved from the total, holds the source's."""
    if to.lower() not in PRESETS:
        raise InputError(
            "to",
            to,
            f"choose a preset ({', '.join(PRESETS)}) or hidden=..,intermediate=..,layers=..,heads=..,kv_heads=..",
        )
    preset = PRESETS[to.lower()]
    if source.num_parameters >= preset.parameters:
        raise InputError("to", to, f"the source has {source.num_parameters:,} parameters already; choose a larger size")
    layers = max(preset.layers, source.num_layers)
    for copies in range(max(1, round(preset.hidden / source.hidden_size)), 0, -1):
        hidden = copies * source.hidden_size
        heads, kv_heads = _num_heads(source, hidden)
        narrow = replace(
            source, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=0
        )
        per_column = (replace(narrow, intermediate_size=1).num_parameters - narrow.num_parameters) or 1
        columns = (preset.parameters - narrow.num_parameters) / per_column
        intermediate = max(64 * round(columns / 64), 0)
        if intermediate >= source.intermediate_size:
            return replace(narrow, intermediate_size=intermediate)
    raise InputError(
        "to", to, "the source's layers, width and vocabulary do not fit into that many parameters; choose a larger size"
    )


def _num_heads(source: ModelConfig, hidden: int) -> tuple[int, int]:
    """Heads that together are about `hidden` wide, in groups as large as the source's, and divide `hidden`."""
    group = source.num_heads // source.num_kv_heads
    possible = [heads for heads in range(source.num_heads, hidden + 1, group) if hidden % heads == 0]
    heads = min(possible, key=lambda count: abs(count * source.head_dim - hidden), default=source.num_heads)
    return heads, heads // group


def _check(source: ModelConfig, size: ModelConfig, to: str) -> None:
    for key, name in _KEYS.items():
        have, want = getattr(source, name), getattr(size, name)
        if want < have:
            raise InputError("to", to, f"{key}={want} is below the source's {have}; a model can only grow")
    if size.hidden_size % source.hidden_size:
        near = source.hidden_size * max(1, round(size.hidden_size / source.hidden_size))
        raise InputError(
            "to",
            to,
            f"hidden={size.hidden_size} must be a multiple of the source's {source.hidden_size}, such as {near}",
        )
    if size.num_heads % size.num_kv_heads:
        raise InputError("to", to, f"heads={size.num_heads} must be a multiple of kv_heads={size.num_kv_heads}")
    if size.model_type == "llama" and size.hidden_size % size.num_heads:
        raise InputError(
            "to", to, f"hidden={size.hidden_size} must be a multiple of heads={size.num_heads} in a llama model"
        )
    needed = source.num_kv_heads * _copies_of_group(source, size)
    if size.num_kv_heads < needed:
        small = size.num_heads // size.num_kv_heads
        raise InputError(
            "to",
            to,
            (
                f"with {small} heads to a group, kv_heads={size.num_kv_heads} cannot hold the source's heads; "
                f"give at least {needed}"
            ),
        )


def _copies_of_group(source: ModelConfig, size: ModelConfig) -> int:
    """How many key/value heads one of the source's needs when the new groups are smaller."""
    return -(-(source.num_heads // source.num_kv_heads) // (size.num_heads // size.num_kv_heads))


def _heads(source: ModelConfig, size: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Source head of every query and key/value head, and the leaky ones.

    Query head h reads key/value head h // group, in the source and here; a source group that is larger than the new
    ones is spread over several copies of its key/value head.
    """
    old_group, new_group = source.num_heads // source.num_kv_heads, size.num_heads // size.num_kv_heads
    copies = _copies_of_group(source, size)
    query, kv, leaky = [-1] * size.num_heads, [-1] * size.num_kv_heads, [-1] * size.num_heads
    for group in range(source.num_kv_heads * copies):
        kv[group] = group // copies
        first = (group % copies) * new_group  # of the source group's query heads
        for slot in range(new_group):
            if first + slot < old_group:
                query[group * new_group + slot] = kv[group] * old_group + first + slot
            else:
                leaky[group * new_group + slot] = 0
    return tuple(query), tuple(kv), tuple(leaky)


def _spread(live: int, total: int) -> tuple[int, ...]:
    """Source layer of every layer: the live ones in order, at even distances, the last one at the end."""
    layers = [-1] * total
    for index in range(live):
        layers[(index + 1) * total // live - 1] = index
    return tuple(layers)
