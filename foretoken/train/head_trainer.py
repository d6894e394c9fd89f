"""The training loop of heads: a frozen target reads windows of text, the head learns to draft from its states.

Resumable: the batch of a step is a function of (seed, step), so a run that is killed goes on from its last state with
the same loss curve. Heads are validated by the tokens a step would emit; the best one is kept as a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import CheckpointError, ConfigError, NumericsError, StorageError
from foretoken.files import replace_text
from foretoken.heads.base import HeadBatch
from foretoken.heads.losses import compare, target_logits, weighted_loss
from foretoken.train.frozen_target import FrozenTarget, StateCache
from foretoken.train.head_data import Batches, HeadData
from foretoken.train.head_train_config import HeadTrainConfig
from foretoken.train.optimizer import make_optimizers, rate_share, set_rate
from foretoken.train.parallel import Ranks
from foretoken.train.students import HeadAcceptance, Student, measure_head
from foretoken.train.training_loop import STATE_WEIGHTS, TrainingLoop, check_same, read_meta, restore_state, save_state

CURVE = "curve.jsonl"
# What a resumed run may change: how long it is, and what does not touch its weights or the head that is kept.
_FREE = frozenset(
    {"tokens", "seconds", "save_every_s", "report_every_steps", "validate_every_steps", "patience", "state_cache_bytes"}
)


@dataclass(frozen=True)
class HeadResult:
    """The result of a run; `acceptance` is that of the head that was kept."""

    steps: int
    tokens: int
    seconds: float
    loss: float | None  # of the last step; None if an earlier call had already finished
    acceptance: HeadAcceptance
    is_early: bool  # it ended before its last step, because nothing was gained any more


class HeadTrainer(TrainingLoop):
    """Trains `head` for `target` on `data` with its state in `folder`; `keep` stores the head, best so far.

    `states` are what the target computed in earlier steps and runs.

    With several `ranks` each computes its part of the `accumulate` batches of a step; the first one writes.
    """

    def __init__(
        self,
        head: Student,
        target: FrozenTarget,
        data: HeadData,
        config: HeadTrainConfig,
        folder: Path,
        keep: Callable[[], None],
        ranks: Ranks | None = None,
        states: StateCache | None = None,
    ) -> None:
        super().__init__(ranks)
        self.head, self.target, self.data, self.folder, self.keep = head, target, data, folder, keep
        self.config: HeadTrainConfig = config
        self.states = states
        if config.seconds and self.ranks.world > 1:
            raise ConfigError("seconds", config.seconds, "clocks of several processes differ: give train.tokens alone")
        self._output = target.output_over(head.vocabulary)
        self._parameters = [p for p in head.parameters() if p.requires_grad]
        self.batches = Batches(data.train, config.batch_windows, config.length, config.seed, config.group_batches)
        self._check_measurable()
        self.optimizers = make_optimizers(head, config.optimizer)
        self.best: HeadAcceptance | None = None
        self._num_worse = 0  # validations since the best one
        self._resume()

    def run(self) -> HeadResult:
        """Train to the end of the schedule, or until nothing is gained. An interrupted run (Ctrl-C, SIGTERM, SIGHUP)
        saves its state and resumes when called again.

        Raises:
            KeyboardInterrupt: it was interrupted; the state is saved. A handler of the signal is called first.
            NumericsError: the loss is no number; the state of the last save and the best head are kept.
            StorageError: the state cannot be written; the earlier one is kept.
        """
        loss = self._train()
        if self.best is None:
            self._validate()
        assert self.best is not None
        tokens = self.step * self.config.step_tokens
        return HeadResult(self.step, tokens, self.seconds, loss, self.best, self.is_early)

    @property
    def is_early(self) -> bool:
        """Whether the run ended because validations brought nothing."""
        return 0 < self.config.patience <= self._num_worse

    @property
    def _is_over(self) -> bool:
        return self._is_at_end or self.is_early

    @property
    def _is_at_end(self) -> bool:
        return self.step >= self.config.num_steps or self._time_used >= 1

    def _figures(self) -> str:
        return "" if self.best is None else f", {self.best.emitted_sampled:.2f} tokens per step"

    @property
    def _time_used(self) -> float:
        """Share of the run's seconds that are over; 0 without such a limit."""
        return self.seconds / self.config.seconds if self.config.seconds else 0.0

    def train_step(self) -> float:
        """One step of the optimiser; the mean loss of its batches."""
        config = self.config
        schedule = (config.num_steps, config.warmup_steps, config.decay_share, self._time_used)
        set_rate(self.optimizers, rate_share(self.step, *schedule))
        loss = torch.zeros((), device=self.target.device, dtype=torch.float32)
        for part in self.ranks.share(config.accumulate):
            loss += self._backward(part)
        loss = self.ranks.sum(loss)
        self.ranks.sum_gradients(self._parameters)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, config.clip_norm)
        if not (math.isfinite(float(loss)) and math.isfinite(float(norm))):
            raise NumericsError(
                f"the loss of step {self.step} is {float(loss)}, its gradient's norm {float(norm)}: the last saved "
                f"state and the best head are kept in {self.folder}; start again in another folder with lower rates "
                "(train.optimizer.matrix_rate, train.optimizer.vector_rate)"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return float(loss)

    def _backward(self, part: int) -> Tensor:
        """Loss and gradients of one batch of the step, divided by their number."""
        config, piece = self.config, self.step * self.config.accumulate + part
        tokens, wanted, weight = self.batches.at(piece)
        if config.row_share < 1:
            generator = torch.Generator().manual_seed(config.seed + piece)
            wanted &= torch.rand(wanted.shape, generator=generator, dtype=torch.float32) < config.row_share
        batch = self._read(tokens, wanted)
        loss = torch.zeros((), device=self.target.device, dtype=torch.float32)
        with self.target.autocast():
            logits = target_logits(batch, self._output)
            for place in self.head.places(batch, self.target.decoder, config.num_places, config.seed + piece):
                compared = compare(place, logits, config.loss)
                loss = loss + weighted_loss(place, compared, config.loss)
        loss = loss * (weight / config.accumulate)
        if loss.requires_grad:  # no row of the batch may be wanted
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _held_out(self, number: int) -> tuple[Tensor, Tensor]:
        return self.data.held_out.batch([number], self.config.length, seed=0)

    def _check_measurable(self) -> None:
        """Acceptance is that of whole drafts: held-out answers that are shorter would make every head the best."""
        most = getattr(self.head.config, "max_num_draft", None) or self.config.num_places
        count = min(most, self.config.num_places)
        for number in range(self.config.validate_windows):
            _, wanted = self._held_out(number)
            if wanted.shape[1] > count and bool(wanted[0, 1:].unfold(0, count, 1).all(-1).any()):
                return
        remedy = (
            f"no held-out answer of {self.data.source} has {count} tokens, so that no head could be measured: train "
            "fewer places (train.num_places), or on longer answers"
        )
        raise ConfigError("num_places", self.config.num_places, remedy)

    def measure(self) -> HeadAcceptance:
        """Acceptance of the head as it is, along held-out windows that are the same in every call."""
        config = self.config
        batches = (self._read(*self._held_out(number)) for number in range(config.validate_windows))
        return measure_head(self.head, self.target, batches, config.num_places)

    def _read(self, tokens: Tensor, wanted: Tensor) -> HeadBatch:
        if self.states is not None:
            return self.states.read(tokens, wanted)
        return self.target.read(tokens, wanted, self.head.hidden_layers())

    def _after_step(self, loss: float) -> None:
        """See `TrainingLoop`."""
        if self.step % self.config.report_every_steps == 0:
            self._record({"step": self.step, "seconds": round(self.seconds, 1), "loss": loss})
        if self.step % self.config.validate_every_steps == 0 or self._is_at_end:
            self._validate()

    def _validate(self) -> None:
        found = self.measure()  # every rank, with the same weights: the same figures
        is_better = self.best is None or found.emitted_sampled > self.best.emitted_sampled
        if is_better:
            self.best, self._num_worse = found, 0
            if self.ranks.is_first:
                self.keep()
        else:
            self._num_worse += 1
        self._record({"step": self.step, "seconds": round(self.seconds, 1), "validation": asdict(found)})
        places = " ".join(f"{alpha:.2f}" for alpha in found.sampled)
        self._say(
            f"step {self.step}: held-out {found.emitted_sampled:.3f} tokens per step at temperature 1 "
            f"({places}), {found.emitted_greedy:.3f} greedy{', the best so far' if is_better else ''}"
        )

    def save(self) -> None:
        """See `TrainingLoop`."""
        if not self.ranks.is_first:
            return
        meta = {
            "step": self.step,
            "seconds": self.seconds,
            "num_worse": self._num_worse,
            "best": None if self.best is None else asdict(self.best),
            "config": asdict(self.config),
            "data": self.data.train.digest,
            "held_out": self.data.held_out.digest,
            "shape": self._shape(),
        }
        save_state(self.folder, self.head, self.optimizers, meta)

    def _shape(self) -> dict[str, Any]:
        """What the saved weights and the optimisers' state belong to and were made with, as JSON has it."""
        shape: dict[str, Any] = json.loads(json.dumps(asdict(self.head.config)))
        # Ends of text and special tokens are in it whatever the text: other settings of the target move its rows.
        tokens = hashlib.sha256(str(self.head.vocabulary.ids.tolist()).encode()).hexdigest()[:16]
        return {"kind": self.head.name, **shape, "precision": self.target.precision, "draft_vocabulary": tokens}

    def _resume(self) -> None:
        meta = read_meta(self.folder)
        if meta is None:
            self._cut_curve()
            return
        same = {name: value for name, value in asdict(self.config).items() if name not in _FREE}
        del same["loss"]["chunk_rows"]  # of one calculation
        check_same(meta["config"], same, self.folder, "train.")
        held_out = self.data.held_out.digest
        if meta.get("data") != self.data.train.digest or meta.get("held_out", held_out) != held_out:
            remedy = "the run there was started with another text; use that or another folder"
            raise ConfigError("out", str(self.folder), remedy)
        check_same(meta.get("shape", {}), self._shape(), self.folder)
        restore_state(self.folder, self.head, self.optimizers)
        self.step, self.seconds = meta["step"], meta["seconds"]
        try:
            self._num_worse, best = int(meta["num_worse"]), meta["best"]
            if best is not None:
                places = {name: tuple(map(float, best[name])) for name in ("sampled", "greedy")}
                self.best = HeadAcceptance(**best | places)
        except (KeyError, TypeError, ValueError) as error:
            path = self.folder / STATE_WEIGHTS
            raise CheckpointError(f"{path} is no state of a head's run ({error}); remove it to start again") from error
        self._cut_curve()
        self._say(f"resumed at step {self.step} of {self.config.num_steps}")

    def _cut_curve(self) -> None:
        """Drop what a killed run recorded after its last save."""
        path = self.folder / CURVE
        if not self.ranks.is_first or not path.exists():
            return
        kept = []
        for line in path.read_text(errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= self.step:
                    kept.append(line + "\n")
            except (ValueError, LookupError, TypeError):  # the line that was being written, or none of ours
                break
        replace_text("out", path, "".join(kept))  # a full disk leaves the whole curve

    def _record(self, row: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / CURVE).open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise StorageError(f"cannot write the loss curve to {self.folder}: {error}") from error
