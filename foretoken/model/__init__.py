"""One decoder, many checkpoints."""
