"""Which engine answers at an address, and which of the candidates it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretoken.errors import InputError
from foretoken.export.engines import NAMES
from foretoken.export.launch import plain_drafters
from foretoken.measure.advise.candidates import AdviseCandidate
from foretoken.measure.advise.launches import OTHERS, OURS

# By what a server names as the owner of its model.
_BY_OWNER = {OURS: OURS, "vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tensorrt_llm": "trtllm"}


def engine_at(owner: str, model: str) -> str | None:
    """The engine whose server serves `model` and names this owner of it; None of one that is not known here."""
    if owner == model:  # as TGI does
        return "tgi"
    return _BY_OWNER.get(owner)


def engines_to_name(engine: str | None) -> Sequence[str]:
    """Those that the answer may be carried out with: this one, or all where it is not known."""
    return (OURS, *OTHERS) if engine is None else (engine,)


def offered(
    candidates: Sequence[AdviseCandidate], engine: str | None
) -> tuple[Sequence[AdviseCandidate], Mapping[str, str]]:
    """The candidates that the engine has, and why not the others, by name; of an engine that is not known, all.

    Raises:
        InputError: it has none of them.
    """
    if engine is None or engine == OURS:
        return candidates, {}
    known = plain_drafters(engine)
    found = [one for one in candidates if one.spec.drafter in known]
    lookups = ", ".join(name for name in known if name != "draft_model")
    left_out = {one.name: f"{NAMES[engine]} has none; of lookups it has {lookups}" for one in candidates}
    if not found:
        raise InputError("drafts", ", ".join(left_out), f"{next(iter(left_out.values()))}: name one of those")
    return found, {name: reason for name, reason in left_out.items() if name not in {one.name for one in found}}


def engine_notes(engine: str | None, owner: str, failed: Mapping[str, str]) -> list[str]:
    """What the reader must know of the engine: which it is, and what it lacks."""
    if engine is None:
        return [
            f"The server does not say which engine it is (its model is owned by {owner!r}): look whether yours has the "
            "drafter that is advised."
        ]
    return [f"The server runs {NAMES[engine]}, so {name} was left out: {reason}." for name, reason in failed.items()]
