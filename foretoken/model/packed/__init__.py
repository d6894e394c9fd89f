"""Quantised matrices of safetensors checkpoints: GPTQ, AWQ, compressed-tensors and FP8."""
