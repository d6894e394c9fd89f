"""Attention backends: `packed` for training, `paged` for the engine, `strict` for the engine with strict numerics."""
