"""GGUF files (llama.cpp's checkpoints): header, blocks, names, tokenizer, and the interface that the loader reads from."""
