"""Structured answers: masks against languages that are spelt out, drafted paths against committed ones, forced tokens,
ends.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import normalizers

from foretoken.config import SamplingParams
from foretoken.errors import InputError
from foretoken.text.structure import StructureCompiler
from tests.helpers.checkpoints import END_OF_TEXT, tiny_tokenizer
from tests.text.structures import KINDS, NUM_PADDING, Model
from tests.text.test_tokenizer import save


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
            mask = held.mask(paths)
            assert mask.dtype == torch.bool
            assert mask.shape == (len(paths), model.size)
            for path, row in zip(paths, mask.tolist(), strict=True):
                assert row == language.row(answer + path), (answer, path)
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


# --- forced tokens ---


@settings(max_examples=40, deadline=None, derandomize=True)
@given(which=st.integers(0, len(ANY) - 1), seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(KINDS)))
def test_forced_tokens_are_allowed_one_after_the_other(
    models: dict[str, Model], which: int, seed: int, kind: str
) -> None:
    """At every place of a random answer; and where a token is forced, every allowed token begins or goes on like it."""
    model, generator = models[kind], random.Random(seed)
    held = model.make(**ANY[which])
    for _ in range(25):
        before = held.mask([()])
        forced = held.forced(5)
        assert len(forced) <= 5
        assert held.forced(2) == forced[:2]
        assert held.forced(0) == ()
        assert torch.equal(held.mask([()]), before)
        mask = held.mask([forced[:length] for length in range(len(forced))])
        assert all(bool(row[token]) for row, token in zip(mask, forced, strict=True))
        assert not set(forced) & set(model.end_ids)
        if forced:
            text = model.text(forced)
            for token in before[0].nonzero().flatten().tolist():
                raw = model.bytes[token]  # no end token may follow either
                assert text.startswith(raw) or raw.startswith(text)
        if held.finished:
            assert forced == ()
            break
        held.commit([generator.choice(before[0].nonzero().flatten().tolist())])


def test_forced_text_is_spelt_as_the_tokenizer_would(model: Model) -> None:
    """To the end of the answer if it is forced to there; otherwise without what may be part of a longer token."""
    held, ids = model.make(regex="return self"), model.tokenizer.encode("return self")
    assert held.forced(10) == tuple(ids)
    assert held.forced(1) == tuple(ids[:1])
    held.commit(ids)
    assert held.finished
    assert held.forced(10) == ()
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    held = model.make(json_schema=schema)
    held.commit(model.tokenizer.encode('{"'))
    assert model.text(held.forced(10)) == b"name"  # the quote may come as the token ": too
    choice = model.make(regex="return (self|None)")
    assert model.text(choice.forced(10)) == b"return"
    assert model.make(regex="yes|no").forced(10) == ()


def test_forced_text_in_a_vocabulary_with_leading_spaces(models: dict[str, Model]) -> None:
    model = models["byte_fallback"]
    held = model.make(regex="ab de猫(x|y)")
    assert model.text(held.forced(20)) == "ab de猫".encode()
    held.commit(model.spell("ab"))
    assert model.text(held.forced(20)) == " de猫".encode()


def test_a_tokenizer_that_changes_the_text_forces_nothing_it_cannot_spell(tmp_path: Path) -> None:
    raw = RawTokenizer.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    raw.normalizer = normalizers.Lowercase()
    tokenizer = save(raw, tmp_path, eos_token=END_OF_TEXT)
    held = StructureCompiler(tokenizer, tokenizer.vocab_size, (0,)).compile(SamplingParams(regex="the RETURN"))
    assert held is not None
    assert tokenizer.decode(held.forced(20)).strip() == "the"


# --- ends and columns ---


def test_padding_is_never_allowed_and_special_tokens_are_no_text(model: Model) -> None:
    held = model.make(regex=r"(?s:.)*")
    row = held.mask([()])[0]
    assert row[-NUM_PADDING:].nonzero().flatten().tolist() == [model.end_ids[1] - model.tokenizer.vocab_size]
    assert row.sum() > 3000
    assert not model.make(regex=r"<\|endoftext\|>").mask([()])[0, model.tokenizer.eos_token_id]


def test_a_token_that_ends_answers_is_no_text(model: Model) -> None:
    """Even if it could be written inside one; where nothing else could, the answer cannot go on."""
    tokenizer, mark = model.tokenizer, model.spell("!")[0]
    compiler = StructureCompiler(tokenizer, tokenizer.vocab_size, (mark,))
    held = compiler.compile(SamplingParams(regex="x(y!|z)"))
    assert held is not None
    x, y, z = model.spell("xyz")
    mask = held.mask([(), (x,), (x, y), (x, z), (x, y, mark)])
    assert not mask[0, mark]
    assert mask[1].nonzero().flatten().tolist() == sorted([y, z])
    assert mask[2].all()  # a dead end: known, but nobody is there yet
    assert mask[3].nonzero().flatten().tolist() == [mark]
    assert mask[4].all()
    assert held.error is None
    held.commit([x])
    assert held.error is None
    other = compiler.compile(SamplingParams(regex="x(y!|z)"))
    assert other is not None
    other.mask([(), (x,), (x, y)])
    other.commit([x, z])
    assert other.error is None
    assert other.finished
    held.commit([y])
    held.mask([()])
    assert isinstance(held.error, InputError)
    assert held.error.field == "regex"
    assert "vocabulary cannot write" in str(held.error)
    assert held.mask([(), (x,)]).all()
    assert held.forced(3) == ()
    assert not held.finished


def test_an_answer_is_complete_where_only_an_end_token_could_be_text(model: Model) -> None:
    compiler = StructureCompiler(model.tokenizer, model.size, (model.spell("!")[0],))
    held = compiler.compile(SamplingParams(regex="x!?"))
    assert held is not None
    held.commit(model.spell("x"))
    assert held.finished


def test_what_an_end_token_ends(model: Model) -> None:
    end = model.end_ids[0]
    held = model.make(regex="a+")
    held.commit([*model.spell("aa"), end])
    assert held.finished
    assert held.forced(3) == ()
    for row in held.mask([(), (end,), (end, model.end_ids[1])]):
        assert row.nonzero().flatten().tolist() == sorted(model.end_ids)
    assert held.mask([tuple(model.spell("a"))]).all()
    held.commit([end])
    assert held.finished


def test_a_model_without_end_tokens(model: Model) -> None:
    compiler = StructureCompiler(model.tokenizer, model.size, (model.size + 5, -1))
    held = compiler.compile(SamplingParams(regex="ab?"))
    assert held is not None
    a, b = model.spell("ab")
    mask = held.mask([(), (a,), (a, b), (a, b, a)])
    assert mask[1].nonzero().flatten().tolist() == [b]
    assert mask[2:].all()
    held.commit([a])
    assert not held.finished
    held.commit([b])
    assert held.finished
    assert held.error is None
    assert held._restarts == 0


def test_fewer_columns_than_tokens(model: Model) -> None:
    compiler = StructureCompiler(model.tokenizer, 300, (0,))
    held = compiler.compile(SamplingParams(regex="return self"))
    assert held is not None
    row = held.mask([()])[0]
    assert row.shape == (300,)
    assert {model.bytes[token] for token in row.nonzero().flatten().tolist()} == {b"r", b"re"}
    assert all(token < 300 for token in held.forced(20))
