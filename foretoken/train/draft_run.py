"""A whole run of `foretoken train draft`: a draft model that learns the target's distribution.

Off policy it learns on the target's text, on policy on what the draft model itself wrote (DistillSpec, Zhou et al.
2310.08461); on-policy text is written beforehand with `foretoken train answers`, again for every round of training.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from foretoken.errors import ConfigError, MismatchError, StorageError, UnsupportedModelError
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.gguf.header import is_gguf
from foretoken.model.loader import load_decoder
from foretoken.model.names import model_folder
from foretoken.model.saving import save_checkpoint
from foretoken.train.draft_student import DraftStudent
from foretoken.train.head_trainer import HeadResult, HeadTrainer
from foretoken.train.parallel import Ranks
from foretoken.train.recipes import DRAFT_SHAPE, ModelSize
from foretoken.train.run_job import RunJob, RunSettings, open_states, open_target, open_text, write_manifest

MODEL = "model"


@dataclass(frozen=True)
class DraftSettings(RunSettings):
    """What can be set of a run; `model` is the size of a draft model that starts from random weights."""

    model: ModelSize = DRAFT_SHAPE


@dataclass(frozen=True)
class DraftJob(RunJob):
    """A run that trains a draft model, from the weights of `init` (None: random); `on_policy`: the answers are its."""

    settings: DraftSettings
    init: str | None = None
    on_policy: bool = False


def train_draft(job: DraftJob, ranks: Ranks | None = None) -> HeadResult:
    """Train, or resume the run in `job.out`; the best draft model is in `job.out/model`, with the target's tokenizer,
    its manifest in `job.out/run.json`.

    Raises:
        InputError, ModelError, StorageError, NumericsError; KeyboardInterrupt after the state is saved.
    """
    ranks = ranks or Ranks()
    if job.on_policy and (job.init is None or job.answers is None):
        raise ConfigError("on_policy", True, "needs --init and its own answers (`train answers --target` INIT)")
    if is_gguf(folder := model_folder(job.target)):
        raise UnsupportedModelError(
            f"{folder} is a GGUF file, whose tokenizer a draft model cannot be given: train it with the model's "
            "safetensors checkpoint"
        )
    target = open_target(job)
    decoder = _start(job, target.frozen.decoder.config).to(target.frozen.device)
    writer = model_folder(job.init) if job.on_policy and job.init is not None else target.folder
    data = open_text(job, target, writer)
    what = {"kind": "draft_model", "model": asdict(decoder.config), "init": job.init, "on_policy": job.on_policy}

    def keep() -> None:
        _save(decoder, job.out / MODEL, target.folder)

    student = DraftStudent(decoder)
    states = open_states(job, target, student.hidden_layers(), ranks)
    trainer = HeadTrainer(student, target.frozen, data, job.settings.train, job.out, keep, ranks, states)
    if ranks.is_first:
        write_manifest(job, target, data, what, None)
    result = trainer.run()
    if ranks.is_first:
        write_manifest(job, target, data, what, result)
    return result


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
        save_checkpoint(copy.to(device="cpu", dtype=torch.bfloat16), copy.config, beside, tokenizer_folder=target)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error}") from error
