"""A whole run of `foretoken train eagle|medusa|block|adapter|draft`: text, training, the finished folder, a manifest.

A draft model learns the target's distribution: off policy on the target's text, on policy on what the draft model
itself wrote (DistillSpec, Zhou et al. 2310.08461); on-policy text is written beforehand with `foretoken train answers`,
again for every round of training.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from foretoken.errors import ConfigError, MismatchError, UnsupportedModelError
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import load_head, open_head, save_head
from foretoken.heads.kind import head_kind
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import config_to_hf
from foretoken.model.decoder import Decoder
from foretoken.model.gguf.header import is_gguf
from foretoken.model.loader import load_decoder, read_config
from foretoken.model.names import model_folder
from foretoken.model.saving import save_checkpoint
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.head_data import HeadData
from foretoken.train.head_recipes import EagleShape, HeadShape, new_head, recipe_of
from foretoken.train.head_train_config import HeadTrainConfig
from foretoken.train.head_trainer import HeadResult, HeadTrainer
from foretoken.train.parallel import Ranks
from foretoken.train.recipes import DRAFT_SHAPE, ModelSize
from foretoken.train.run_job import (
    RunJob,
    RunSettings,
    check_resumed,
    open_states,
    open_target,
    open_text,
    states_bytes,
    write_manifest,
)
from foretoken.train.students import DraftStudent, Student, coverage

HEAD = "head"
MODEL = "model"


@dataclass(frozen=True)
class HeadSettings(RunSettings):
    """What can be set of a run; `head` is the shape of the head."""

    head: HeadShape = field(default_factory=EagleShape)


@dataclass(frozen=True)
class HeadJob(RunJob):
    """A run that trains a head, from the weights and in the shape of `init`; None: from new weights."""

    settings: HeadSettings
    init: str | None = None


@dataclass(frozen=True)
class HeadPlan:
    """What a run would take. `step_s` was measured by two steps on this machine; `disk_bytes` is the state, twice while
    it is written, and the finished head; `states_bytes` are the hidden states that the run may keep on disk beside it.
    """

    num_parameters: int
    num_steps: int
    tokens: int
    step_s: float
    train_s: float
    memory_bytes: int
    disk_bytes: int
    states_bytes: int
    coverage: float


@dataclass(frozen=True)
class PreparedRun:
    """Everything that a trainer needs, and the share of the text that the head's vocabulary can write."""

    target: FrozenTarget
    data: HeadData
    head: Head
    coverage: float


def prepare_run(job: HeadJob) -> PreparedRun:
    """Load the target, read the text, make or load the head.

    Raises:
        ConfigError: a shape was asked for beside `init`, or `init` is a head of another kind.
        InputError, ModelError, StorageError: see the parts.
    """
    started_folder = None if job.init is None else _folder_to_start_from(job.init, job.settings.head)
    target = open_target(job)
    data = open_text(job, target, target.folder)
    config = target.decoder.config
    counts = data.train.counts(config.vocab_size)
    if started_folder is not None:
        head = load_head(started_folder, config, "float32", target.device, target.folder)
    else:
        words = load_tokenizer(target.folder)
        special = () if words is None else words.special_ids  # a template may emit them, however rare they are
        always = {*config.eos_token_ids, *(token for token in special if token < config.vocab_size)}
        head = new_head(job.settings.head, target, counts, always, job.settings.train.seed)
    return PreparedRun(target, data, head, coverage(counts, head.vocabulary))


def _folder_to_start_from(init: str, shape: HeadShape) -> Path:
    """The folder of the head that a run starts from, which is of the kind of `shape` and has its own shape."""
    if shape != type(shape)():
        raise ConfigError("head", shape, "a run with --init has the shape of that head; leave head.* out, or --init")
    folder = model_folder(init)
    found, kind = head_kind(folder), recipe_of(shape).kind
    if found != kind:
        raise ConfigError("init", init, f"is a head of kind {found!r}, not {kind!r}; use the command that trains those")
    return folder


def places_of(init: str, target: str) -> int:
    """How many places a run from the head `init` learns: as many as it drafts at once; raises as `open_head` does."""
    head = open_head(model_folder(init), read_config(model_folder(target))).network
    return head.config.max_num_draft or HeadTrainConfig.num_places


