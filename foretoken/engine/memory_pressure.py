"""Smaller steps after the device ran out of memory, for a while."""

from __future__ import annotations

from dataclasses import replace

import torch

from foretoken.control.queue import SchedulerConfig

MIN_PROMPT_TOKENS = 16  # of a step: below, a step costs the same and reads less
PATIENCE_STEPS = 32  # without such an error, until steps may be twice as large again


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that memory could not be had: of a device, or of the machine."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's own on a CPU
            return True
        error = error.__cause__
    return False


class MemoryPressure:
    """Limits on a step beside those of `SchedulerConfig`; None: no limit.

    `max_requests` may run at once, and a step reads at most `max_prompt_tokens` of prompts. A request that runs alone
    makes no draft tokens, but for those on which the draws of its seed depend.
    """

    def __init__(self) -> None:
        self.max_requests: int | None = None
        self.max_prompt_tokens: int | None = None
        self._num_quiet = 0  # steps since the limits were set

    @property
    def is_tight(self) -> bool:
        """Whether draft tokens have to go, too: one request runs at a time."""
        return self.max_requests == 1

    def shrink(self, num_requests: int, config: SchedulerConfig) -> bool:
        """A step of `num_requests` was too large; False if no smaller step is left to try."""
        self._num_quiet = 0
        smallest = min(MIN_PROMPT_TOKENS, config.max_prompt_tokens)
        was_smallest = self.is_tight and self.max_prompt_tokens == smallest
        if num_requests <= 1 and was_smallest:
            return False
        known = config.max_prompt_tokens if self.max_prompt_tokens is None else self.max_prompt_tokens
        self.max_requests, self.max_prompt_tokens = max(1, num_requests // 2), max(smallest, known // 2)
        return True

    def begin_step(self, config: SchedulerConfig) -> None:
        """Another step; limits that have lasted for long enough are doubled, or end."""
        if self.max_requests is None or self.max_prompt_tokens is None:
            return
        self._num_quiet += 1
        if self._num_quiet <= PATIENCE_STEPS:
            return
        self._num_quiet = 0
        self.max_requests, self.max_prompt_tokens = 2 * self.max_requests, 2 * self.max_prompt_tokens
        if self.max_requests >= config.max_batch_size and self.max_prompt_tokens >= config.max_prompt_tokens:
            self.max_requests = self.max_prompt_tokens = None

    def narrowed(self, config: SchedulerConfig) -> SchedulerConfig:
        """`config` with the smaller limit on prompts; a batch limit there would change what seeds draw."""
        most = self.max_prompt_tokens
        if most is None or most >= config.max_prompt_tokens:
            return config
        return replace(config, max_prompt_tokens=most)
