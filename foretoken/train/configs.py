"""Settings of runs of the trainers: of language models, and of heads."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.errors import ConfigError
from foretoken.heads.losses import LossConfig
from foretoken.option import option
from foretoken.train.optimizer import OptimizerConfig


def rate_share(step: int, num_steps: int, warmup_steps: int, decay_share: float, time_used: float = 0.0) -> float:
    """Learning rate at `step` as a share of the peak: warm-up, stable, and linear decay to zero in the last
    `decay_share` of the run.

    `time_used` is the share of the run's time that is over: the further one of steps and time counts.
    """
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    left = min(num_steps - step, num_steps * (1 - min(1.0, time_used)))
    return warm * min(1.0, left / max(1.0, num_steps * decay_share))


@dataclass(frozen=True)
class TrainConfig:
    """One run of the trainer; lengths in tokens, times in seconds."""

    tokens: int = field(default=60_000_000, metadata=option("Tokens to train on in the whole run."))
    batch_tokens: int = field(default=8192, metadata=option("Tokens per optimiser step."))
    length: int = field(
        default=512, metadata=option("Tokens per training window; the last part of the run uses longer ones.")
    )
    final_length: int = 1024  # window length during the last `final_share` of the run
    final_share: float = 0.15
    matrix_rate: float = 4e-3
    vector_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_share: float = 0.35
    clip_norm: float = 1.0
    seed: int = field(default=0, metadata=option("Random seed of weights and data order."))
    compile: bool = field(
        default=True,
        metadata=option("Compile the step (needs a C compiler).", name="compile_model", flags=("--compile",)),
    )
    save_every_s: float = 240.0
    report_every_steps: int = 50
    validate_every_steps: int = 500

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "length", "final_length"):
            if getattr(self, name) <= 0:
                raise ConfigError(name, getattr(self, name), "must be positive")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "must lie between 0 and 2**63 - 1")
        if self.batch_tokens < max(self.length, self.final_length):
            raise ConfigError(
                "batch_tokens", self.batch_tokens, "must hold at least one window of `final_length` tokens"
            )
        for name in ("final_share", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "must lie between 0 and 1")

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_tokens

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps in the whole run."""
        return max(1, self.tokens // self.batch_tokens)

    def length_at(self, step: int) -> int:
        """Window length at `step`."""
        return self.final_length if step >= self.num_steps * (1 - self.final_share) else self.length


@dataclass(frozen=True)
class HeadTrainConfig:
    """One run; lengths in tokens, times in seconds.

    A step is `accumulate` batches of `batch_windows` windows of `length` tokens. `num_places` predictions are learnt at
    each position, from a random `row_share` of the positions: in a small head the output matrix costs most, and
    neighbours teach much the same. The windows of `group_batches` batches are dealt out by length, which leaves little
    padding (1: as they are drawn). With `seconds` above 0 the run ends after so many, and its rate falls in time for
    whichever of tokens and seconds ends first. The run ends early after `patience` validations without a better head
    (0: never). Up to `state_cache_bytes` of hidden states are kept on disk (0: none), see `frozen_target`.
    """

    tokens: int = 3_000_000
    seconds: float = 0.0
    batch_windows: int = 4
    group_batches: int = 1
    accumulate: int = 1
    length: int = 512
    num_places: int = 4
    row_share: float = 1.0
    warmup_steps: int = 30
    decay_share: float = 0.5
    clip_norm: float = 1.0
    seed: int = 0
    save_every_s: float = 60.0
    report_every_steps: int = 20
    validate_every_steps: int = 100
    validate_windows: int = 16
    patience: int = 0
    state_cache_bytes: int = 0
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        counts = ("tokens", "batch_windows", "group_batches", "accumulate", "num_places", "validate_windows")
        for name in (*counts, "report_every_steps", "validate_every_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if not self.seconds >= 0:
            raise ConfigError("seconds", self.seconds, "must be at least 0 (no limit)")
        if self.state_cache_bytes < 0:
            raise ConfigError("state_cache_bytes", self.state_cache_bytes, "must be at least 0 (none is kept)")
        if self.length < 2 * self.num_places:
            raise ConfigError("length", self.length, f"must be at least twice the {self.num_places} places")
        if not self.clip_norm > 0:  # 0 stops learning, less turns it round
            raise ConfigError("clip_norm", self.clip_norm, "must lie above 0")
        if not 0 < self.row_share <= 1:
            raise ConfigError("row_share", self.row_share, "must lie above 0 and be at most 1")
        if not 0 <= self.decay_share <= 1:
            raise ConfigError("decay_share", self.decay_share, "must lie between 0 and 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "must lie between 0 and 2**63 - 1")

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.batch_windows * self.accumulate * self.length

    @property
    def num_steps(self) -> int:
        """Steps in the whole run."""
        return max(1, self.tokens // self.step_tokens)
