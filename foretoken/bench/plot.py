"""The plot of a speed measurement: bars of tokens per second by slice and setting."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from foretoken.bench.measure import ALL_SLICES
from foretoken.bench.speed_rows import SpeedRow
from foretoken.errors import InputError, StorageError
from foretoken.printing.text import visible

_PLOT_SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn, before anything is measured.

    Raises:
        InputError: an unknown suffix, or matplotlib is missing.
    """
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise InputError("plot", str(path), f"the file name must end in {' or '.join(_PLOT_SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("plot", str(path), "plots need matplotlib: pip install 'foretoken[plot]'")


def write_plot(all_rows: Sequence[SpeedRow], cpu: str, path: Path) -> None:
    """Bars of tokens per second at the lowest temperature by slice and setting, with the range over repeats.

    Raises:
        InputError: an unknown suffix, or matplotlib is missing.
        StorageError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    lowest = min((row.temperature for row in all_rows), default=0.0)
    rows = [row for row in all_rows if row.temperature == lowest]
    names = [name for name in dict.fromkeys(row.slice for row in rows) if name != ALL_SLICES] or [ALL_SLICES]
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure = Figure(figsize=(max(6.0, 1.0 + 0.25 * len(names) * (len(settings) + 1)), 4.0), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(settings))
    for place, setting in enumerate(settings):
        own = {row.slice: row for row in rows if row.setting == setting}
        at = [i for i, name in enumerate(names) if name in own]
        chosen = [own[names[i]] for i in at]
        spread = (
            [r.tokens_per_s - r.tokens_per_s_min for r in chosen],
            [r.tokens_per_s_max - r.tokens_per_s for r in chosen],
        )
        axes.bar(
            [i + (place + 0.5) * width - 0.4 for i in at],
            [r.tokens_per_s for r in chosen],
            width,
            yerr=spread,
            label=_label(setting),
        )
    axes.set_xticks(range(len(names)), [_label(name) for name in names])
    axes.set_ylabel("tokens per second")
    axes.set_title(_label(f"temperature {lowest:g}, {cpu}"), fontsize=9)
    figure.legend(loc="outside lower center", fontsize=7, ncols=4)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise StorageError(f"cannot write the plot to {path}: {error}") from error


def _label(text: str) -> str:
    """`text` in a plot, where dollar signs would enclose a formula."""
    return visible(text).replace("$", r"\$")