def train_head(job: HeadJob, ranks: Ranks | None = None) -> HeadResult:
    """Train, or resume the run in `job.out`; the best head is in `job.out/head`, its manifest in `job.out/run.json`.

    Raises:
        InputError, ModelError, StorageError, NumericsError; KeyboardInterrupt after the state is saved.
    """
    ranks = ranks or Ranks()
    run = prepare_run(job)
    head, target = run.head, run.target
    what = {
        "kind": head.name,
        "head": asdict(head.config),
        "init": job.init,
        "taps": {"layers": head.hidden_layers(), "convention": "enter: the residual stream after that many layers"},
        "draft_vocabulary": {"size": len(head.vocabulary.ids), "coverage": run.coverage},
    }
    if recipe_of(job.settings.head).begins_as_exit and job.init is None:
        what |= {"without_adapter": asdict(_passing_trainer(run, job, job.settings.train).measure())}

    def keep() -> None:
        config = target.decoder.config
        save_head(head, job.out / HEAD, config, target.folder, job.target, dtype="bfloat16")

    return _trained(job, target, run.data, head, what, keep, ranks)


def _trained(
    job: RunJob,
    target: FrozenTarget,
    data: HeadData,
    student: Student,
    what: Mapping[str, Any],
    keep: Callable[[], None],
    ranks: Ranks,
) -> HeadResult:
    """Train `student`, which `what` describes in the manifest and `keep` stores."""
    check_resumed(job, target, what)
    states = open_states(job, target, student.hidden_layers(), ranks)
    trainer = HeadTrainer(student, target, data, job.settings.train, job.out, keep, ranks, states)
    if ranks.is_first:
        write_manifest(job, target, data, what, None)
    result = trainer.run()
    if ranks.is_first:
        write_manifest(job, target, data, what, result)
    return result


def _passing_trainer(run: PreparedRun, job: HeadJob, config: HeadTrainConfig) -> HeadTrainer:
    """A trainer of the new head that keeps nothing and resumes nothing."""
    return HeadTrainer(run.head, run.target, run.data, config, job.out / "dry-run", lambda: None)


def plan_head(job: HeadJob) -> HeadPlan:
    """What `train_head` would take, from the sizes and two measured steps; trains nothing that stays."""
    run = prepare_run(job)
    config = dataclasses.replace(job.settings.train, report_every_steps=1 << 30)
    trainer = _passing_trainer(run, job, config)
    trainer.train_step()  # the first one fills memory
    started = time.perf_counter()
    trainer.train_step()
    step_s = time.perf_counter() - started
    parameters = sum(p.numel() for p in run.head.parameters())
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    state_bytes = sum(one.nbytes for state in states for one in state.values() if isinstance(one, torch.Tensor))
    weight_bytes = run.target.decoder.weight_bytes
    wanted_bytes = states_bytes(config, run.target, len(run.head.hidden_layers()))
    return HeadPlan(
        num_parameters=parameters,
        num_steps=config.num_steps,
        tokens=config.num_steps * config.step_tokens,
        step_s=step_s,
        train_s=step_s * config.num_steps,
        memory_bytes=weight_bytes + 8 * parameters + state_bytes + _batch_bytes(run, config),
        disk_bytes=2 * (4 * parameters + state_bytes) + 2 * parameters,
        states_bytes=min(config.state_cache_bytes, wanted_bytes),
        coverage=run.coverage,
    )


def _batch_bytes(run: PreparedRun, config: HeadTrainConfig) -> int:
    """Hidden states, the target's logits, and what is kept of each place for the backward pass."""
    own, width = run.target.decoder.config, 4 if run.target.precision == "float32" else 2
    rows = config.batch_windows * config.length
    states = rows * own.hidden_size * (len(run.head.hidden_layers()) + 1)
    logits = rows * own.vocab_size
    places = 2 * config.num_places * rows * config.row_share * len(run.head.vocabulary.ids)
    return int(width * (states + logits + places))


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
    decoder = _start(job, target.decoder.config).to(target.device)
    writer = model_folder(job.init) if job.on_policy and job.init is not None else target.folder
    data = open_text(job, target, writer)
    what = {"kind": "draft_model", "model": asdict(decoder.config), "init": job.init, "on_policy": job.on_policy}

    def keep() -> None:
        _save(decoder, job.out / MODEL, target.folder)

    return _trained(job, target, data, DraftStudent(decoder), what, keep, ranks)


def _start(job: DraftJob, target: ModelConfig) -> Decoder:
    """The draft model before training, in float32."""
    if job.init is not None:
        decoder = load_decoder(model_folder(job.init), dtype="float32", pack=False)
        config_to_hf(decoder.config)  # a family that is not written is refused before it is trained
        length, most = job.settings.train.length, decoder.config.max_context_tokens
        if length > most:
            raise ConfigError("length", length, f"must be at most the draft model's context of {most}")
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
    """Write the checkpoint over an earlier one, which stays whole until every file is written."""
    copy = Decoder(decoder.config)
    copy.load_state_dict(decoder.state_dict())
    save_checkpoint(copy.to(device="cpu", dtype=torch.bfloat16), copy.config, folder, tokenizer_folder=target)
