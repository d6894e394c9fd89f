"""How a matrix is held and multiplied by: numbers, codes in groups, kernels."""
