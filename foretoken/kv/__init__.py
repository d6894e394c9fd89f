"""Where the past lives: block tables (`blocks`, no tensors) over a pool of keys and values (`pool`)."""
