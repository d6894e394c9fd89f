"""Attention backends: `packed` for training, `paged` for the engine."""
