"""Chat templates: the text that transformers makes of them, and a bounded, typed end for those that mean harm."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from foretoken import CheckpointError, InputError
from foretoken.text import chat_template
from foretoken.text.chat_template import render
from foretoken.text.tokenizer import load_tokenizer
from tests import helpers
from tests.helpers.checkpoints import tiny_tokenizer

# Written after the templates of these families; `features` uses what else templates use.
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(helpers.__file__).parent / "chat_templates").glob("*.jinja"))
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks <up> é",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
CALL = {"id": "123456789", "type": "function", "function": {"name": "look", "arguments": {"q": "<b> é"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"role": "user", "content": " hi <b> "},
        {"role": "assistant", "content": "für 😀"},
        {"role": "user", "content": "and?"},
    ],
    "tools": [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "123456789"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\nit is 42"},
        {"role": "user", "content": "thanks"},
    ],
    "reasoning": [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "so", "reasoning": "because"},
        {"role": "user", "content": "next"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " look "}, {"type": "image", "image": object()}]}],
    "numbers": [
        {
            "role": "user",
            "content": "x",
            "score": np.float64(0.5),
            "many": [np.int64(3), True, None],
            "array": np.ones(2),
        }
    ],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("reference")))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(reference: Any, name: str, chat: str) -> None:
    """What a known kind of template makes of a chat, or that it refuses it."""
    specials = dict(reference.special_tokens_map)
    for tools in (None, TOOLS):
        for opened in (True, False):
            try:
                expected = reference.apply_chat_template(
                    CHATS[chat],
                    tools=tools,
                    chat_template=TEMPLATES[name],
                    tokenize=False,
                    add_generation_prompt=opened,
                )
            except (
                jinja2.TemplateError,
                TypeError,
                ValueError,
            ):  # whatever the template makes of a chat that is not meant for it
                with pytest.raises((InputError, CheckpointError)):
                    render(TEMPLATES[name], CHATS[chat], opened, tools, specials, "here")
                continue
            assert render(TEMPLATES[name], CHATS[chat], opened, tools, specials, "here") == expected


CONTINUED: dict[str, str | list[dict[str, str]]] = {
    "a word": "Once upon",
    "spaces at the end": "Sure,  \n",
    "spaces alone": "  ",
    "nothing": "",
    "its own words before": "hi",
    "parts": [{"type": "text", "text": "The first."}, {"type": "text", "text": "The sec"}],
}


@pytest.mark.parametrize("content", CONTINUED)
@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"features"}))  # which changes letters
def test_a_last_message_is_continued_where_transformers_continues_it(
    reference: Any, tmp_path: Path, name: str, content: str
) -> None:
    """`reference` has the same files. Transformers cannot always find an empty text in the result."""
    chat = [*CHATS["plain"], {"role": "assistant", "content": CONTINUED[content]}]
    own = load_tokenizer(tiny_tokenizer(tmp_path)).with_template(TEMPLATES[name])
    asked = {"tokenize": False, "chat_template": TEMPLATES[name]}
    if isinstance(CONTINUED[content], list) and not chat_template.takes_parts(TEMPLATES[name]):
        return  # written as Python shows a list; `render_chat` joins the parts before
    try:
        expected = reference.apply_chat_template(chat, continue_final_message=True, **asked)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        if not str(CONTINUED[content]).strip() and "final message" in str(error):
            return
        with pytest.raises((InputError, CheckpointError)):
            own.apply_chat_template(chat, options={"continue_final_message": True})
        return
    assert own.apply_chat_template(chat, options={"continue_final_message": True}) == expected
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert own.apply_chat_template(chat, options=both) == expected


def test_a_message_that_calls_a_tool_is_not_continued(tmp_path: Path) -> None:
    own = load_tokenizer(tiny_tokenizer(tmp_path)).with_template("{{ messages[0].content }}")
    chat = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(InputError, match=r"continue_final_message=True.*calls no tool"):
        own.apply_chat_template(chat, options={"continue_final_message": True})


@pytest.mark.parametrize(
    ("template", "content", "named"),
    [
        ("{{ messages | length }}", "text", "does not write the text of the last message"),
        ("{{ messages[0].content }}", None, "a text"),
        ("{{ messages[0].content }}", [{"type": "image"}], "a text"),
    ],
)
def test_what_cannot_be_continued_is_refused(tmp_path: Path, template: str, content: Any, named: str) -> None:
    own = load_tokenizer(tiny_tokenizer(tmp_path)).with_template(template)
    with pytest.raises(InputError, match=f"continue_final_message=True.*{named}"):
        own.apply_chat_template([{"role": "assistant", "content": content}], options={"continue_final_message": True})


MESSAGES = [{"role": "user", "content": "hi"}]
BROKEN = [
    ("{% for", "is broken: line 1"),
    ("{{ nothing.at.all }}", "undefined"),
    ("{{ messages.append(1) }}", "failed"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{% set ns = namespace(_x=1) %}", "'_x' cannot be set"),
    ("{% include '/etc/passwd' %}", "no loader"),
    ("{% import '/etc/passwd' as words %}", "no loader"),
    ("{{ 1 // 0 }}", "zero"),
    ("{% for i in range(1000000000) %}{% endfor %}", "range"),
    ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "recursion"),
    ("{{ " + "-" * 50_000 + "1 }}", "recursion"),
    ("x" * 2_000_000, "longer than"),
]


@pytest.mark.parametrize(("template", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_templates_come_to_a_typed_end(template: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?is)the chat template in some/folder .*({message})"):
        render(template, MESSAGES, True, None, {}, "some/folder")


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": 5}, {"content": [{"type": "text", "text": "b"}]}]
)
def test_a_template_that_takes_texts_alone_names_the_message(content: dict[str, Any]) -> None:
    """The checkpoint is sound: what is wrong is what was asked."""
    messages = [{"role": "user", "content": "a"}, {"role": "user", **content}]
    with pytest.raises(InputError, match=r"messages\.1\.content=.*must be a text for this chat template"):
        render("{% for m in messages %}{{ '<' + m['content'] }}{% endfor %}", messages, True, None, {}, "some/folder")


LARGE = {
    "repetition": "{{ 'a' * 10**10 }}",
    "center": "{{ 'a' | center(10**9) }}",
    "replace": "{{ ('a' * 10**5) | replace('a', 'b' * 10**5) }}",
    "join": "{{ (['a'] * 10**5) | join('b' * 10**5) }}",
    "tojson": "{{ messages | tojson(indent=10**9) }}",
    "doubling": (
        "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "doubling without a loop": "{% set a = 'x' * 999 %}" + "{% set a = a + a %}" * 30 + "{{ a }}",
    "doubling of blocks": "{% set a %}abcdefgh{% endset %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 30 + "{{ a }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000d}'.format(1) }}",
    "lists": "{{ range(99999) | list * 1000 }}",
    "indent": "{{ 'a' | indent(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "wordwrap": "{{ ('a ' * 20000) | wordwrap(1, wrapstring='x' * 20000) }}",
    "batch": "{{ 'x' | batch(10**9, 'y') | list }}",
    "just too long": "{{ 'a' * 5000000 }}",
}


@pytest.mark.parametrize("name", LARGE)
def test_l4_a_template_that_multiplies_takes_little_memory(name: str) -> None:
    """Neither here nor in the process that renders; the next template is rendered as if nothing had been."""
    before, children_before = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    with pytest.raises(
        CheckpointError, match="the chat template in some/folder takes more than 256 MB or writes too long a text"
    ):
        render(LARGE[name], MESSAGES, True, None, {}, "some/folder")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    # The most that any child ever took: those of earlier tests may have taken more, and a fork begins with what its
    # parent holds.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, children_before, 336 << 10) + (
        64 << 10
    )
    assert render("{{ messages[0].content }}", MESSAGES, True, None, {}, "some/folder") == "hi"


LONG = {
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "slices": "{{ 'x' | slice(10**9) | list }}",
    "powers": "{{ (3 ** (10 ** 8)) is odd }}",
}


@pytest.mark.parametrize("name", LONG)
def test_l4_a_template_that_goes_on_and_on_is_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 0.2)
    worker = chat_template._Worker()
    monkeypatch.setattr(chat_template, "_worker", worker)
    with pytest.raises(CheckpointError, match=r"the chat template in some/folder takes longer than 0\.2 s"):
        render(LONG[name], MESSAGES, True, None, {}, "some/folder")
    assert render("{{ messages[0].content }}", MESSAGES, True, None, {}, "some/folder") == "hi"
    worker.close()


def test_l4_a_long_chat_is_no_bomb() -> None:
    """Half a million tokens of it, with every character of four bytes."""
    chat = [{"role": "user", "content": "😀 long " * 2000} for _ in range(150)]
    assert len(render(TEMPLATES["gemma"], chat, True, None, {"bos_token": "<s>"}, "here")) > 2_000_000


def test_a_killed_process_is_replaced() -> None:
    assert render("a", MESSAGES, True, None, {}, "here") == "a"
    process = chat_template._worker._process
    assert process is not None
    process.kill()
    process.wait()
    assert render("b", MESSAGES, True, None, {}, "here") == "b"


def test_threads_get_their_own_answers() -> None:
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = render("{{ messages[0].content }}", [{"role": "user", "content": str(i)}], True, None, {}, "here")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(20)}


def test_the_folder_of_a_bad_template_is_named(tmp_path: Path) -> None:
    loaded = load_tokenizer(tiny_tokenizer(tmp_path / "bad", chat_template="{{ 'a' * 10**10 }}"))
    assert loaded is not None
    with pytest.raises(CheckpointError, match=str(tmp_path / "bad")):
        loaded.apply_chat_template(MESSAGES)
