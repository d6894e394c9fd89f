"""Answers scored again while the engine works, to find drift."""
