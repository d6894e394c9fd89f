"""Long proofs, run by `make proof`: pytest collects them only when this folder is named."""
