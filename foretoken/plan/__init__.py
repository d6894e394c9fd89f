"""Arithmetic without tensors for the verb `plan`: memory, roofline, and the format of profiles."""
