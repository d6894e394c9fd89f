"""The learning rate over a run: warm-up, stable, linear decay to zero."""

from __future__ import annotations


def rate_share(step: int, num_steps: int, warmup_steps: int, decay_share: float) -> float:
    """Learning rate at `step` as a share of the peak; the last `decay_share` of the run decays."""
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    remaining = (num_steps - step) / max(1.0, num_steps * decay_share)
    return warm * min(1.0, remaining)
