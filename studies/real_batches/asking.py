"""Prompts as a user of a chat model would write them."""

from __future__ import annotations

from dataclasses import replace

from foretoken.measure.workload import Prompt

# A chat model answers a bare function with talk about it.
_ASKS = {"code": "Complete this Python code:\n\n", "edit": "Edit this code. Answer with the edited code.\n\n"}


def as_asked(prompt: Prompt) -> Prompt:
    """The prompt with what is asked before a bare task; a conversation as it is."""
    lead = _ASKS.get(prompt.slice)
    return prompt if lead is None or prompt.messages else replace(prompt, text=lead + prompt.text)
