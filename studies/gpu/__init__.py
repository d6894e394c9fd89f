"""One command for a bare machine with a GPU: correctness first, then what the steps and the drafters cost."""
