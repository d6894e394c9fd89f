"""`foretoken certify` from the command line: its exit codes, and what is refused before anything is asked."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Run
from tests.measure.endpoint import Fake, Reply, serving


def whole(text: str) -> Reply:
    """An answer at once."""
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    return Reply(body=json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode())


def test_equal_servers_pass_and_another_answer_fails(foretoken: Run) -> None:
    with serving(Fake(lambda *_: whole("a"))) as a, serving(Fake(lambda *_: whole("b"))) as b:
        words = ("certify", "--only", "greedy", "--num-prompts", "2", "--json", "--a", a.url, "--b")
        found, other = foretoken(*words, a.url), foretoken(*words, b.url)
    assert (found.code, other.code) == (0, 5)
    report = json.loads(found.out.splitlines()[-1])
    assert (report["kind"], report["passed"]) == ("certify", True)
    assert report["verdict"].startswith("PASS: 1 checks; 1 could not be asked")
    assert "certify failed: the same greedy answers (temperature 0)" in other.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--a", "nobody", "--b", "local"), "a='nobody': choose from local"),
        (("--a", "http://127.0.0.1:9", "--b", "http://127.0.0.1:9", "--only", "x"), "only='x'"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(foretoken: Run, words: tuple[str, ...], named: str) -> None:
    found = foretoken("certify", *words)
    assert found.code == 2
    assert named in found.err
