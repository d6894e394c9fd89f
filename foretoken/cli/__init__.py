"""The command line: one file per family of verbs."""

from foretoken.cli.start import main

__all__ = ["main"]
