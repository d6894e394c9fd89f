"""The machine that this process runs on: cores, neighbours, how threads are to wait. Nothing here imports torch."""
