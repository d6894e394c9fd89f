"""Random JSON schemas and tools at temperature 1 under every drafter and rule: whatever is drafted, every answer is
valid.

`FORETOKEN_STRUCTURES` raises the number of answers; `python -m pytest -s` shows what came of them, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import RULES, known_drafters
from foretoken.server.api.tool_reader import ToolReader, ToolStyle
from foretoken.server.api.tools import Tool, callables, held_form
from tests.helpers.checkpoints import related_pair, tiny_tokenizer
from tests.helpers.mtp_checkpoints import add_mtp
from tests.helpers.specs import predicting, spec_of

NUM_ANSWERS = int(os.environ.get("FORETOKEN_STRUCTURES", "324"))
BATCH = 16
_PRINTED = 32 * BATCH  # answers, after which the counts so far are printed
MAX_TOKENS = 400
# How an answer is drafted: a drafter, and what is set beside it. Rule "auto" is coupled for requests with a seed, else
# block for chains and tree for trees.
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("draft_model", "draft_model/static", "draft_model/best_first", "ngram", "suffix")},
    **{name: {} for name in ("recycling", "predicted", "lookahead", "early_exit", "cascade", "mix", "auto")},
    **{name: {} for name in ("eagle", "eagle/static", "medusa", "block", "mtp", "mtp/static")},
    "draft_model probability": {"draft_probability": 0.5},
    "draft_model top-k": {"draft_top_k": 4},
    "draft_model confidence": {"min_confidence": 0.05},
    "draft_model rejection": {"rule": "rejection"},
    "draft_model block": {"rule": "block", "draft_probability": 0.7},
    "draft_model coupled": {"rule": "coupled"},
    "draft_model/static traversal": {"rule": "traversal"},
    "draft_model/best_first tree": {"rule": "tree"},
    "draft_model typical": {"rule": "typical", "allow_lossy": True},
}
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

    setting: str
    fields: dict[str, Any]
    schemas: dict[str, _Schema]  # by function; "" of the answer itself
    style: ToolStyle | None

    def check(self, text: str) -> None:
        """Raises what is wrong with a whole answer."""
        if self.style is None:
            _validate(text, self.schemas[""])
            return
        reader = ToolReader(self.style, list(self.schemas))
        reader.push(text)
        _, reason = reader.finish("stop")
        assert reason == "tool_calls", text
        message = reader.message()
        assert not message["content"], text
        for call in message["tool_calls"]:
            _validate(call["function"]["arguments"], self.schemas[call["function"]["name"]])


def _validate(text: str, made: _Schema) -> None:
    """With numbers as they are written: in float64 one beside an excluded bound may be that bound."""
    answer, own = (json.loads(one, parse_float=Decimal) for one in (text, json.dumps(made)))
    jsonschema.validate(answer, own, jsonschema.Draft202012Validator)


def case(number: int) -> Case:
    draw = random.Random(number)
    setting = list(SETTINGS)[number % len(SETTINGS)]
    if draw.random() < 0.5:
        made = schema(draw)
        return Case(setting, {"json_schema": json.dumps(made)}, {"": made}, None)
    schemas = {name: an_object(draw) for name in draw.sample(["switch", "get_weather", "f"], draw.randint(1, 3))}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": one}})
        for name, one in schemas.items()
    ]
    style = draw.choice(STYLES)
    is_parallel = draw.random() < 0.3
    return Case(setting, dict(held_form(callables(tools, "required", style), style, is_parallel, {})), schemas, style)


@dataclass
class Tally:
    """What came of the answers, by setting: how many were valid, how many were cut off at `MAX_TOKENS`, of which
    nothing can be said; draft tokens that were accepted.
    """

    valid: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> str:
        """One line; an answer that is not valid ends the test, so there is no count of them."""
        found = {
            name: {"valid": self.valid[name], "cut_off": self.cut[name], "accepted_tokens": self.accepted[name]}
            for name in SETTINGS
        }
        return json.dumps({"num_valid": self.valid.total(), "num_cut_off": self.cut.total(), "by_setting": found})


def answers(llm: LLM, pair: SimpleNamespace, numbers: range, tally: Tally) -> None:
    """Ask and check; `tally` counts."""
    specs = {
        name: spec_of(name.partition(" ")[0], pair.draft, num_draft=5, **options) for name, options in SETTINGS.items()
    }
    for begin in numbers[::BATCH]:
        cases = {number: case(number) for number in range(begin, min(begin + BATCH, numbers.stop))}
        params = []
        for number, one in cases.items():
            seed = number if number // BATCH % 2 else None  # coupled, or the rule of chains and trees
            asked = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, **one.fields)
            params.append(predicting(specs[one.setting], asked))
        outputs = llm.generate([[5, 6, 7]] * len(cases), params, [specs[one.setting] for one in cases.values()])
        for (number, one), output in zip(cases.items(), outputs, strict=True):
            assert output.error is None, (number, one, output.error)
            tally.accepted[one.setting] += output.stats.num_accepted
            if output.finish_reason == "stop":
                try:
                    one.check(output.text)
                except Exception as error:
                    raise AssertionError(f"case {number}: {one}: {output.text!r}") from error
                tally.valid[one.setting] += 1
            else:
                tally.cut[one.setting] += 1


def test_every_answer_is_valid(llm: LLM, pair: SimpleNamespace) -> None:
    assert {re.split("[/ ]", name)[0] for name in SETTINGS} == set(known_drafters())
    rules = {options.get("rule", "auto") for options in SETTINGS.values()}
    assert rules == set(RULES) - {"greedy"}  # which is of temperature 0
    tally = Tally()
    for begin in range(0, NUM_ANSWERS, _PRINTED):
        answers(llm, pair, range(begin, min(begin + _PRINTED, NUM_ANSWERS)), tally)
        print(tally.as_json(), flush=True)
    assert tally.valid.total() + tally.cut.total() == NUM_ANSWERS
    assert tally.cut.total() <= 0.05 * NUM_ANSWERS
    assert all(tally.accepted[name] for name in SETTINGS)
