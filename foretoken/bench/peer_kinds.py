"""Ways of other engines to speculate, by name."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.bench import llama_cpp
from foretoken.errors import InputError

EVERY = "all"
# Of transformers: `lookup` is its prompt lookup, `early_exit` its first layers as the draft.
TRANSFORMERS_KINDS = ("assisted", "lookup", "early_exit")
KINDS: tuple[str, ...] = (*TRANSFORMERS_KINDS, *llama_cpp.KINDS)


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse a drafting method that no other engine has.

    Raises:
        InputError: names it.
    """
    for kind in kinds:
        if kind not in (*KINDS, EVERY):
            raise InputError("peer_drafters", kind, f"choose from {', '.join(KINDS)}, or {EVERY}")
