"""The training loop: resumable with the same data order, with validation loss and a progress line.

Matrices are trained with Muon (orthogonalised momentum), embeddings and norms with AdamW; the learning rate is constant
and then decays to zero over the last part of the run (warm-up, stable, decay).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.model.decoder import Decoder
from foretoken.train.configs import TrainConfig, rate_share
from foretoken.train.corpus import windows
from foretoken.train.evaluate import Agreement, agreement, bits_per_byte, cross_entropy, distillation, logits_of
from foretoken.train.optimizer import OptimizerConfig, make_optimizers, set_rate
from foretoken.train.training_loop import TrainingLoop, check_same, read_meta, restore_state, save_state

_AGREEMENT_TOKENS = 65_536


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
        self.optimizers = make_optimizers(
            model, OptimizerConfig("muon", config.matrix_rate, config.vector_rate, config.weight_decay)
        )
        self.device = next(model.parameters()).device
        self._loss: Callable[[Tensor], Tensor] = (
            torch.compile(self._loss_of, dynamic=False) if config.compile else self._loss_of
        )
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
        return Result(
            self.step,
            self.step * self.config.batch_tokens,
            self.seconds,
            loss,
            self.bits_per_byte(),
            self.held_out_agreement(),
        )

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
