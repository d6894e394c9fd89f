"""A whole run of `foretoken train draft`: a draft model that learns the target's distribution.

Off policy it learns on the target's text, on policy on what the draft model itself wrote (DistillSpec, Zhou et al.
2310.08461); on-policy text is written beforehand with `foretoken train answers`, again for every round of training.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from foretoken.errors import ConfigError, MismatchError, StorageError, UnsupportedModelError
from foretoken.files import check_folder, to_json
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.gguf.header import is_gguf
from foretoken.model.loader import load_decoder, save_checkpoint
from foretoken.model.open import model_folder, open_device
from foretoken.train.answers import answered_data, folder_fingerprint
from foretoken.train.draft_student import DraftStudent
from foretoken.train.frozen_target import FrozenTarget, Precision, fast_precision
from foretoken.train.head_data import HeadData
from foretoken.train.head_run import MANIFEST, library_data
from foretoken.train.head_trainer import HeadResult, HeadTrainConfig, HeadTrainer
from foretoken.train.parallel import Ranks
from foretoken.train.recipes import DRAFT_SHAPE, ModelSize

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True)
class DraftSettings:
    """What can be set of a run; `model` is the size of a draft model that starts from random weights."""

    model: ModelSize = DRAFT_SHAPE
    train: HeadTrainConfig = field(default_factory=HeadTrainConfig)
    held_out_share: float = 0.05
    precision: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.held_out_share <= 0.5:
            raise ConfigError("held_out_share", self.held_out_share, "must lie above 0 and be at most 0.5")
        if self.precision not in ("auto", "bfloat16", "float32"):
            raise ConfigError("precision", self.precision, "choose auto, bfloat16 or float32")


@dataclass(frozen=True)
class DraftJob:
    """A run: whose draft model, from which weights (`init`; None: random), on which text, into which folder."""

    target: str
    out: Path
    settings: DraftSettings
    init: str | None = None
    answers: Path | None = None
    on_policy: bool = False
    corpus: Path | None = None
    device: str = "cpu"
    command: Sequence[str] = ()


def train_draft(job: DraftJob, ranks: Ranks | None = None) -> HeadResult:
    """Train, or resume the run in `job.out`; the best draft model is in `job.out/model`, with the target's tokenizer.

    Raises:
        InputError, ModelError, StorageError, NumericsError; KeyboardInterrupt after the state is saved.
    """
    ranks = ranks or Ranks()
    if job.on_policy and (job.init is None or job.answers is None):
        raise ConfigError("on_policy", True, "needs --init and its own answers (`train answers --target` INIT)")
    device = open_device(job.device)
    check_folder(job.out)
    folder, wanted = model_folder(job.target), job.settings.precision
    if is_gguf(folder):
        raise UnsupportedModelError(
            f"{folder} is a GGUF file, whose tokenizer a draft model cannot be given: train it with the model's "
            "safetensors checkpoint"
        )
    precision: Precision = "bfloat16" if wanted == "bfloat16" else "float32"
    target = FrozenTarget.load(folder, device, fast_precision(device) if wanted == "auto" else precision)
    decoder = _start(job, target.decoder.config).to(device)
    data = _text(job, folder, target.decoder.config.vocab_size)

    def keep() -> None:
        _save(decoder, job.out / "model", folder)

    trainer = HeadTrainer(DraftStudent(decoder), target, data, job.settings.train, job.out, keep, ranks)
    result = trainer.run()
    if ranks.is_first:
        manifest = {
            "kind": "draft_model",
            "command": list(job.command),
            "target": {"name": job.target, "fingerprint": folder_fingerprint(folder)},
            "init": job.init,
            "on_policy": job.on_policy,
            "text": {"source": data.source, "train_digest": data.train.digest, "train_tokens": len(data.train.ids)},
            "settings": asdict(job.settings),
            "result": asdict(result),
        }
        try:
            (job.out / MANIFEST).write_text(to_json(manifest, indent=2) + "\n")
        except OSError as error:
            raise StorageError(f"cannot write {job.out / MANIFEST}: {error}") from error
    return result


def _text(job: DraftJob, target: Path, vocab_size: int) -> HeadData:
    if job.answers is None:
        return library_data(job.corpus or job.out, target)
    writer = model_folder(job.init) if job.on_policy and job.init is not None else target
    return answered_data(job.answers, writer, vocab_size, job.settings.held_out_share)


def _start(job: DraftJob, target: ModelConfig) -> Decoder:
    """The draft model before training, in float32."""
    if job.init is not None:
        decoder = load_decoder(model_folder(job.init), dtype="float32", pack=False)
        if decoder.config.vocab_size != target.vocab_size:
            raise MismatchError(
                f"{job.init} has {decoder.config.vocab_size} tokens, {job.target} {target.vocab_size}: a draft model "
                "has its target's vocabulary"
            )
        return decoder
    config = ModelConfig(
        model_type="llama",
        vocab_size=target.vocab_size,
        max_context_tokens=target.max_context_tokens,
        tie_embeddings=True,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
        dtype="bfloat16",
        **asdict(job.settings.model),
    )
    decoder = Decoder(config)
    decoder.initialise(job.settings.train.seed)
    return decoder


def _save(decoder: Decoder, folder: Path, target: Path) -> None:
    """Write the checkpoint beside its final name, and rename it."""
    beside = folder.with_name(folder.name + ".partial")
    copy = Decoder(decoder.config)
    copy.load_state_dict(decoder.state_dict())
    try:
        shutil.rmtree(beside, ignore_errors=True)
        save_checkpoint(copy.to(device="cpu", dtype=torch.bfloat16), copy.config, beside)
        for name in _TOKENIZER_FILES:
            if (target / name).is_file():
                shutil.copyfile(target / name, beside / name)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error}") from error
