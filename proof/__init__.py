"""Long proofs: what holds over many hours of use, in minutes. Run by `make proof`."""
