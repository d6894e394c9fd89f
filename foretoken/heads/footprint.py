"""The memory of a draft model and of a trained head, from their files alone, as the engine would load them."""

from __future__ import annotations

import torch

from foretoken.config import QUANTISED
from foretoken.errors import ConfigError
from foretoken.heads.checkpoint import head_shape
from foretoken.model.footprint import shape_of
from foretoken.model.loader import parse_dtype, read_config
from foretoken.model.matrices.quant import check_quant, head_format
from foretoken.model.names import model_folder
from foretoken.model.open import draft_weights
from foretoken.plan.memory import ModelShape


def draft_shape_of(name: str, dtype: str, target_format: str, draft_dtype: str, device: str) -> ModelShape:
    """A draft model as the engine loads it: in the target's format unless it has its own."""
    folder = model_folder(name)
    own = dtype if draft_dtype in (*QUANTISED, "auto") else draft_dtype
    return shape_of(folder, name, own, device, draft_weights(folder, draft_dtype, target_format))


def head_shape_of(name: str, target: str, shape: ModelShape, draft_dtype: str, device: str) -> ModelShape:
    """A trained head as the engine loads it: in the target's number format or, as its matrices are, quantised."""
    if draft_dtype in QUANTISED:
        check_quant(draft_dtype, torch.bfloat16, torch.device(device), field="draft_dtype")
    elif draft_dtype != "auto" and parse_dtype(draft_dtype).itemsize != shape.itemsize:
        raise ConfigError("draft_dtype", draft_dtype, "a head runs in its target's number format: take auto")
    held = draft_dtype
    if held == "auto":
        held = head_format(shape.weight_format, shape.itemsize, torch.device(device))
    return head_shape(model_folder(name), name, read_config(model_folder(target)), shape, held)
