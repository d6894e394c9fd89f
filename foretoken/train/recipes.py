"""The trainer of language models (resumable with the same data order), and its recipes: the model of the reference
family, and a draft distilled from it.

Matrices are trained with Muon (orthogonalised momentum), embeddings and norms with AdamW; the learning rate is constant
and then decays to zero over the last part of the run (warm-up, stable, decay).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from foretoken.errors import ConfigError, MismatchError, StorageError
from foretoken.files import check_folder, replace_text
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder
from foretoken.model.open import open_device
from foretoken.model.saving import save_checkpoint
from foretoken.printing.console import Console
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.corpus import END_OF_TEXT, encode, standard_library, tokenizer_config, train_tokenizer, windows
from foretoken.train.evaluate import Agreement, agreement, bits_per_byte, cross_entropy, distillation, logits_of
from foretoken.train.optimizer import OptimizerConfig, make_optimizers, rate_share, set_rate
from foretoken.train.run_options import TrainConfig
from foretoken.train.training_loop import TrainingLoop, check_same, read_meta, restore_state, save_state

_AGREEMENT_TOKENS = 65_536
CONTEXT_TOKENS = 2048
CORPUS_TOKENS = 4096  # of the tokenizer that the standard library gets


@dataclass(frozen=True)
class Data:
    """Token ids for training and validation; `held_out_bytes` is the length of the held-out text."""

    train: npt.NDArray[np.uint16]
    held_out: npt.NDArray[np.uint16]
    held_out_bytes: int


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    steps: int
    tokens: int
    seconds: float
    loss_nats: float | None  # of the last step; None if an earlier call had already finished
    bits_per_byte: float
    agreement: Agreement | None = None


class Trainer(TrainingLoop):
    """Trains `model` on `data`, by distillation if `teacher` is given, keeping its state in `folder`."""

    def __init__(
        self, model: Decoder, data: Data, config: TrainConfig, folder: Path, teacher: Decoder | None = None
    ) -> None:
        super().__init__()
        self.model, self.data, self.folder, self.teacher = model, data, folder, teacher
        self.config: TrainConfig = config
        rates = config.matrix_rate, config.vector_rate
        self.optimizers = make_optimizers(model, OptimizerConfig("muon", *rates, config.weight_decay))
        self.device = next(model.parameters()).device
        self._loss: Callable[[Tensor], Tensor] = self._loss_of
        if config.compile:
            self._loss = torch.compile(self._loss_of, dynamic=False)
        self._resume()

    def run(self) -> Result:
        """Train to the end of the schedule. An interrupted run (Ctrl-C, SIGTERM, SIGHUP) saves its state and resumes
        when called again.

        Raises:
            KeyboardInterrupt: it was interrupted; the state is saved. A handler of the signal is called first.
            StorageError: the state cannot be written.
        """
        if self.config.compile and not self._is_over:
            self._say("compiling the training step: the first one takes a minute or two")
        loss = self._train()
        tokens, figures = self.step * self.config.batch_tokens, (self.bits_per_byte(), self.held_out_agreement())
        return Result(self.step, tokens, self.seconds, loss, *figures)

    def train_step(self) -> float:
        """See `TrainingLoop`."""
        config, length = self.config, self.config.length_at(self.step)
        batch = windows(self.data.train, self.step, config.batch_tokens // length, length, config.seed)
        rate = rate_share(self.step, config.num_steps, config.warmup_steps, config.decay_share)
        set_rate(self.optimizers, rate)
        loss = self._loss(torch.from_numpy(batch).to(self.device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def _after_step(self, loss: float) -> None:  # noqa: ARG002
        """See `TrainingLoop`."""
        if self.step % self.config.validate_every_steps == 0:
            self._say(f"step {self.step}: held-out {self.bits_per_byte():.4f} bits per byte")

    def _loss_of(self, batch: Tensor) -> Tensor:
        """Loss of `batch` [B, S + 1]; distillation when there is a teacher."""
        with torch.autocast(batch.device.type, torch.bfloat16):
            logits = logits_of(self.model, batch[:, :-1])
            if self.teacher is None:
                return cross_entropy(logits, batch[:, 1:].reshape(-1))
            with torch.no_grad():
                teacher_logits = logits_of(self.teacher, batch[:, :-1])
            return distillation(teacher_logits, logits)

    def bits_per_byte(self) -> float:
        """Held-out loss in bits per byte of text."""
        return bits_per_byte(self.model, self.data.held_out.tolist(), self.data.held_out_bytes)

    def held_out_agreement(self) -> Agreement | None:
        """Acceptance of this model's tokens by the teacher, along the first held-out tokens; None without a teacher."""
        if self.teacher is None:
            return None
        return agreement(self.teacher, self.model, self.data.held_out[:_AGREEMENT_TOKENS].tolist())

    def save(self) -> None:
        """See `TrainingLoop`."""
        meta = {"step": self.step, "seconds": self.seconds, "config": asdict(self.config)}
        save_state(self.folder, self.model, self.optimizers, meta)

    def _resume(self) -> None:
        meta = read_meta(self.folder)
        if meta is None:
            return
        own = asdict(self.config)
        check_same(meta["config"], {name: own[name] for name in ("batch_tokens", "seed", "length")}, self.folder)
        restore_state(self.folder, self.model, self.optimizers)
        self.step, self.seconds = meta["step"], meta["seconds"]
        self._say(f"resumed at step {self.step} of {self.config.num_steps}")


