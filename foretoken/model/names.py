"""From the name of a model or a trained head to its files: the one place where names are read.

A name is a packaged model (`smollm2`), `reference:` and a folder of the source checkout's test models, a folder, a
GGUF file, or an id of the Hugging Face hub. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from foretoken.errors import CheckpointError
from foretoken.model.fields import HEAD_NOTE
from foretoken.model.gguf.header import is_gguf
from foretoken.model.packaged import DEFAULT_MODEL, PACKAGED, fetch_packaged

REFERENCE_PREFIX = "reference:"
# Tiny models and heads for tests and studies, beside the package in a source checkout.
_REFERENCE_FOLDER = Path(__file__).resolve().parents[2] / "tests" / "reference"
# Files beside config.json in which AutoGPTQ and AutoAWQ kept their settings, and the method of those that name none.
OLDER_SETTINGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "vocab.txt", "merges.txt"]
_HUB_SKIPPED = ["consolidated*", "original/*"]  # the same weights once more, in their maker's own layout
_MEANT = f"give the folder of a checkpoint, a GGUF file, a hub id, or {DEFAULT_MODEL}"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder(name: str | Path) -> Path:
    """The folder or GGUF file of a model, or the folder of a trained head.

    `smollm2` is fetched on first use, whatever lies in the working directory (a folder of that name is `./smollm2`); a
    hub id is downloaded unless HF_HUB_OFFLINE is set.

    Raises:
        CheckpointError: there is no such thing, or it cannot be downloaded.
        StorageError: a packaged model cannot be kept.
    """
    text = os.fspath(name)
    if not text:
        raise CheckpointError(
            f"no model is named; give {DEFAULT_MODEL}, the folder of a checkpoint, a GGUF file or a hub id"
        )
    if text.startswith(REFERENCE_PREFIX):
        return _reference(text)
    if text in PACKAGED and not isinstance(name, Path):
        return fetch_packaged(PACKAGED[text])
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):  # False for a name that no file can have, where Path.is_dir raises
        return path
    if os.path.exists(path):
        if is_gguf(path):
            return path
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json, or a .gguf file")
    if isinstance(name, Path) or not _HUB_ID.fullmatch(text) or text[0] == ".":
        raise CheckpointError(f"folder {path} does not exist; {_MEANT}")
    return _snapshot(text)


def is_own_name(name: str) -> bool:
    """Whether a name means something to this program alone: no folder, file or hub id."""
    return name in PACKAGED or name.startswith(REFERENCE_PREFIX)


def reference_models() -> list[str]:
    """Names of the reference family's models; none outside a source checkout."""
    folders = [path.parent for path in sorted(_REFERENCE_FOLDER.glob("*/config.json"))]
    return [REFERENCE_PREFIX + folder.name for folder in folders if not (folder / HEAD_NOTE).exists()]


def reference_heads() -> list[str]:
    """Names of the reference family's trained heads; none outside a source checkout."""
    return [REFERENCE_PREFIX + path.parent.name for path in sorted(_REFERENCE_FOLDER.glob(f"*/{HEAD_NOTE}"))]


def _reference(name: str) -> Path:
    folder = _REFERENCE_FOLDER / name.removeprefix(REFERENCE_PREFIX)
    if os.path.exists(folder / "config.json"):
        return folder
    known = ", ".join((*reference_models(), *reference_heads()))
    if known:
        raise CheckpointError(f"{name!r} is not part of the reference family; known: {known}")
    raise CheckpointError(
        f"{name!r}: the {REFERENCE_PREFIX} models are part of the source checkout, not of the package; use "
        f"{DEFAULT_MODEL}, or name a folder, a GGUF file or a hub id"
    )


def _snapshot(hub_id: str) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_SKIPPED)
        )
    except Exception as error:  # network, access and cache errors of the hub have no common base
        offline = "HF_HUB_OFFLINE is set, " if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        near = difflib.get_close_matches(hub_id, PACKAGED, n=1)
        raise CheckpointError(
            f"{hub_id!r} is neither a local folder nor available from the Hugging Face hub "
            f"({offline}{reason.removeprefix('Got: ').rstrip('.')}); "
            + (f"did you mean {near[0]!r}?" if near else _MEANT)
        ) from error
