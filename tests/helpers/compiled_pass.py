"""Which forwards had a compiled pass over all layers."""

from __future__ import annotations

from types import ModuleType

import pytest

from foretoken.model.layer_pass import layer_pass


def note_passes(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[bool]:
    """Whether each forward through the layers of `modules` had a pass, as they come."""
    seen: list[bool] = []

    def noted(*given: object, **named: object) -> object:
        found = layer_pass(*given, **named)  # type: ignore[arg-type]
        seen.append(found is not None)
        return found

    for module in modules:
        monkeypatch.setattr(module, "layer_pass", noted)
    return seen
