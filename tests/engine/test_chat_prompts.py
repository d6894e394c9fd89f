"""What of a conversation a chat template would leave out, or write as Python shows it, is refused or made text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretoken.engine.prompt_encoder import PromptEncoder
from foretoken.errors import InputError
from foretoken.text.tokenizer import load_tokenizer
from tests.helpers.checkpoints import tiny_tokenizer

TRIMS = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"  # as Llama 3 does, whatever a content is
READS_PARTS = """{% for m in messages %}{% for part in m.content %}{% if part['type'] == 'image' %}<image>{% else %}[{{
part['text'] }}]{% endif %}{% endfor %}{% endfor %}"""  # as Gemma 3 does, whether the model sees or not
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def encoder(folder: Path, template: str) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(tiny_tokenizer(folder, 300, chat_template=template)), folder, 300)


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_parts_of_text_are_joined_where_the_template_reads_none(tmp_path: Path) -> None:
    assert encoder(tmp_path, TRIMS).render_chat(user(text("ab"), text("cd"))) == "<ab\ncd>"
    assert encoder(tmp_path, READS_PARTS).render_chat(user(text("ab"), text("cd"))) == "[ab][cd]"


@pytest.mark.parametrize("template", [TRIMS, READS_PARTS])
@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "input_audio", "video"])
def test_pictures_and_sounds_are_refused_by_name(tmp_path: Path, template: str, kind: str) -> None:
    chat = user(text("what is it?"), {"type": kind, kind: "data:"})
    for ask in (encoder(tmp_path, template).render_chat, encoder(tmp_path, template).encode_chat):
        with pytest.raises(InputError, match=rf"messages\.0\.content='a part of type {kind}': is not taken"):
            ask(chat)


def test_tools_that_the_template_leaves_out_are_refused(tmp_path: Path) -> None:
    chat = user(text("ab"))
    for tools in (None, []):
        assert encoder(tmp_path, TRIMS).render_chat(chat, tools) == "<ab>"
    with pytest.raises(InputError, match="takes no tools"):
        encoder(tmp_path, TRIMS).encode_chat(chat, [TOOL])
    shows = encoder(tmp_path, TRIMS + "{{ tools[0].function.name }}")
    assert shows.render_chat(chat, [TOOL]) == "<ab>f"
    wrong: Any
    for wrong in (TOOL, "f", ["f"]):
        with pytest.raises(InputError, match=r"tools=.*give a list of mappings"):
            shows.render_chat(chat, wrong)