@dataclass(frozen=True)
class ModelSize:
    """Size of a Llama-architecture model to train from scratch."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise ConfigError(name, size, "must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_heads", self.num_heads, f"must be a multiple of num_kv_heads={self.num_kv_heads}")


TARGET_SHAPE = ModelSize(hidden_size=256, intermediate_size=640, num_layers=8, num_heads=4, num_kv_heads=2)
DRAFT_SHAPE = ModelSize(hidden_size=128, intermediate_size=384, num_layers=2, num_heads=2, num_kv_heads=1)


def prepare(folder: Path) -> tuple[Tokenizer, Data]:
    """Tokenizer and token ids of the standard library, computed once and stored in `folder`."""
    corpus_file = folder / "corpus.npz"
    if not corpus_file.exists():
        Console(stderr=True).line("reading the standard library and learning its tokens: about half a minute")
        corpus = standard_library()
        tokenizer = train_tokenizer((d.text for d in corpus.train if d.slice == "code"), CORPUS_TOKENS)
        held_out = [d for d in corpus.held_out if d.slice == "code"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text("out", folder / "tokenizer.json", tokenizer.to_str(pretty=True))
            size = sum(len(d.text.encode()) for d in held_out)
            # numpy requires the suffix; an interruption must not leave half a corpus, nor another process move it away
            partial, ids = folder / f"corpus.{os.getpid()}.partial.npz", encode(tokenizer, corpus.train)
            np.savez(partial, train=ids, held_out=encode(tokenizer, held_out), held_out_bytes=size)
            partial.replace(corpus_file)
        except OSError as error:
            raise StorageError(f"cannot write the corpus to {folder}: {error}") from error
    try:
        with np.load(corpus_file) as arrays:
            data = Data(arrays["train"], arrays["held_out"], int(arrays["held_out_bytes"]))
        return Tokenizer.from_file(str(folder / "tokenizer.json")), data
    except Exception as error:  # numpy and tokenizers raise various types for a broken file
        raise StorageError(
            f"the corpus in {folder} cannot be read ({error}); remove corpus.npz there to make it again"
        ) from error


def model_config(shape: ModelSize, tokenizer: Tokenizer) -> ModelConfig:
    """Llama configuration of `shape` for `tokenizer`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    return ModelConfig(
        model_type="llama",
        vocab_size=tokenizer.get_vocab_size(),
        max_context_tokens=CONTEXT_TOKENS,
        tie_embeddings=True,
        bos_token_id=end,
        eos_token_ids=(end,),
        dtype="bfloat16",
        **asdict(shape),
    )


def train_lm(
    out: Path,
    shape: ModelSize,
    config: TrainConfig,
    teacher: Path | None = None,
    corpus: Path | None = None,
    init: Path | None = None,
    device: str = "cpu",
) -> tuple[Result, Path]:
    """Train a model of `shape`, or resume the run in `out`; returns the result and the folder of the model.

    With `teacher` the model is distilled from that checkpoint, whose tokenizer must be that of the corpus. `corpus` is
    the folder of a run whose tokenizer and tokens are used, `init` a checkpoint of the same shape to start from.

    Raises:
        ConfigError, MismatchError, StorageError; KeyboardInterrupt after the state is saved.
    """
    place = open_device(device)
    for name in ("length", "final_length"):
        if getattr(config, name) > CONTEXT_TOKENS:
            remedy = f"must be at most the model's context of {CONTEXT_TOKENS} tokens"
            raise ConfigError(name, getattr(config, name), remedy)
    check_folder(out)  # reading the corpus takes half a minute
    if corpus is not None and not os.path.exists(corpus / "corpus.npz"):
        raise StorageError(
            f"{corpus} holds no corpus.npz: give the folder of a run, or leave the corpus out to make one"
        )
    tokenizer, data = prepare(corpus or out)
    decoder = Decoder(model_config(shape, tokenizer))
    decoder.initialise(config.seed)
    if init is not None:
        decoder = _start_from(init, decoder.config)
    teacher_decoder = None if teacher is None else _load_teacher(teacher, tokenizer, place)
    trainer = Trainer(decoder.to(place), data, config, out, teacher_decoder)
    result = trainer.run()
    folder = out / "model"
    save_checkpoint(decoder.to(device="cpu", dtype=torch.bfloat16), decoder.config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    return result, folder


def _start_from(folder: Path, config: ModelConfig) -> Decoder:
    decoder = load_decoder(folder, dtype="float32", pack=False)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in sizes:
        if getattr(decoder.config, name) != getattr(config, name):
            raise MismatchError(
                f"{folder} has {name}={getattr(decoder.config, name)}, this run {getattr(config, name)}: "
                "start from a model of the same shape"
            )
    return decoder.requires_grad_(True)


def _load_teacher(folder: Path, tokenizer: Tokenizer, device: torch.device) -> Decoder:
    teacher = load_decoder(folder, dtype="float32", device=device, pack=False)
    teacher.requires_grad_(False)
    if teacher.config.vocab_size != tokenizer.get_vocab_size():
        raise MismatchError(
            f"the teacher has {teacher.config.vocab_size} tokens, the corpus "
            f"{tokenizer.get_vocab_size()}: use its --corpus"
        )
    words = load_tokenizer(folder)
    if words is not None and words.vocabulary != tokenizer.get_vocab():
        raise MismatchError(f"the teacher in {folder} has another tokenizer than the corpus: use its --corpus")
    return teacher
