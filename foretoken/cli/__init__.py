"""The command line: one file per family of verbs."""

from foretoken.cli.app import main

__all__ = ["main"]
