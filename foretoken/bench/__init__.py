"""Measuring: prompts, plain against speculative, other engines beside them, and dated reports."""
