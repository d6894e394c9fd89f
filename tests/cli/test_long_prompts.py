"""A prompt without room in the target's context is refused by its name before minutes of work on the others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run

SIDES = ["--a", "local", "--b", "local", "--b-drafter", "ngram"]
VERBS = {
    "ab": [*SIDES, "--replay"],
    "certify": [*SIDES, "--prompts"],
    "advise": ["--prompts"],
    "diagnose": ["--draft", "{draft}", "--prompts"],
    "eval": ["--prompts"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_prompt_that_is_too_long_is_named(foretoken: Run, text_pair: SimpleNamespace, verb: str) -> None:
    texts = ["a list", "of a class " * 500, "the list"]
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = [word.format(draft=text_pair.draft) for word in VERBS[verb]]
    done = foretoken(verb, "-t", text_pair.target, "--max-tokens", 8, *words, "p.jsonl")
    named = "replay" if verb == "ab" else "prompts"
    assert (done.code, done.out) == (2, ""), done.err
    assert f"error: {named}='p:2': has " in done.err
    assert "tokens; the context has room for 255: shorten it, or leave it out" in done.err
