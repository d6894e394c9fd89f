"""Caveats of the models and the machine that a measurement ran on."""

from __future__ import annotations

import json
import os
from pathlib import Path


def load_average() -> float:
    """The machine's load average over the last minute; 0 where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def source_caveats(target: Path, draft: Path | None, load: float) -> list[str]:
    """Caveats of the models and the machine: widened checkpoints, and a high load average before the run (`load`)."""
    caveats = []
    for role, folder in (("target", target), ("draft", draft)):
        if folder is not None and is_widened(folder):
            caveats.append(
                f"The {role} is a small trained checkpoint, widened: the added weights cost time but cannot change "
                "its outputs. Acceptance is that of the small pair."
            )
    cores = os.cpu_count() or 1
    if load > 0.5 * cores:
        caveats.append(
            f"The machine was busy when the run began: load average {load:.1f} on {cores} cores. Use "
            "the ratios, not the absolute numbers."
        )
    return caveats


def is_widened(checkpoint: Path) -> bool:
    """Whether `studies.widen` made this checkpoint: its config says so."""
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "widened" in config
