"""The life of the server: engines in worker processes, their supervision, signals, and an orderly end."""
