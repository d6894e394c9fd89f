"""A whole run of `foretoken train eagle|medusa|block|adapter`: text, training, the finished directory, a manifest."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from foretoken.errors import ConfigError
from foretoken.heads.checkpoint import load_head, save_head
from foretoken.heads.kind import head_kind
from foretoken.model.names import model_folder
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.draft_student import coverage
from foretoken.train.head_data import HeadData
from foretoken.train.head_recipes import EagleShape, HeadShape, NewHead, new_head, recipe_of
from foretoken.train.head_trainer import HeadResult, HeadTrainConfig, HeadTrainer
from foretoken.train.parallel import Ranks
from foretoken.train.run_job import (
    JobTarget,
    RunJob,
    RunSettings,
    open_states,
    open_target,
    open_text,
    states_bytes,
    write_manifest,
)

HEAD = "head"


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
    """Everything that a trainer needs."""

    target: JobTarget
    data: HeadData
    new: NewHead


def prepare_run(job: HeadJob) -> PreparedRun:
    """Load the target, read the text, make or load the head.

    Raises:
        ConfigError: a shape was asked for beside `init`, or `init` is a head of another kind.
        InputError, ModelError, StorageError: see the parts.
    """
    started_folder = None if job.init is None else _folder_to_start_from(job.init, job.settings.head)
    target = open_target(job)
    data = open_text(job, target, target.folder)
    counts = data.train.counts(target.vocab_size)
    if started_folder is not None:
        config, device = target.frozen.decoder.config, target.frozen.device
        head = load_head(started_folder, config, "float32", device, target.folder)
        return PreparedRun(target, data, NewHead(head, coverage(counts, head.vocabulary)))
    always = {*target.frozen.decoder.config.eos_token_ids, *_special_tokens(target)}
    new = new_head(job.settings.head, target.frozen, counts, always, job.settings.train.seed)
    return PreparedRun(target, data, new)


def _folder_to_start_from(init: str, shape: HeadShape) -> Path:
    """The folder of the head that a run starts from, which is of the kind of `shape` and has its own shape."""
    if shape != type(shape)():
        raise ConfigError("head", shape, "a run with --init has the shape of that head; leave head.* out, or --init")
    folder = model_folder(init)
    found, kind = head_kind(folder), recipe_of(shape).kind
    if found != kind:
        raise ConfigError("init", init, f"is a head of kind {found!r}, not {kind!r}; use the command that trains those")
    return folder


def _special_tokens(target: JobTarget) -> set[int]:
    """Special tokens of the target's tokenizer: a template may emit them, however rare they are."""
    words = load_tokenizer(target.folder)
    if words is None:
        return set()
    return {token for token in words.special_ids if token < target.vocab_size}


def train_head(job: HeadJob, ranks: Ranks | None = None) -> HeadResult:
    """Train, or resume the run in `job.out`; the best head is in `job.out/head`, its manifest in `job.out/run.json`.

    Raises:
        InputError, ModelError, StorageError, NumericsError; KeyboardInterrupt after the state is saved.
    """
    ranks = ranks or Ranks()
    run = prepare_run(job)
    head, target = run.new.head, run.target
    what = {
        "kind": head.name,
        "head": asdict(head.config),
        "init": job.init,
        "taps": {"layers": head.hidden_layers(), "convention": "enter: the residual stream after that many layers"},
        "draft_vocabulary": {"size": len(head.vocabulary.ids), "coverage": run.new.coverage},
    }
    if recipe_of(job.settings.head).begins_as_exit and job.init is None:
        what |= {"without_adapter": asdict(_passing_trainer(run, job, job.settings.train).measure())}

    def keep() -> None:
        config = target.frozen.decoder.config
        save_head(head, job.out / HEAD, config, target.folder, job.target, dtype="bfloat16")

    states = open_states(job, target, head.hidden_layers(), ranks)
    trainer = HeadTrainer(head, target.frozen, run.data, job.settings.train, job.out, keep, ranks, states)
    if ranks.is_first:
        write_manifest(job, target, run.data, what, None)
    result = trainer.run()
    if ranks.is_first:
        write_manifest(job, target, run.data, what, result)
    return result


def _passing_trainer(run: PreparedRun, job: HeadJob, config: HeadTrainConfig) -> HeadTrainer:
    """A trainer of the new head that keeps nothing and resumes nothing."""
    return HeadTrainer(run.new.head, run.target.frozen, run.data, config, job.out / "dry-run", lambda: None)


def plan_head(job: HeadJob) -> HeadPlan:
    """What `train_head` would take, from the sizes and two measured steps; trains nothing that stays."""
    run = prepare_run(job)
    config = dataclasses.replace(job.settings.train, report_every_steps=1 << 30)
    trainer = _passing_trainer(run, job, config)
    trainer.train_step()  # the first one fills memory
    started = time.perf_counter()
    trainer.train_step()
    step_s = time.perf_counter() - started
    parameters = sum(p.numel() for p in run.new.head.parameters())
    state_bytes = sum(
        value.nbytes
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    weight_bytes = run.target.frozen.decoder.weight_bytes
    return HeadPlan(
        num_parameters=parameters,
        num_steps=config.num_steps,
        tokens=config.num_steps * config.step_tokens,
        step_s=step_s,
        train_s=step_s * config.num_steps,
        memory_bytes=weight_bytes + 8 * parameters + state_bytes + _batch_bytes(run, config),
        disk_bytes=2 * (4 * parameters + state_bytes) + 2 * parameters,
        states_bytes=min(
            config.state_cache_bytes,
            states_bytes(config, run.target.frozen, len(run.new.head.hidden_layers())),
        ),
        coverage=run.new.coverage,
    )


def _batch_bytes(run: PreparedRun, config: HeadTrainConfig) -> int:
    """Hidden states, the target's logits, and what is kept of each place for the backward pass."""
    own, width = run.target.frozen.decoder.config, 4 if run.target.frozen.precision == "float32" else 2
    rows = config.batch_windows * config.length
    states = rows * own.hidden_size * (len(run.new.head.hidden_layers()) + 1)
    logits = rows * own.vocab_size
    places = 2 * config.num_places * rows * config.row_share * len(run.new.head.vocabulary.ids)
    return int(width * (states + logits + places))
