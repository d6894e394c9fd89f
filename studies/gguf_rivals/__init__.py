"""Two engines on the same GGUF files, ours and llama.cpp: bits per byte of held-out text, and the cost of a step."""
