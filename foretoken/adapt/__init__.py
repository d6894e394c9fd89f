"""On-line adaptation: a head learns from the live verify passes, in the background, and is swapped between steps."""
