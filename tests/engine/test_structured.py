"""Answers held to a structure, through the whole engine: valid, the same with and without drafts, forced tokens for
free.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foretoken import LLM, InputError, SamplingParams, SpecConfig
from foretoken.core import Batch, Draft
from foretoken.text.processors import RequestProcessors
from tests.helpers.usual import some_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class"]},
        "lines": {"type": "integer", "maximum": 999},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
DRAFT = "reference:draft"
SPECS = [
    SpecConfig(),
    SpecConfig("draft_model", DRAFT, num_draft=4),
    SpecConfig("ngram", num_draft=6),
    SpecConfig("lookahead", num_draft=5),
]
PROMPTS = ["def main():\n    return ", "class Parser:\n    "]


@pytest.fixture(scope="module")
def reference() -> Iterator[LLM]:
    with LLM("reference:target", dtype="float32", cache_tokens=4096) as llm:
        yield llm


@pytest.mark.parametrize(
    ("rule", "temperature"),
    some_of(
        itertools.product(("auto", "block", "tree"), (0.0, 1.0)),
        {("auto", 0.0), ("auto", 1.0), ("tree", 1.0)},
    ),
)
def test_json_answers_are_valid(reference: LLM, temperature: float, rule: str) -> None:
    """Every drafter; a seeded coupled or greedy answer is the plain one; the grammar allows every accepted token."""
    rule = "auto" if temperature == 0 else rule
    params = SamplingParams(max_tokens=90, temperature=temperature, seed=4, json_schema=SCHEMA)
    answers = []
    for spec in SPECS:
        outputs = reference.generate(
            PROMPTS, params, SpecConfig(spec.drafter, spec.draft, spec.num_draft, rule=rule if spec.drafter else "auto")
        )
        for out in outputs:
            assert out.error is None
            if out.finish_reason == "stop":
                value = json.loads(out.text)
                assert set(value) == {"name", "kind", "lines"}
                assert value["kind"] in ("function", "class")
                assert isinstance(value["lines"], int)
        answers.append([out.token_ids for out in outputs])
    if rule == "auto":
        assert answers[0] == answers[1] == answers[2]


def test_forced_tokens_are_free_drafts(reference: LLM) -> None:
    """With any drafter the grammar's own text is drafted, and kept where the target spells it so; plain decoding stays
    plain.
    """
    params = SamplingParams(max_tokens=90, json_schema=SCHEMA)
    plain, drafted = (reference.generate([PROMPTS[0]], params, spec)[0] for spec in (SPECS[0], SPECS[2]))
    assert drafted.token_ids == plain.token_ids
    forced = [origin for origin in drafted.provenance if origin.drafter == "grammar"]
    assert len(forced) >= 3
    assert drafted.stats.accepted_by["grammar"] == len(forced) <= drafted.stats.drafted_by["grammar"]
    assert all(origin.kind == "plain" for origin in plain.provenance)
    assert drafted.stats.num_steps < plain.stats.num_steps


class Rows:
    """Counts the target's rows, and those of draft tokens to which the request's processors give no probability."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_rows = self.num_refused = 0
        runner = llm.engine.runner
        forward = runner.forward

        def counted(batch: Batch, draft: Draft, *rest: Any) -> Any:
            self.num_rows += draft.num_rows
            for b, entry in enumerate(batch.decoding):
                own = slice(draft.offsets[b], draft.offsets[b + 1])
                rows = [1 + parent for parent in draft.parents[own]]
                if entry.processors is not None and rows:
                    scores = entry.processors.adjust(torch.zeros(1 + len(rows), llm.target.vocab_size), draft.paths(b))
                    self.num_refused += int((scores[rows, draft.host_tokens[own]] == -torch.inf).sum())
            return forward(batch, draft, *rest)

        monkeypatch.setattr(runner, "forward", counted)


EXAMPLE = (
    'rows = [{"name": "main", "kind": "function", "lines": 12}, {"name": "Parser", "kind": "class", "lines": 7}]\n'
)


