"""Experiments around foretoken, with their tests; not part of the package."""
