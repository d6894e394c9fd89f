"""In how many bits a draft model's matrices are held beside its target."""

from __future__ import annotations

from pathlib import Path

from foretoken.config import QUANTISED
from foretoken.model.loader import open_weights
from foretoken.model.open import native_config


def draft_weights(folder: Path, draft_dtype: str, target_format: str) -> str:
    """`weights` of `open_model` for the draft model in `folder`.

    `draft_dtype` "auto" takes the format of the target's matrices, `target_format`, as trained heads do; a draft whose
    file holds codes keeps those, and one that runs through transformers keeps its numbers.

    Raises:
        CheckpointError, UnsupportedModelError: a file of the draft is missing or broken.
    """
    if draft_dtype in QUANTISED:
        return draft_dtype
    if draft_dtype != "auto" or target_format == "auto" or native_config(folder) is None:
        return "auto"
    stored = open_weights(folder)
    return "auto" if any(stored.sample(name) is not None for name in stored.own_names) else target_format
