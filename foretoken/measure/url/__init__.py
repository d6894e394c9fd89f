"""A server under load, as its clients see it."""
