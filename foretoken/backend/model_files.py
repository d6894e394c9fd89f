"""What a model's files say about tools and about filling in the middle."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_TAKES_TOOLS = re.compile(r"\btools\b")
# A role compared with a text, or with a list of texts: message['role'] == 'user', message.role in ["tool", "ipython"].
_COMPARED_ROLE = re.compile(r"""\brole['"\])\s]*(?:==|!=|(?:not\s+)?in\b)\s*([\[(][^\])]*[\])]|'[^']*'|"[^"]*")""")
_QUOTED = re.compile(r"""['"]([\w-]{1,64})['"]""")
_FIM_TOKENS = (  # before the prefix, before the suffix, before the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def tool_style(chat_template: str | None) -> str | None:
    """How a chat template lets the model write calls, see `foretoken.server.api.tool_reader`; None without tools."""
    if chat_template is None or not _TAKES_TOOLS.search(chat_template):
        return None
    if "<tool_call>" in chat_template:
        return "tags"
    return "json_parameters" if '"parameters":' in chat_template.replace("\\", "") else "json_arguments"


def template_roles(chat_template: str | None) -> tuple[str, ...]:
    """The roles of messages that a chat template names, each once."""
    compared = _COMPARED_ROLE.findall(chat_template or "")
    return tuple(dict.fromkeys(role for texts in compared for role in _QUOTED.findall(texts)))


def fim_tokens(vocabulary: Mapping[str, int], opening_ids: Sequence[int]) -> tuple[tuple[int, ...], int, int] | None:
    """Tokens before the prefix (`opening_ids` with them, which begin every text), before the suffix and before the
    middle, for models trained to fill in the middle; None for others.
    """
    for marks in _FIM_TOKENS:
        if all(mark in vocabulary for mark in marks):
            before_prefix, before_suffix, before_middle = (vocabulary[mark] for mark in marks)
            return (*opening_ids, before_prefix), before_suffix, before_middle
    return None
