"""How far the layers of a family look back: windows by layer, as its `config.json` describes them."""

from __future__ import annotations

from collections.abc import Callable

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, shown

Windows = tuple[int | None, ...]  # one entry per layer; empty = full attention everywhere
WindowReader = Callable[[Fields, int], Windows]


def no_windows(fields: Fields, layers: int) -> Windows:
    """Families that read none of it."""
    _layer_types(fields, layers)
    return ()


def everywhere(fields: Fields, layers: int) -> Windows:
    """One window for all layers."""
    return _windows([_window(fields)] * layers)


def everywhere_behind_a_switch(fields: Fields, layers: int) -> Windows:
    """Qwen3-MoE: one window for all layers where `use_sliding_window`."""
    return everywhere(fields, layers) if fields.flag("use_sliding_window") else ()


def every_second_behind_a_switch(fields: Fields, layers: int) -> Windows:
    """Qwen2-MoE: where `use_sliding_window`, those of `layer_types`, or every second one below `max_window_layers`."""
    types = _layer_types(fields, layers)
    window = _window(fields) if fields.flag("use_sliding_window") else None
    if types is not None:
        return _typed(fields, types, window, " or use_sliding_window is false")
    last = fields.whole("max_window_layers", least=0)
    return _windows([window if layer < last and layer % 2 == 0 else None for layer in range(layers)])


def by_layer_types(fields: Fields, layers: int) -> Windows:
    """Mistral: one window for all layers, or for those that `layer_types` names (as transformers' Ministral)."""
    types, window = _layer_types(fields, layers), _window(fields)
    return _windows([window] * layers) if types is None else _typed(fields, types, window)


def behind_a_switch(fields: Fields, layers: int) -> Windows:
    """Qwen: where `use_sliding_window`, the layers of `layer_types`, or those from `max_window_layers` on."""
    types = _layer_types(fields, layers)
    window = _window(fields) if fields.flag("use_sliding_window") else None
    first = fields.whole("max_window_layers", least=0)
    if types is not None:
        return _typed(fields, types, window, " or use_sliding_window is false")
    return _windows([window if layer >= first else None for layer in range(layers)])


def of_layers_that_do_not_rotate(fields: Fields, layers: int) -> Windows:
    """SmolLM3: the layers of `layer_types`, whatever `use_sliding_window` says, or where that is set those without
    rotation.
    """
    types, window = _layer_types(fields, layers), _window(fields)
    if types is not None:
        return _typed(fields, types, window)
    window = window if fields.flag("use_sliding_window") else None
    return _windows([None if rotates else window for rotates in rope_layers(fields, layers)])


def alternating(fields: Fields, layers: int) -> Windows:
    """Gemma 2: every second layer looks at all positions, the others at a window."""
    return _patterned(fields, layers, 2)


def patterned(fields: Fields, layers: int) -> Windows:
    """Gemma 3, Cohere 2: one layer in `sliding_window_pattern` looks at all positions."""
    return _patterned(fields, layers, fields.whole("sliding_window_pattern"))


def rope_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """SmolLM3: which layers rotate queries and keys, from `no_rope_layers` (1 where they do) or the interval.

    Raises:
        CheckpointError: not one 0 or 1 per layer.
    """
    listed = fields.raw.get("no_rope_layers")
    if listed is None:
        interval = fields.whole("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(listed, list) or len(listed) < layers or any(value not in (0, 1) for value in listed):
        raise fields.refusal("no_rope_layers", f"a list with a 0 or 1 for each of {layers:,} layers")
    return tuple(bool(value) for value in listed[:layers])


def _patterned(fields: Fields, layers: int, every: int) -> Windows:
    types, window = _layer_types(fields, layers), _window(fields)
    if types is None:
        types = tuple("sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers))
    return _typed(fields, types, window)


def _window(fields: Fields) -> int | None:
    return fields.whole("sliding_window") if fields.has("sliding_window") else None


def _typed(fields: Fields, types: tuple[str, ...], window: int | None, switch: str = "") -> Windows:
    if window is None and "sliding_attention" in types:
        raise CheckpointError(f"{fields.where}: layer_types has sliding_attention, but sliding_window is null{switch}")
    return _windows([window if kind == "sliding_attention" else None for kind in types])


def _windows(windows: list[int | None]) -> Windows:
    return tuple(windows) if any(windows) else ()


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...] | None:
    types = fields.texts("layer_types")
    if types is None:
        return None
    if len(types) != layers:
        raise CheckpointError(f"{fields.where}: layer_types has {len(types)} entries for num_hidden_layers={layers:,}")
    other = next((kind for kind in types if kind not in ("full_attention", "sliding_attention")), None)
    if other is not None:
        raise UnsupportedModelError(f"layer_types with {shown(other)} has no native implementation")
    return types
