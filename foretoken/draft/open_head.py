"""The trained head that a configuration names, ready to draft for its target."""

from __future__ import annotations

from typing import TypeVar

import torch

from foretoken.config import QUANTISED, SpecConfig
from foretoken.draft.base import Factory
from foretoken.errors import ConfigError
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import load_head
from foretoken.heads.kind import head_kind
from foretoken.heads.mtp import MtpHead, load_mtp
from foretoken.heads.probe import probe_at_load
from foretoken.heads.weights import pack
from foretoken.model.architecture import ModelConfig
from foretoken.model.interface import LanguageModel, QuantisedModel, SharesWeights
from foretoken.model.matrices.quant import drafts_at_speed, head_format
from foretoken.model.names import model_folder
from foretoken.model.open import native_config
from foretoken.spec_checks import A_HEAD

_Head = TypeVar("_Head", bound=Head)


def open_head(factory: Factory, spec: SpecConfig, network: type[_Head]) -> tuple[_Head, SharesWeights]:
    """The head of `spec.head`, a `network`, in the target's number format and place, and the target.

    Its matrices are quantised as `spec.draft_dtype` says; "auto" is `quant.head_format`.

    Raises:
        ConfigError: no head is named, it is of another kind, the target has no parts that a head can use, or a
            `draft_dtype` that is not the target's number format.
        InputError: a quantised format that does not run where the target does.
        CheckpointError, MismatchError, UnsupportedModelError: see `load_head`.
    """
    kind = network.name
    if spec.head is None:
        raise ConfigError("head", None, f"drafter={kind!r} needs {A_HEAD}")
    folder, target = model_folder(spec.head), factory.target
    found = head_kind(folder)
    if found != kind:
        raise ConfigError("head", spec.head, f"is a head of drafter={found!r}, not of {kind!r}; name that drafter")
    if not isinstance(target, SharesWeights):
        reason = "this target does not hand out its embedding and output matrix"
        raise ConfigError("head", spec.head, f"{reason}; choose a drafter without a head")
    width, dtype = _embedding_of(target, spec.head)
    weight_format = _weight_format(spec, target, dtype)
    config = native_config(factory.folder) or _described(target, width)
    head = load_head(folder, config, dtype, target.device, factory.folder).requires_grad_(False)
    assert isinstance(head, network)
    with factory.between_steps():
        probe_at_load(head, target)
    pack(head, weight_format)
    return head, target


def open_mtp(factory: Factory, spec: SpecConfig) -> tuple[MtpHead, SharesWeights]:
    """The MTP layer in the target's checkpoint, in the target's number format and place, and the target.

    Its matrices are quantised as those of a head: see `open_head`.

    Raises:
        ConfigError: the target runs through transformers, or hands out no parts that a head can use.
        CheckpointError, UnsupportedModelError: see `load_mtp`.
    """
    config, target = native_config(factory.folder), factory.target
    if config is None or not isinstance(target, SharesWeights):
        reason = f"no MTP layer is read of {factory.folder}, which does not run in our own decoder"
        raise ConfigError("drafter", spec.drafter, f"{reason}; choose another drafter")
    _, dtype = _embedding_of(target, "mtp")
    weight_format = _weight_format(spec, target, dtype)
    head = load_mtp(factory.folder, config, dtype, target.device).requires_grad_(False)
    with factory.between_steps():
        probe_at_load(head, target)
    pack(head, weight_format)
    return head, target


def _weight_format(spec: SpecConfig, target: SharesWeights, dtype: torch.dtype) -> str:
    """What the head's matrices are held in beside a target whose rows are `dtype`: "auto" is as they are stored, else
    "int8" or "int4".

    Raises:
        ConfigError, InputError: see `open_head`.
    """
    wanted, own = spec.draft_dtype, str(dtype).removeprefix("torch.")
    if wanted == "auto":
        of_target = target.weight_format if isinstance(target, QuantisedModel) else "auto"
        wanted = head_format(of_target, dtype.itemsize, target.device)
    if wanted in QUANTISED:
        return wanted if drafts_at_speed(wanted, dtype, target.device) else "auto"
    if wanted not in ("auto", own):
        raise ConfigError(
            "draft_dtype",
            wanted,
            f"a head runs in the number format of its target, {own}: take that, auto, int8 or int4",
        )
    return "auto"


@torch.inference_mode()
def _embedding_of(target: SharesWeights, head: str) -> tuple[int, torch.dtype]:
    """Width and number format of the target's embeddings.

    Raises:
        ConfigError: the output matrix reads rows of another width.
        UnsupportedModelError: the target has no embedding table or output matrix.
    """
    embedded = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))
    try:
        target.output_logits(embedded)
    except RuntimeError as error:
        reason = "embedding and output matrix of this target differ in width"
        raise ConfigError("head", head, f"{reason}; choose a drafter without a head") from error
    return embedded.shape[-1], embedded.dtype


def _described(target: LanguageModel, width: int) -> ModelConfig:
    """What a head must fit, of a target that runs through transformers; of its layers only their number counts."""
    return ModelConfig(
        model_type="other",
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=width,
        num_layers=target.num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=width,
        max_context_tokens=target.max_context_tokens,
    )
