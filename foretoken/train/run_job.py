"""What runs of heads and of draft models have in common: settings, the frozen target, the text, the manifest."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import foretoken
from foretoken.errors import ConfigError, MismatchError, StorageError
from foretoken.files import check_folder, read_json, replace_text, to_json
from foretoken.model.names import model_folder
from foretoken.model.open import open_device
from foretoken.printing.console import Console
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.answers import answered_data, folder_fingerprint
from foretoken.train.frozen_target import FrozenTarget, Precision, StateCache, entry_bytes, fast_precision
from foretoken.train.head_data import HeadData, TokenText
from foretoken.train.head_train_config import HeadTrainConfig
from foretoken.train.head_trainer import HeadResult
from foretoken.train.parallel import Ranks
from foretoken.train.recipes import CORPUS_TOKENS, prepare
from foretoken.train.training_loop import STATE_WEIGHTS, check_same

MANIFEST, STATES = "run.json", "states"
_PRECISIONS: Mapping[str, Precision | None] = {"auto": None, "bfloat16": "bfloat16", "float32": "float32"}


@dataclass(frozen=True)
class RunSettings:
    """What can be set of a run: the training, and the share of answers held out.

    `precision` "auto" multiplies in bfloat16 where the processor is faster at it.
    """

    train: HeadTrainConfig = field(default_factory=HeadTrainConfig)
    held_out_share: float = 0.05
    precision: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.held_out_share <= 0.5:
            raise ConfigError("held_out_share", self.held_out_share, "must lie above 0 and be at most 0.5")
        if self.precision not in _PRECISIONS:
            raise ConfigError("precision", self.precision, f"choose one of {', '.join(_PRECISIONS)}")


@dataclass(frozen=True)
class RunJob:
    """A run: for whom, from which text (`answers`; None: the standard library's source), into which folder."""

    target: str
    out: Path
    settings: RunSettings
    answers: Path | None = None
    corpus: Path | None = None  # folder where the standard library's tokens are kept; None: `out`
    device: str = "cpu"
    command: Sequence[str] = ()


def open_target(job: RunJob) -> FrozenTarget:
    """Load the target of a run, in the precision and on the device that it asks for.

    Raises:
        ConfigError: no such device, or windows that are longer than the target's context.
        ModelError, StorageError: the target cannot be read, or the run's folder not written.
    """
    device = open_device(job.device)
    check_folder(job.out)
    folder = model_folder(job.target)
    precision = _PRECISIONS[job.settings.precision] or fast_precision(device)
    target = FrozenTarget.load(folder, device, precision)
    length, most = job.settings.train.length, target.decoder.config.max_context_tokens
    if length > most:
        raise ConfigError("length", length, f"must be at most the target's context of {most}")
    return target


def open_states(job: RunJob, target: FrozenTarget, layers: Sequence[int], ranks: Ranks) -> StateCache | None:
    """The hidden states of a run, by rank, in `job.out/states`; None if it keeps none. Raises as `StateCache` does."""
    bound = job.settings.train.state_cache_bytes // ranks.world
    if not bound:
        return None
    console = Console(stderr=True)
    fingerprint = folder_fingerprint(target.folder)
    origin = {"target": fingerprint, "device": str(target.device.type), "torch": torch.__version__}
    folder = job.out / STATES / f"rank{ranks.rank}"
    wanted = states_bytes(job.settings.train, target, len(layers)) // ranks.world
    return StateCache(folder, target, layers, origin, bound, wanted, console.line if ranks.is_first else lambda _: None)


def states_bytes(config: HeadTrainConfig, target: FrozenTarget, num_layers: int) -> int:
    """Disk that the hidden states of a whole run take where no window comes twice, validations apart."""
    steps = config.num_steps * config.accumulate
    trained = steps * entry_bytes(target, config.batch_windows, config.length, num_layers)
    return trained + config.validate_windows * entry_bytes(target, 1, config.length, num_layers)


def open_text(job: RunJob, target: FrozenTarget, writer: Path) -> HeadData:
    """The text of a run: the answers that the model in the folder `writer` gave, or the standard library's source as
    running text.

    Raises:
        MismatchError: the target has another tokenizer than the source.
        InputError, ModelError, StorageError: see `answered_data` and `prepare`.
    """
    if job.answers is not None:
        return answered_data(job.answers, writer, target.decoder.config.vocab_size, job.settings.held_out_share)
    words = load_tokenizer(target.folder)
    vocabulary = {} if words is None else words.vocabulary
    another = MismatchError(
        f"the standard library's text has a tokenizer of its own, {target.folder} another: write answers of "
        "your own target with `foretoken train answers` and train on them (--answers)"
    )
    if len(vocabulary) != CORPUS_TOKENS:
        raise another  # before the text is read, which takes a while
    tokenizer, data = prepare(job.corpus or job.out)
    if vocabulary != tokenizer.get_vocab():
        raise another
    return HeadData(TokenText.running(data.train), TokenText.running(data.held_out), "the standard library")


def check_resumed(job: RunJob, target: FrozenTarget, what: Mapping[str, Any]) -> None:
    """Compare target and beginning (in `what`) of the run whose state is in `job.out` with this one's, by its manifest.

    Raises:
        ConfigError: names what differs.
        StorageError: the manifest cannot be read.
    """
    path = job.out / MANIFEST
    if not (job.out / STATE_WEIGHTS).exists() or not path.exists():
        return
    earlier = read_json("out", path)
    known = earlier.get("target", {}) if isinstance(earlier, dict) else None
    if not isinstance(known, dict):
        raise StorageError(f"out: {path} is no manifest of a run; remove it, or use another folder")
    if known.get("fingerprint", own := folder_fingerprint(target.folder)) != own:
        remedy = f"the run in {job.out} was started for another target, {known.get('name')}; use another folder"
        raise ConfigError("target", job.target, remedy)
    check_same(earlier, {name: what[name] for name in ("init", "on_policy") if name in what}, job.out)
    settings = earlier.get("settings")  # the share decides which text is trained on, whose change says less
    check_same(settings if isinstance(settings, dict) else {}, {"held_out_share": job.settings.held_out_share}, job.out)


def write_manifest(
    job: RunJob, target: FrozenTarget, data: HeadData, what: Mapping[str, Any], result: HeadResult | None
) -> None:
    """Write `run.json`: what was trained (`what`) for whom, on what, how, and what came of it.

    Raises:
        StorageError: it cannot be written; an earlier one is kept.
    """
    manifest: dict[str, Any] = {
        "foretoken": foretoken.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": list(job.command),
        "target": {"name": job.target, "fingerprint": folder_fingerprint(target.folder)},
        "text": {
            "source": data.source,
            "train_digest": data.train.digest,
            "train_tokens": len(data.train.ids),
            "wanted_tokens": data.train.num_wanted,
            "held_out_tokens": data.held_out.num_wanted,
        },
        "precision": target.precision,
        "settings": asdict(job.settings),
        **what,
        "result": None if result is None else asdict(result),
    }
    replace_text("out", job.out / MANIFEST, to_json(manifest, indent=2) + "\n")
