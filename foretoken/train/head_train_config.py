"""Settings of a run of the trainer of heads."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.errors import ConfigError
from foretoken.heads.losses import LossConfig
from foretoken.train.optimizer import OptimizerConfig


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
        if not self.save_every_s >= 0:  # no number: the state would not be saved before the end
            raise ConfigError("save_every_s", self.save_every_s, "must be a number of seconds, at least 0")
        if self.warmup_steps < 0:
            raise ConfigError("warmup_steps", self.warmup_steps, "must be at least 0 (none)")
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
