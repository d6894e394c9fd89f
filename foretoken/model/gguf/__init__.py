"""GGUF files (llama.cpp's checkpoints): header, blocks, names, tokenizer, and what the loader reads from."""
