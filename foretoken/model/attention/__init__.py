"""Attention backends: `packed` for training, `paged` and `batched` for the engine, `strict` with strict numerics."""
