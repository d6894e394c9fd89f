"""Text in which each token shows its provenance: by colour and, for readers without colours, by mark."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import TokenOrigin
from foretoken.engine.stats import RequestStats
from foretoken.printing.console import Console, Part

# kind -> (style, what it means). The styles differ in weight and underline too, so colour is never alone.
_STYLES = {
    "accepted": ("underline green", "proposed by the drafter, accepted by the target"),
    "residual": ("bold red", "the target's own, in place of a rejected token"),
    "bonus": ("italic cyan", "the target's own, after a fully accepted draft"),
    "plain": ("dim", "the target's own, nothing was drafted"),
}
_MARKS = {"accepted": "+", "residual": "!", "bonus": "*", "plain": "."}


def style_of(origin: TokenOrigin) -> str:
    """The style of a token."""
    return _STYLES[origin.kind][0]


def coloured(pieces: Sequence[str], provenance: Sequence[TokenOrigin]) -> list[Part]:
    """The pieces of an answer in the style of their provenance; the characters are unchanged."""
    return [(piece, style_of(origin)) for piece, origin in zip(pieces, provenance, strict=True)]


def marks(provenance: Sequence[TokenOrigin]) -> str:
    """One character per token: + accepted, ! residual, * bonus, . plain; a space ends each step."""
    line = ""
    for origin, following in zip(provenance, [*provenance[1:], None], strict=False):
        line += _MARKS[origin.kind] + (" " if following is None or following.step != origin.step else "")
    return line.rstrip()


def legend(provenance: Sequence[TokenOrigin]) -> list[Part]:
    """The meaning of styles and marks, with how often each occurs, a line each."""
    lines: list[Part] = []
    for kind, (style, meaning) in _STYLES.items():
        count = sum(origin.kind == kind for origin in provenance)
        lines += ["\n" if lines else "", (f"{_MARKS[kind]} {kind:<9}", style), f"{count:5d} tokens  {meaning}"]
    return lines


def print_shown(console: Console, pieces: Sequence[str], provenance: Sequence[TokenOrigin]) -> None:
    """The coloured answer, the same as marks, and the legend."""
    console.block(*coloured(pieces, provenance))
    console.line()
    console.line("by token, a group per step: ", marks(provenance), style="dim")
    console.block(*legend(provenance))


def print_counts(console: Console, stats: RequestStats) -> None:
    """Drafted and accepted tokens at each position of the draft and, with several drafters, by drafter."""
    if not stats.num_drafted:
        return
    rows = [(f"at position {place}", *counts) for place, counts in enumerate(stats.accepted_per_position, start=1)]
    if len(stats.drafted_by) > 1:
        rows += [(f"by {name}", drafted, stats.accepted_by.get(name, 0)) for name, drafted in stats.drafted_by.items()]
    console.line()
    cells = [
        (name, str(drafted), str(kept), f"{kept / drafted:.0%}" if drafted else "") for name, drafted, kept in rows
    ]
    console.table(("draft", "drafted", "accepted", "rate"), cells)
