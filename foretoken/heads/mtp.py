"""MTP: the layer that some checkpoints bring to predict the token after next (DeepSeek-V3, 2412.19437, section 2.2;
GLM-4.5; Qwen3-Next).

An EAGLE-1 head with norms: row t joins the normed embedding of the token at t + 1 with the normed state of position t,
behind the target's final norm, projects both to the width of the target, runs one decoder layer and a norm; the
target's output matrix reads it. Behind the last row of the text it goes on from its own output behind that norm, as
SGLang has it. It was trained for one token ahead: later draft tokens are right much less often.

The layer lies in the target's own checkpoint (`model.layer_tensors`). Where there are several, the first is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.heads.base import DraftVocabulary
from foretoken.heads.config import EagleConfig
from foretoken.heads.eagle import EagleHead
from foretoken.model.architecture import ModelConfig
from foretoken.model.gguf.header import is_gguf
from foretoken.model.layer_tensors import MtpTensors, mtp_tensors
from foretoken.model.layers import RMSNorm
from foretoken.model.loader import read_raw_config
from foretoken.model.weights import EMBEDDING, HEAD, Weights

_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
# Parts of a decoder layer that the dense one does not have, with what they belong to.
_OTHER_LAYERS = {
    "mlp.experts.": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
    "mlp.shared_expert": "a mixture of experts",
    "self_attn.kv_a_proj": "latent attention (MLA)",
    "linear_attn.": "linear attention",
}


@dataclass(frozen=True)
class MtpConfig(EagleConfig):
    """An MTP layer, as the head of version 1 that it extends; see `mtp_config`."""


def mtp_config(target: ModelConfig, has_own_output: bool = False) -> MtpConfig:
    """One dense layer of the target's own shape that sees the whole text."""
    return MtpConfig(
        version=1,
        layer=replace(target, num_layers=1, sliding_window=(), experts=None),
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        taps=(target.num_layers,),
        draft_vocab_size=target.vocab_size,
        norm_output=True,
        has_own_output=has_own_output,
    )


class MtpHead(EagleHead):
    """See the module."""

    name = "mtp"
    config: MtpConfig

    def __init__(self, config: MtpConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        hidden, eps = config.layer.hidden_size, config.layer.norm_eps
        self.enorm, self.hnorm, self.norm = (RMSNorm(hidden, eps) for _ in range(3))
        self.layers[0].input_layernorm = RMSNorm(hidden, eps)

    @property
    def join_norms(self) -> tuple[RMSNorm | None, RMSNorm | None]:
        """See `EagleHead`."""
        return self.enorm, self.hnorm

    def joined(self, embedded: Tensor, features: Tensor) -> Tensor:
        """See `EagleHead`: both normed."""
        out: Tensor = self.fc(torch.cat((self.enorm(embedded), self.hnorm(features)), dim=-1))
        return out


def num_mtp_layers(folder: Path, target: ModelConfig) -> int:
    """How many MTP layers the checkpoint of `target` in `folder` holds; a GGUF file's are not read.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    return 0 if is_gguf(folder) else _tensors(folder, Weights(folder), target).num_layers


def load_mtp(folder: Path, target: ModelConfig, dtype: torch.dtype, device: torch.device) -> MtpHead:
    """The first MTP layer of the checkpoint of `target` in `folder`, its weights plain (not packed).

    Raises:
        ConfigError: there is none.
        CheckpointError: a tensor is missing, superfluous or of another shape.
        UnsupportedModelError: a layer with experts or another attention, or in a GGUF file.
    """
    if is_gguf(folder):
        raise UnsupportedModelError(f"{folder} is a GGUF file, whose MTP layers are not read; take the safetensors")
    weights = Weights(folder)
    first = dict(_tensors(folder, weights, target).first)
    if not first:
        names = f"model.layers.{target.num_layers}.eh_proj with num_nextn_predict_layers in config.json, or mtp.fc"
        raise ConfigError("drafter", "mtp", f"{folder} holds no MTP layer ({names}): choose another drafter")
    if not target.has_llama_layers:
        raise UnsupportedModelError(
            f"the MTP layer in {folder} is of model_type={target.model_type!r}, whose layers heads here do not have; "
            "choose another drafter"
        )
    _refuse_other_layers(folder, first)
    _check_shared(folder, weights, target, first)
    config = mtp_config(target, has_own_output=_OUTPUT in first)
    vocabulary = DraftVocabulary.whole(target.vocab_size).to(device)
    with torch.device("meta"):
        head = MtpHead(config, vocabulary)
    expected = {name: tuple(parameter.shape) for name, parameter in head.state_dict().items()}
    for own, name in first.items():
        if own not in expected:
            raise CheckpointError(f"tensor {name} in {folder} has no place in the MTP layer of this family")
    missing = sorted(expected.keys() - first.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"the MTP layer in {folder} lacks its {missing[0]}{more}: the checkpoint is incomplete")
    state = {name: weights.read(first[name], shape).to(device, dtype, copy=True) for name, shape in expected.items()}
    head.load_state_dict(state, strict=True, assign=True)
    return head


def _tensors(folder: Path, weights: Weights, target: ModelConfig) -> MtpTensors:
    return mtp_tensors(weights.own_names, read_raw_config(folder), target.num_layers, str(folder / "config.json"))


def _refuse_other_layers(folder: Path, first: dict[str, str]) -> None:
    for own, name in first.items():
        part = own.removeprefix("layers.0.")
        kind = next((kind for start, kind in _OTHER_LAYERS.items() if part.startswith(start)), None)
        if kind is not None:
            raise UnsupportedModelError(
                f"the MTP layer in {folder} has {kind} ({name}), which is not run here; choose another drafter"
            )


def _check_shared(folder: Path, weights: Weights, target: ModelConfig, first: dict[str, str]) -> None:
    """Drop copies of the target's embedding and output matrix."""
    shape = (target.vocab_size, target.hidden_size)
    embedding = first.pop(_EMBEDDING, None)
    if embedding is not None and not (weights.shape(embedding) == shape and weights.equal(embedding, EMBEDDING)):
        raise UnsupportedModelError(
            f"the MTP layer in {folder} has an embedding of its own ({embedding}), which is not run here"
        )
    output, shared = first.get(_OUTPUT), HEAD if HEAD in weights else EMBEDDING
    if output is not None and weights.shape(output) == shape and weights.equal(output, shared):
        del first[_OUTPUT]
