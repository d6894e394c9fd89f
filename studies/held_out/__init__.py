"""Acceptance along text that people wrote, beside the target's own answers to the same prompts."""
