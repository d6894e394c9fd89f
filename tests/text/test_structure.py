"""Structured answers: masks against languages that are spelt out, drafted paths against committed ones, forced tokens,
ends.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.text.structure import Structure
from tests.text.structures import KINDS, Model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {kind: Model(make(tmp_path_factory.mktemp(kind)), kind) for kind, make in KINDS.items()}


@pytest.fixture(scope="module")
def model(models: dict[str, Model]) -> Model:
    return models["reference"]


# --- languages that are spelt out ---


class Language:
    """The slow twin: a finite set of answers. A token is allowed iff some answer goes on with all of its bytes."""

    def __init__(self, model: Model, words: list[str]) -> None:
        self.model, self.words = model, {word.encode() for word in words}
        self.beginnings = {word[:length] for word in self.words for length in range(len(word) + 1)}

    def row(self, path: tuple[int, ...]) -> list[bool]:
        """What may follow `path`, by column; all True if `path` itself cannot be."""
        model, done, ended = self.model, b"", False
        for token in path:
            if ended:
                if token not in model.end_ids:
                    return [True] * model.size
            elif token in model.end_ids:
                if done not in self.words:
                    return [True] * model.size
                ended = True
            else:
                if not self.goes_on(done, token):
                    return [True] * model.size
                done += model.bytes[token]
        ends = ended or done in self.words
        return [
            ends if token in model.end_ids else not ended and self.goes_on(done, token) for token in range(model.size)
        ]

    def goes_on(self, done: bytes, token: int) -> bool:
        raw = self.model.bytes.get(token, b"")
        return raw != b"" and done + raw in self.beginnings


WORDS = {
    "short": ["yes", "no", "nobody", "n"],
    "code": ["return", "return self", "return self.x", "ret", "raise"],
    "unicode": ["für", "fünf", "f😀", "猫猫", "猫", "😀😀", "é"],
    "signs": ["a.b*c", "(a|b)", "[x]{2}", "\\d+\n", '"q"/', "^$ ?"],
    "json": [json.dumps(word, ensure_ascii=False) for word in ("name", "none", "猫", "", "na")],
}


def as_regex(words: list[str]) -> dict[str, Any]:
    return {
        "regex": "|".join(
            re.sub(r"([^\w\s])", r"\\\1", word, flags=re.ASCII) if word.isascii() else word for word in words
        )
    }


def as_grammar(words: list[str]) -> dict[str, Any]:
    return {"grammar": "start: " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)}


def as_split_grammar(words: list[str]) -> dict[str, Any]:
    """Every letter a terminal of its own, so that a token crosses several."""
    return {
        "grammar": "start: "
        + " | ".join(" ".join(json.dumps(letter, ensure_ascii=False) for letter in word) for word in words)
    }


def as_enum(words: list[str]) -> dict[str, Any]:
    return {"json_schema": {"enum": [json.loads(word) for word in words]}}


def random_paths(model: Model, language: Language, generator: random.Random, count: int) -> list[tuple[int, ...]]:
    """A tree of drafted paths: mostly along the language, now and then against it, with ends in the middle."""
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < count:
        path = generator.choice(paths)
        row = language.row(path)
        allowed = [token for token, good in enumerate(row) if good]
        wild = generator.random() < 0.25 or not allowed
        paths.append((*path, generator.randrange(model.size) if wild else generator.choice(allowed)))
    generator.shuffle(paths)
    return paths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("words", "write"), [(w, f) for w in WORDS for f in (as_regex, as_grammar, as_split_grammar)] + [("json", as_enum)]
)
def test_masks_are_those_of_the_language(
    models: dict[str, Model], kind: str, words: str, write: Callable[[list[str]], dict[str, Any]]
) -> None:
    """Every row of random draft trees, at every committed place of random answers, until the answer has ended."""
    model, generator = models[kind], random.Random(f"{words} {kind} {write.__name__}")
    language = Language(model, WORDS[words])
    for _ in range(1 if write is as_grammar else 2):  # all ways to write a language have the same masks
        answer: tuple[int, ...] = ()
        held = model.make(**write(WORDS[words]))
        while True:
            paths = random_paths(model, language, generator, 8)
            nodes = sorted({path for path in paths if path}, key=len)
            parents = [nodes.index(path[:-1]) if path[:-1] else -1 for path in nodes]
            allowed = held.allowed([path[-1] for path in nodes], parents)
            mask = held.mask(paths)
            assert mask.dtype == torch.bool
            assert mask.shape == (len(paths), model.size)
            for path, row in zip(paths, mask.tolist(), strict=True):
                assert row == language.row(answer + path), (answer, path)
            rows = dict(zip(paths, mask.tolist(), strict=True))
            assert allowed == [all(rows[path[:i]][token] for i, token in enumerate(path)) for path in nodes]
            may_follow = [token for token, good in enumerate(language.row(answer)) if good]
            assert held.finished == (set(may_follow) == set(model.end_ids))
            assert held.error is None
            if answer and answer[-1] in model.end_ids:
                break
            token = generator.choice(may_follow)
            held.commit([token])
            answer += (token,)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    words=st.lists(st.text(st.sampled_from("ab猫\n ."), min_size=1, max_size=5), min_size=1, max_size=6, unique=True),
    seed=st.integers(0, 2**32),
)
def test_masks_of_any_finite_language(models: dict[str, Model], words: list[str], seed: int) -> None:
    model, generator = models["byte_fallback"], random.Random(seed)
    language = Language(model, words)
    held = model.make(**as_grammar(words))
    paths = random_paths(model, language, generator, 12)
    assert held.mask(paths).tolist() == [language.row(path) for path in paths]


# --- a path is walked as if it were committed ---

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "score": {"type": "number"},
        "kind": {"enum": ["user", "admin", None, 3]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUMS = """
start: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" start ")"
NUMBER: /[0-9]+/
%ignore " "
"""
ANY: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"json_schema": {"type": "object"}},
    {"regex": r"([a-c]+|\d{2,4}){1,5}( and |; )[^\n]{0,30}\.?"},
    {"grammar": SUMS},
    # The same lexer state behind both, but another rule: a mask kept for one of them would serve the other.
    {"grammar": 'start: "a" X "e" | "b" X "f" | "cc" X\nX: /r+/'},
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(which=st.integers(0, len(ANY) - 1), seed=st.integers(0, 2**32))
def test_a_drafted_path_is_a_committed_path(model: Model, which: int, seed: int) -> None:
    """Rows of a draft tree equal the rows after committing the same tokens, and leave no trace behind."""
    generator = random.Random(seed)
    held, answer = model.make(**ANY[which]), []
    for _ in range(4):
        paths = [()]
        for _ in range(7):
            path = generator.choice(paths)
            allowed = held.mask([path])[0].nonzero().flatten().tolist()
            paths.append((*path, generator.choice(allowed)))
        mask = held.mask(paths)
        for path, row in zip(paths, mask, strict=True):
            alone = model.make(**ANY[which])
            for token in [*answer, *path]:
                assert alone.mask([()])[0, token]
                alone.commit([token])
            assert alone.mask([()])[0].tolist() == row.tolist(), (answer, path)
        assert held.mask(list(reversed(paths))).tolist() == mask.flip(0).tolist()
        longest = max(paths, key=len)
        held.commit(longest)
        answer += longest


def test_rows_of_paths_whose_beginnings_are_not_asked_for(model: Model) -> None:
    held = model.make(regex="return self|raise")
    whole = tuple(model.spell("return s"))
    rows = {
        path: row
        for length in range(len(whole) + 1)
        for path, row in [(whole[:length], held.mask([whole[:length]])[0].tolist())]
    }
    paths = [whole, whole[:3], whole]
    assert held.mask(paths).tolist() == [rows[path] for path in paths]
    assert held.mask([]).shape == (0, model.size)


# --- JSON ---


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """A validator for what `PERSON` uses."""
    if "enum" in schema:
        return any(value == choice and type(value) is type(choice) for choice in schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(known)
            and all(fits(v, known[k]) for k, v in value.items())
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(fits(v, schema["items"]) for v in value)
        )
    if kind == "string":
        long = (
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99) if isinstance(value, str) else False
        )
        return long and re.search(schema.get("pattern", ""), value) is not None
    if kind == "boolean":
        return isinstance(value, bool)
    number = isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return number and schema.get("minimum", value) <= value <= schema.get("maximum", value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_text", [False, True])
def test_random_answers_fit_their_schema(models: dict[str, Model], kind: str, as_text: bool) -> None:
    model, generator, ended = models[kind], random.Random(7), 0
    for _ in range(12):
        held, answer = model.make(json_schema=json.dumps(PERSON) if as_text else PERSON), []
        while not held.finished and len(answer) < 400:
            allowed = held.mask([()])[0].nonzero().flatten().tolist()
            answer.append(generator.choice(allowed))
            held.commit(answer[-1:])
        assert held.error is None
        if held.finished:
            ended += 1
            assert fits(json.loads(model.text(answer).decode()), PERSON)
            assert held.mask([()])[0].nonzero().flatten().tolist() == sorted(model.end_ids)
    assert ended >= 8


def test_answers_that_do_not_fit_are_refused(model: Model) -> None:
    """Wrong type, missing property, unknown property, too long, out of range, wrong order, text behind the end."""
    good = '{"name": "für", "age": 30, "tags": ["ab"]}'
    bad = [
        '["',
        '{"age',
        '{"name": 3',
        '{"name": "abcdefghijklm',
        '{"name": "x", "age": 131',
        '{"name":"x","age":1}',
        good + " ",
    ]
    ids = model.tokenizer.encode(good)
    for text in [good, *bad]:
        held, ids = model.make(json_schema=PERSON), model.tokenizer.encode(text)
        taken = [
            bool(row[token])
            for row, token in zip(held.mask([tuple(ids[:i]) for i in range(len(ids))]), ids, strict=True)
        ]
        assert all(taken) == (text == good), text


def test_blank_space_comes_to_an_end_unless_the_schema_wants_it(model: Model) -> None:
    """One space, or one line break and its indentation; a schema may bring its own rule."""
    space, line = model.spell(" ")[0], model.spell("\n")[0]

    def most(schema: dict[str, Any], token: int) -> int:
        held, path = model.make(json_schema=schema), tuple(model.spell("["))
        count = 0
        while count < 100 and held.mask([path])[0, token]:
            path, count = (*path, token), count + 1
        return count

    array = {"type": "array", "items": {"type": "integer"}}
    assert (most(array, space), most(array, line)) == (1, 1)
    assert most(array | {"x-guidance": {"whitespace_flexible": True}}, line) == 100
    assert most(array | {"x-guidance": {"whitespace_flexible": False}}, space) == 0
    assert most(array | {"x-guidance": {"whitespace_pattern": " {1,3}"}}, space) == 3
    pretty, held = json.dumps([1, 2], indent=8), model.make(json_schema=array)
    ids = model.tokenizer.encode(pretty)
    held.commit(ids)
    assert held.finished
    assert model.make(json_schema="true").mask([tuple(model.spell('{"a": [1'))])[0, model.spell("]")[0]]


def test_a_place_is_computed_once_until_the_answer_moves_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model asks behind each of its tokens, and the target's rows are the same places again."""
    text, walked = model.tokenizer.encode('{"a": 12}', add_special_tokens=False), list[tuple[int, ...]]()
    structure = model.make(json_schema={"type": "object"})
    step = Structure._step

    def counted(self: Structure, place: Any, path: tuple[int, ...]) -> Any:
        walked.append(path)
        return step(self, place, path)

    monkeypatch.setattr(Structure, "_step", counted)
    paths = [tuple(text[:length]) for length in range(len(text))]
    alone = [structure.mask([path])[0] for path in paths]
    together = structure.mask(paths)
    assert walked == paths[1:]
    assert torch.equal(torch.stack(alone), together)
    structure.commit(text[:1])
    assert torch.equal(structure.mask([()])[0], alone[1])
    assert torch.equal(structure.mask([tuple(text[1:2])])[0], alone[2])
    assert len(walked) == len(paths)