@pytest.mark.parametrize(
    "spec",
    [
        SpecConfig("ngram", num_draft=6),
        SpecConfig("suffix", num_draft=6),
        SpecConfig("lookahead", num_draft=6, lookahead_window=5),
        SpecConfig("recycling", num_draft=6),
        SpecConfig("mix", num_draft=6),
        SpecConfig("auto"),
    ],
    ids=lambda spec: spec.drafter,
)
def test_refused_tokens_of_lookups_do_not_reach_the_target(
    reference: LLM, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers and rounds are the same, with fewer rows; also where bad words and a least length refuse tokens."""
    prompts = [2 * EXAMPLE + prompt for prompt in PROMPTS]
    words = {"regex": r"[a-z ]{1,60}", "bad_words": [" the"], "min_tokens": 20}
    params = [
        SamplingParams(max_tokens=60, json_schema=SCHEMA),
        SamplingParams(max_tokens=60, temperature=1.0, seed=3, **words),  # type: ignore[arg-type]
    ]
    plain = [out.token_ids for out in reference.generate(prompts, params)]
    found: list[tuple[Rows, list[tuple[int, int]]]] = []
    for cuts in (True, False):
        with monkeypatch.context() as patch:
            if not cuts:  # the planted break
                patch.setattr(RequestProcessors, "allowed", lambda self, tokens, parents: [True] * len(tokens))
            rows = Rows(reference, patch)
            reference.reset_drafters(spec)
            outputs = reference.generate(prompts, params, spec)
        assert [out.token_ids for out in outputs] == plain
        found.append((rows, [(out.stats.num_steps, out.stats.num_accepted) for out in outputs]))
    (cut, rounds), (whole, same_rounds) = found
    assert cut.num_refused == 0
    if spec.drafter == "auto":
        return  # what it drafts follows measured times
    assert whole.num_refused > 0
    assert cut.num_rows < whole.num_rows
    if spec.drafter not in ("recycling", "mix"):  # they learn from the target's rows
        assert rounds == same_rounds


def test_regex_and_grammar(reference: LLM) -> None:
    pattern = r"[a-c]{2,5}-[0-9]{3}(, [a-c]{2,5}-[0-9]{3}){0,2}"
    grammar = 'start: item ("," item)*\nitem: "x" | "y" DIGIT\nDIGIT: /[0-9]/\n'
    for spec in SPECS:
        by_regex, by_grammar, free = reference.generate(
            [PROMPTS[0]] * 3,
            [
                SamplingParams(max_tokens=40, temperature=1.0, seed=1, regex=pattern),
                SamplingParams(max_tokens=12, temperature=1.0, seed=2, grammar=grammar),
                SamplingParams(max_tokens=12),
            ],
            spec,
        )
        assert by_regex.finish_reason == "stop"
        assert re.fullmatch(pattern, by_regex.text)
        assert re.match(r"(x|y[0-9])(,(x|y[0-9]))*", by_grammar.text)
        assert free.error is None


def test_a_complete_answer_ends(reference: LLM) -> None:
    """Nothing can follow: the answer ends without an end token, and so it does when end tokens are ignored."""
    for ignore_eos in (False, True):
        params = SamplingParams(max_tokens=30, regex="yes|no", ignore_eos=ignore_eos)
        out = reference.generate([PROMPTS[0]], params)[0]
        assert out.text in ("yes", "no")
        assert out.finish_reason == "stop"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"regex": "("}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": {"type": 7}}, "json_schema"),
        ({"grammar": "start: nothing"}, "grammar"),
    ],
    ids=str,
)
def test_a_broken_structure_is_refused_by_name(reference: LLM, values: dict, field: str) -> None:
    with pytest.raises(InputError) as caught:
        reference.generate([PROMPTS[0]], SamplingParams(**values))
    assert caught.value.field == field
    assert not reference.engine.has_work


def test_structure_needs_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(InputError, match="regex"):
        llm.generate([[1, 2]], SamplingParams(regex="a"))


def test_penalties_and_bans_work_beside_a_structure(reference: LLM) -> None:
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=6, json_schema=SCHEMA, frequency_penalty=0.7, bad_words=["class"]
    )
    outputs = [reference.generate([PROMPTS[1]], params, spec)[0] for spec in SPECS]
    assert len({out.token_ids for out in outputs}) == 1
    assert "class" not in outputs[0].text


SHORT = {
    "regex": {"regex": "a{1,2}b"},
    "json_schema": {"json_schema": {"enum": ["yes", "no"]}},
    "grammar": {"grammar": 'start: "yes" | "no" "!"?'},
}


@pytest.mark.parametrize("field", SHORT)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=["plain", "ngram"])
def test_w4_an_answer_complete_before_min_tokens_is_an_error(reference: LLM, field: str, spec: SpecConfig) -> None:
    """What came out stays, and the error names min_tokens; neighbours go on."""
    params = SamplingParams(max_tokens=30, min_tokens=12, ignore_eos=True, **SHORT[field])  # type: ignore[arg-type]
    short, free = reference.generate([PROMPTS[0]] * 2, [params, SamplingParams(max_tokens=12, ignore_eos=True)], spec)
    assert short.finish_reason == "error"
    assert isinstance(short.error, InputError)
    assert short.error.field == "min_tokens"
    assert "complete after" in str(short.error) or "bans every token" in str(short.error)
    assert 0 < len(short.token_ids) < 12
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)


@pytest.mark.parametrize(
    "values", [{"regex": "ab"}, {"json_schema": {"const": "ab"}}, {"grammar": 'start: "ab"'}], ids=list(SHORT)
)
def test_w4_a_structure_shorter_than_min_tokens_is_refused(reference: LLM, values: dict) -> None:
    """All of its text is known beforehand, so the request never runs."""
    with pytest.raises(
        InputError, match=r"min_tokens=10: an answer that fits `\w+` has at most \d tokens; ask for no more than that"
    ):
        reference.generate([PROMPTS[0]], SamplingParams(min_tokens=10, **values))
    assert not reference.engine.has_work
    out = reference.generate([PROMPTS[0]], SamplingParams(min_tokens=1, **values))[0]
    assert (out.finish_reason, out.text.strip('"')) == ("stop", "ab")


def test_a_structure_that_can_go_on_reaches_min_tokens(reference: LLM) -> None:
    for spec in SPECS:
        out = reference.generate([PROMPTS[0]], SamplingParams(max_tokens=20, min_tokens=8, regex="[ab]{1,40}"), spec)[0]
        assert out.error is None
        assert len(out.token_ids) >= 8
