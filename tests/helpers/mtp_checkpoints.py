"""Checkpoints that bring a random MTP layer, in the namings of DeepSeek and of Qwen."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.heads.base import DraftVocabulary
from foretoken.heads.mtp import MtpHead, mtp_config
from foretoken.model.architecture import ModelConfig
from foretoken.model.loader import read_config
from tests.helpers.checkpoints import randomise

_QWEN = {"enorm.weight": "pre_fc_norm_embedding.weight", "hnorm.weight": "pre_fc_norm_hidden.weight"}
_DEEPSEEK = {"fc.weight": "eh_proj.weight", "norm.weight": "shared_head.norm.weight"}


def random_mtp(target: ModelConfig, seed: int = 0, has_own_output: bool = False) -> MtpHead:
    """An MTP layer in memory."""
    head = MtpHead(mtp_config(target, has_own_output), DraftVocabulary.whole(target.vocab_size))
    randomise(head, seed)
    return head.requires_grad_(False)


def mtp_state(target: ModelConfig, naming: str = "deepseek", seed: int = 0) -> dict[str, Tensor]:
    """The tensors of `random_mtp` under the names of a checkpoint."""
    found: dict[str, Tensor] = {}
    for name, tensor in random_mtp(target, seed).state_dict().items():
        if naming == "qwen":
            found[f"mtp.{_QWEN.get(name, name)}"] = tensor
        else:
            own = _DEEPSEEK.get(name, name.removeprefix("layers.0."))
            found[f"model.layers.{target.num_layers}.{own}"] = tensor
    return found


def add_mtp(folder: Path, naming: str = "deepseek", **more: Tensor) -> dict[str, Tensor]:
    """Add an MTP layer, and `more` tensors by their whole names, to the checkpoint in `folder`; what was added."""
    target, path = read_config(folder), folder / "model.safetensors"
    added = {**mtp_state(target, naming), **more}
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(tensors | {name: tensor.contiguous() for name, tensor in added.items()}, path, metadata={"format": "pt"})
    if naming == "deepseek":
        set_key(folder, num_nextn_predict_layers=1)
    return added


def set_key(folder: Path, **keys: object) -> None:
    """Change keys of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
