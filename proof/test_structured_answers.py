"""Random JSON schemas and tools at temperature 1 under every drafter: whatever is drafted, every answer is valid.

`FORETOKEN_STRUCTURES` raises the number of answers; `python -m pytest -s` shows what came of them.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import known_drafters
from foretoken.server.api.tool_reader import ToolReader, ToolStyle
from foretoken.server.api.tools import Tool, callables, held_form
from tests.helpers.checkpoints import related_pair, tiny_tokenizer
from tests.helpers.mtp_checkpoints import add_mtp
from tests.helpers.specs import predicting, spec_of

NUM_ANSWERS = int(os.environ.get("FORETOKEN_STRUCTURES", "200"))
BATCH = 16
MAX_TOKENS = 400
DRAFTERS = (
    *("draft_model", "draft_model/static", "draft_model/best_first", "ngram", "suffix", "recycling", "predicted"),
    *("lookahead", "early_exit", "cascade", "mix", "auto", "eagle", "eagle/static", "medusa", "block", "mtp"),
)
STYLES: tuple[ToolStyle, ...] = ("tags", "json_arguments", "json_parameters")
TEXTS = ('{"name": "value", "none": [1, 2, true, null]}\n' * 20, "für 猫 😀 naïve " * 20)
_Schema = dict[str, Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A target with a tokenizer and an MTP layer, and its draft."""
    found = related_pair(tmp_path_factory.mktemp("structured"), hidden_size=32, vocab_size=340)
    for folder in (found.target, found.draft):
        tiny_tokenizer(folder, 340, TEXTS)
    add_mtp(found.target)
    return found


@pytest.fixture(scope="module")
def llm(pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=16384, profile="off") as made:
        yield made


def schema(draw: random.Random, depth: int = 0) -> _Schema:
    """A schema whose answers are short."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    return _MAKERS[draw.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf", "tuple"])](
        draw, depth
    )


def an_object(draw: random.Random, depth: int = 0) -> _Schema:
    names = draw.sample(["name", "a b", "größe", "type", 'quo"te', "x1", "items", "猫"], draw.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: schema(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> _Schema:
    fewest = draw.randint(0, 2)
    return {
        "type": "array",
        "items": schema(draw, depth + 1),
        "minItems": fewest,
        "maxItems": fewest + draw.randint(0, 2),
    }


def _tuple(draw: random.Random, depth: int) -> _Schema:
    parts = [schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _integer(draw: random.Random, depth: int) -> _Schema:
    low = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + draw.choice([0, 5, 10**6])}


def _number(draw: random.Random, depth: int) -> _Schema:
    low = draw.uniform(-100, 100)
    return {"type": "number", "minimum": round(low, 2), "exclusiveMaximum": round(low, 2) + draw.choice([1, 1000])}


_MAKERS = {
    "object": an_object,
    "array": _array,
    "tuple": _tuple,
    "integer": _integer,
    "number": _number,
    "anyOf": lambda draw, depth: {"anyOf": [schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]},
    "string": lambda draw, depth: {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 12)},
    "pattern": lambda draw, depth: {
        "type": "string",
        "pattern": draw.choice(["^[a-f]{2,4}$", "^(yes|no)$", "^\\d{3}$"]),
    },
    "boolean": lambda draw, depth: {"type": "boolean"},
    "null": lambda draw, depth: {"type": "null"},
    "enum": lambda draw, depth: {"enum": draw.sample(["low", "high", 1, 2.5, None, True, "ü"], draw.randint(1, 4))},
    "const": lambda draw, depth: {"const": draw.choice(["fixed", 7, None, [1, "a"], {"k": False}])},
}


@dataclass
class Case:
    """What is asked, and what an answer must be."""

    drafter: str
    fields: dict[str, Any]
    schemas: dict[str, _Schema]  # by function; "" of the answer itself
    style: ToolStyle | None

    def check(self, text: str) -> None:
        """Raises what is wrong with a whole answer."""
        if self.style is None:
            jsonschema.validate(json.loads(text), self.schemas[""], jsonschema.Draft202012Validator)
            return
        reader = ToolReader(self.style, list(self.schemas))
        reader.push(text)
        _, reason = reader.finish("stop")
        assert reason == "tool_calls", text
        message = reader.message()
        assert not message["content"], text
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, self.schemas[name], jsonschema.Draft202012Validator)


def case(number: int) -> Case:
    draw = random.Random(number)
    drafter = DRAFTERS[number % len(DRAFTERS)]
    if draw.random() < 0.5:
        made = schema(draw)
        return Case(drafter, {"json_schema": json.dumps(made)}, {"": made}, None)
    schemas = {name: an_object(draw) for name in draw.sample(["switch", "get_weather", "f"], draw.randint(1, 3))}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": one}})
        for name, one in schemas.items()
    ]
    style = draw.choice(STYLES)
    is_parallel = draw.random() < 0.3
    return Case(drafter, dict(held_form(callables(tools, "required", style), style, is_parallel, {})), schemas, style)


def answers(llm: LLM, pair: SimpleNamespace, numbers: range) -> tuple[Counter[str], Counter[str]]:
    """Ask and check; how many answers ended for which reason, and accepted draft tokens by drafter."""
    specs = {name: spec_of(name, pair.draft, num_draft=5) for name in DRAFTERS}
    reasons: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for begin in numbers[::BATCH]:
        cases = {number: case(number) for number in range(begin, min(begin + BATCH, numbers.stop))}
        params = []
        for number, one in cases.items():
            seed = number if number // BATCH % 2 else None  # coupled, or the rule of chains and trees
            asked = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, **one.fields)
            params.append(predicting(specs[one.drafter], asked))
        outputs = llm.generate([[5, 6, 7]] * len(cases), params, [specs[one.drafter] for one in cases.values()])
        for (number, one), output in zip(cases.items(), outputs, strict=True):
            assert output.error is None, (number, one, output.error)
            reasons[output.finish_reason] += 1
            accepted[one.drafter] += output.stats.num_accepted
            if output.finish_reason == "stop":
                try:
                    one.check(output.text)
                except Exception as error:
                    raise AssertionError(f"case {number}: {one}: {output.text!r}") from error
    return reasons, accepted


def test_every_answer_is_valid(llm: LLM, pair: SimpleNamespace) -> None:
    assert {name.partition("/")[0] for name in DRAFTERS} == set(known_drafters())
    reasons, accepted = answers(llm, pair, range(NUM_ANSWERS))
    print(f"{NUM_ANSWERS} answers: {dict(reasons)}; accepted draft tokens: {dict(accepted)}")
    assert reasons.total() == NUM_ANSWERS
    assert reasons["length"] <= 0.05 * NUM_ANSWERS  # cut off: nothing can be said of those
    assert all(accepted[name] for name in DRAFTERS)
