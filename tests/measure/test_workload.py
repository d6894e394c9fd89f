"""Prompts: there are some for every slice, always the same, from held-out modules only."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from foretoken.errors import InputError
from foretoken.measure.workload import SLICES, slices
from foretoken.train.corpus import Corpus, Document, documents, is_held_out

FUNCTION = """def area{i}(width, height):
    \"\"\"Return the area of rectangle number {i}.\"\"\"
    total = width * height
    total += {i}
    return total
"""
ABOUT = '"""A module about shapes, with more than a few words to say about them."""\n\n\n'
MODULE = ABOUT + "\n\n".join(FUNCTION.format(i=i) for i in range(40))


def corpus_of(name: str) -> Corpus:
    return Corpus((), tuple(documents(name, MODULE)))


@pytest.fixture(scope="module")
def prompts():
    return slices(per_slice=4)


def test_every_slice_has_prompts_from_several_modules(prompts):
    for name in SLICES:
        own = [prompt for prompt in prompts if prompt.slice == name]
        assert len(own) == 4
        assert len({prompt.name.split(":")[0] for prompt in own}) == 4


def test_prompts_come_from_held_out_modules_and_not_from_tests(prompts):
    for prompt in prompts:
        path = Path(prompt.name.split(":")[0])
        assert is_held_out(path)
        assert "test" not in path.parts


def test_prompts_and_continuations_are_long_enough(prompts):
    for prompt in prompts:
        assert prompt.text
        assert prompt.continuation is not None
        assert len(prompt.continuation) > 400, prompt.name
    assert all(1000 < len(prompt.text) < 2000 for prompt in prompts if prompt.slice == "code")


def test_the_choice_is_fixed_and_asking_for_more_keeps_the_first(prompts):
    assert slices(per_slice=4) == prompts
    assert slices(["json"], per_slice=2) == tuple(p for p in prompts if p.slice == "json")[:2]
    assert slices(["json", "json"], per_slice=2) == slices(["json"], per_slice=2)


def test_code_continues_with_the_body_of_a_function(prompts):
    for prompt in prompts:
        if prompt.slice == "code":
            head = prompt.text[prompt.text.rindex("def ") :]
            ast.parse(f"{head} pass")
            assert prompt.continuation.startswith("\n")


def test_no_prompt_ends_in_white_space(prompts):
    for prompt in prompts:
        assert prompt.text == prompt.text.rstrip()


def test_docstring_prompt_stops_inside_the_docstring(prompts):
    for prompt in prompts:
        if prompt.slice == "docstring":
            head = prompt.text[prompt.text.rindex("def ") :]
            assert head.count('"""') == 1
            assert '"""' in prompt.continuation


def test_edit_asks_for_a_rename_of_code_that_is_given(prompts):
    for prompt in prompts:
        if prompt.slice == "edit":
            assert prompt.text.startswith("# Rename `")
            assert prompt.text.endswith("\n# After:")
            ast.parse(prompt.continuation)
            old, new = prompt.text.split("`")[1], prompt.text.split("`")[3]
            before = prompt.text.partition("# Before:\n")[2].removesuffix("# After:")
            assert before.replace(old, new) == prompt.continuation.removeprefix("\n").replace(old, new)
            assert prompt.prediction.replace(old, new) == prompt.continuation.replace(
                old, new
            )  # one expects the code as given


def test_json_prompt_and_continuation_make_one_document(prompts):
    texts = [prompt.text + prompt.continuation for prompt in prompts if prompt.slice == "json"]
    assert texts
    assert all(isinstance(json.loads(text.partition("\n")[2]), dict | list) for text in texts)


def test_a_given_corpus_is_used_and_its_tests_are_left_out():
    assert {p.name.split(":")[0] for p in slices(["code", "docstring", "json", "text"], 2, corpus_of("queue.py"))} == {
        "queue.py"
    }
    with pytest.raises(InputError, match="no text"):
        slices(["code"], 2, corpus_of("test/test_queue.py"))


def test_a_module_that_does_not_parse_is_passed_over():
    broken = Document("queue.py", "code", "def (")
    assert slices(["code"], 1, Corpus((), (broken, *corpus_of("csv.py").held_out)))[0].name.startswith("csv.py")


def test_unknown_slice_is_named():
    with pytest.raises(InputError, match="poems"):
        slices(["poems"])
