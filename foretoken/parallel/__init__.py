"""Tensor parallelism over processes: rank 0 decides, the others compute what its plans say."""
