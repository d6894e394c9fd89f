"""A whole run of `foretoken train eagle|medusa|block`: text, head, training, the finished directory, a manifest."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import foretoken
from foretoken.errors import ConfigError, MismatchError, StorageError
from foretoken.files import check_folder, to_json
from foretoken.heads.checkpoint import save_head
from foretoken.model.open import model_folder, open_device
from foretoken.model.tokenizer import load_tokenizer
from foretoken.train.answers import answered_data, folder_fingerprint
from foretoken.train.frozen_target import FrozenTarget, Precision, fast_precision
from foretoken.train.head_data import HeadData, TokenText
from foretoken.train.head_recipes import EagleShape, HeadShape, NewHead, new_head
from foretoken.train.head_trainer import HeadResult, HeadTrainConfig, HeadTrainer
from foretoken.train.parallel import Ranks
from foretoken.train.recipes import prepare

MANIFEST, HEAD = "run.json", "head"


@dataclass(frozen=True)
class HeadSettings:
    """What can be set of a run: the shape of the head, the training, and the share of answers held out.

    `precision` "auto" multiplies in bfloat16 where the processor is faster at it.
    """

    head: HeadShape = field(default_factory=EagleShape)
    train: HeadTrainConfig = field(default_factory=HeadTrainConfig)
    held_out_share: float = 0.05
    precision: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.held_out_share <= 0.5:
            raise ConfigError("held_out_share", self.held_out_share, "must lie above 0 and be at most 0.5")
        if self.precision not in ("auto", "bfloat16", "float32"):
            raise ConfigError("precision", self.precision, "choose auto, bfloat16 or float32")


@dataclass(frozen=True)
class HeadJob:
    """A run: whose head, from which text (`answers`; None: the standard library's source), into which folder."""

    target: str
    out: Path
    settings: HeadSettings
    answers: Path | None = None
    corpus: Path | None = None  # folder where the standard library's tokens are kept; None: `out`
    device: str = "cpu"
    command: Sequence[str] = ()


@dataclass(frozen=True)
class HeadPlan:
    """What a run would take. `step_s` was measured by two steps on this machine; `disk_bytes` is the state, twice while
    it is written, and the finished head.
    """

    num_parameters: int
    num_steps: int
    tokens: int
    step_s: float
    train_s: float
    memory_bytes: int
    disk_bytes: int
    coverage: float


@dataclass(frozen=True)
class PreparedRun:
    """Everything that a trainer needs."""

    folder: Path  # of the target
    target: FrozenTarget
    data: HeadData
    new: NewHead


def prepare_run(job: HeadJob) -> PreparedRun:
    """Load the target, read the text, make the head.

    Raises:
        InputError, ModelError, StorageError: see the parts.
    """
    device = open_device(job.device)
    check_folder(job.out)
    folder = model_folder(job.target)
    wanted = job.settings.precision
    precision: Precision = "bfloat16" if wanted == "bfloat16" else "float32"
    target = FrozenTarget.load(folder, device, fast_precision(device) if wanted == "auto" else precision)
    config, length = target.decoder.config, job.settings.train.length
    if length > config.max_context_tokens:
        raise ConfigError("length", length, f"must be at most the target's context of {config.max_context_tokens}")
    data = _text(job, folder, config.vocab_size)
    always = {*config.eos_token_ids, *_special_tokens(folder, config.vocab_size)}
    counts = data.train.counts(config.vocab_size)
    new = new_head(job.settings.head, target, counts, always, job.settings.train.seed)
    return PreparedRun(folder, target, data, new)


def _text(job: HeadJob, folder: Path, vocab_size: int) -> HeadData:
    if job.answers is not None:
        return answered_data(job.answers, folder, vocab_size, job.settings.held_out_share)
    return library_data(job.corpus or job.out, folder)


def library_data(corpus: Path, target: Path) -> HeadData:
    """The standard library's source as running text for the target in the folder `target`; kept in `corpus`.

    Raises:
        MismatchError: the target has another tokenizer.
        StorageError: see `prepare`.
    """
    tokenizer, data = prepare(corpus)
    words = load_tokenizer(target)
    if words is None or words.vocabulary != tokenizer.get_vocab():
        raise MismatchError(
            f"the standard library's text has the reference family's tokenizer, {target} another: write answers of "
            "your own target with `foretoken train answers` and train on them (--answers)"
        )
    return HeadData(TokenText.running(data.train), TokenText.running(data.held_out), "the standard library")


def _special_tokens(folder: Path, vocab_size: int) -> set[int]:
    """Special tokens of the target's tokenizer: a template may emit them, however rare they are."""
    words = load_tokenizer(folder)
    if words is None:
        return set()
    return {token for token in words.special_ids if token < vocab_size}


def train_head(job: HeadJob, ranks: Ranks | None = None) -> HeadResult:
    """Train, or resume the run in `job.out`; the best head is in `job.out/head`, its manifest in `job.out/run.json`.

    Raises:
        InputError, ModelError, StorageError, NumericsError; KeyboardInterrupt after the state is saved.
    """
    ranks = ranks or Ranks()
    run = prepare_run(job)

    def keep() -> None:
        save_head(run.new.head, job.out / HEAD, run.target.decoder.config, run.folder, job.target, dtype="bfloat16")

    trainer = HeadTrainer(run.new.head, run.target, run.data, job.settings.train, job.out, keep, ranks)
    if ranks.is_first:
        write_manifest(job, run, None)
    result = trainer.run()
    if ranks.is_first:
        write_manifest(job, run, result)
    return result


def plan_head(job: HeadJob) -> HeadPlan:
    """What `train_head` would take, from the sizes and two measured steps; trains nothing that stays."""
    run = prepare_run(job)
    config = dataclasses.replace(job.settings.train, report_every_steps=1 << 30)
    trainer = HeadTrainer(run.new.head, run.target, run.data, config, job.out / "dry-run", lambda: None)
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
    return HeadPlan(
        num_parameters=parameters,
        num_steps=config.num_steps,
        tokens=config.num_steps * config.step_tokens,
        step_s=step_s,
        train_s=step_s * config.num_steps,
        memory_bytes=run.target.decoder.weight_bytes + 8 * parameters + state_bytes + _batch_bytes(run, config),
        disk_bytes=2 * (4 * parameters + state_bytes) + 2 * parameters,
        coverage=run.new.coverage,
    )


def _batch_bytes(run: PreparedRun, config: HeadTrainConfig) -> int:
    """Hidden states, the target's logits, and what is kept of each place for the backward pass."""
    own, width = run.target.decoder.config, 4 if run.target.precision == "float32" else 2
    rows = config.batch_windows * config.length
    states = rows * own.hidden_size * (len(run.new.head.hidden_layers()) + 1)
    logits = rows * own.vocab_size
    places = 2 * config.num_places * rows * config.row_share * len(run.new.head.vocabulary.ids)
    return int(width * (states + logits + places))


def write_manifest(job: HeadJob, run: PreparedRun, result: HeadResult | None) -> None:
    """Write `run.json`: what was trained for whom, on what, how, and what came of it.

    Raises:
        StorageError: it cannot be written.
    """
    head = run.new.head
    manifest: dict[str, Any] = {
        "foretoken": foretoken.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": list(job.command),
        "kind": head.name,
        "target": {"name": job.target, "fingerprint": folder_fingerprint(run.folder)},
        "text": {
            "source": run.data.source,
            "train_digest": run.data.train.digest,
            "train_tokens": len(run.data.train.ids),
            "wanted_tokens": run.data.train.num_wanted,
            "held_out_tokens": run.data.held_out.num_wanted,
        },
        "head": asdict(head.config),
        "taps": {"layers": head.hidden_layers(), "convention": "enter: the residual stream after that many layers"},
        "draft_vocabulary": {"size": len(head.vocabulary.ids), "coverage": run.new.coverage},
        "precision": run.target.precision,
        "settings": asdict(job.settings),
        "result": None if result is None else asdict(result),
    }
    path = job.out / MANIFEST
    try:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(to_json(manifest, indent=2) + "\n")
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
