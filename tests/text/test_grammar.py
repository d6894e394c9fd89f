"""Compiling structures: what is refused and how it is said, hostile grammars, one compilation for the same
structure.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foretoken.config import SamplingParams
from foretoken.errors import InputError
from foretoken.text import grammar, grammar_trial, structure
from foretoken.text.grammar import grammar_text
from foretoken.text.structure import StructureCompiler
from tests.text.structures import Model, reference_tokenizer
from tests.text.test_tokenizer import metaspace, word_piece


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(reference_tokenizer(), "reference")


# --- what is refused ---

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": '{"type": '}, "is not JSON"),
    ({"json_schema": {"enum": {1, 2}}}, "is not JSON"),
    ({"json_schema": {"minimum": float("nan")}}, "is not JSON"),
    ({"json_schema": "[1]"}, "must be an object"),
    ({"json_schema": {"type": "strin"}}, "Invalid type: strin.*correct it"),
    ({"json_schema": {"type": 7}}, "is not valid"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems.*leave that out"),
    ({"json_schema": {"type": "string", "format": "poem"}}, "poem.*leave that out"),
    ({"json_schema": {"$ref": "http://example.com/schema"}}, "example.com.*leave that out"),
    ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 3}}, "no answer fits.*loosen"),
    ({"json_schema": {"$ref": "#"}}, "no answer fits"),
    ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "look-around.*leave that out"),
    ({"regex": "(a"}, "unclosed group.*correct it"),
    ({"regex": r"(a)\1"}, "backreferences are not supported.*leave that out"),
    ({"regex": r"[^\s\S]"}, "no answer fits"),
    ({"grammar": "start: nothing"}, 'unknown name: "nothing".*correct it'),
    ({"grammar": 'begin: "a"'}, "no start rule.*correct it"),
    ({"grammar": "start: start"}, "no answer fits"),
    ({"grammar": '{"grammars": []}'}, "is not valid"),
    ({"grammar": "start: <|endoftext|>"}, "no answer fits"),
    ({"grammar": "start: word\nword[temperature=0.5]: /[a-z]+/"}, "temperature"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_names_the_field_the_fault_and_the_remedy(
    model: Model, given: dict[str, Any], message: str
) -> None:
    (field,) = given
    with pytest.raises(InputError, match=f"(?s){message}") as caught:
        model.make(**given)
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


def test_items_that_need_not_differ_are_no_fault(model: Model) -> None:
    """Generators of schemas write uniqueItems: false, which asks for nothing; a property may have the name."""
    plain: dict[str, Any] = {"type": "array", "items": {"type": "array", "maxItems": 2}}
    said = {**plain, "uniqueItems": False, "items": {**plain["items"], "uniqueItems": False}}
    assert grammar_text("json_schema", said) == grammar_text("json_schema", plain)
    model.make(json_schema=said)
    named = {"type": "object", "properties": {"uniqueItems": False, "a": True}, "const": {"uniqueItems": False}}
    (_, answer) = json.loads(grammar_text("json_schema", named))["grammars"]
    assert answer["json_schema"].items() >= named.items()


def nested(depth: int, key: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", key: schema}
    return schema


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "groups": lambda: {"regex": "(" * 5_000 + "a" + ")" * 5_000},
    "powers": lambda: {"regex": "(((((((((a{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9})"},
    "long text": lambda: {"regex": "a" * 600_000},
    "deep schema": lambda: {"json_schema": nested(200)},
    "very deep schema": lambda: {"json_schema": nested(50_000)},
    "very deep text": lambda: {"json_schema": '{"items":' * 50_000},
    "product of alternatives": lambda: {
        "json_schema": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)
            ]
        }
    },
    "large remainder": lambda: {"json_schema": {"type": "integer", "multipleOf": 99_400_891}},
    "thirty patterns at once": lambda: {
        "json_schema": {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 30)]}
    },
    "deep grammar": lambda: {"grammar": "start: " + "(" * 2_000 + '"a"' + ")" * 2_000},
    "intersection": lambda: {"grammar": "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 30))},
    "many symbols": lambda: {"grammar": "start: " + "/a/ " * 100_000},
    "hidden behind a special token": lambda: {
        "grammar": "start: <|endoftext|> <[4100]> A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(1, 30))
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_structures_are_refused(model: Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Some of these never come back from the compiler: the process that tries them is ended."""
    monkeypatch.setattr(grammar, "TRIAL_DEADLINE_S", 1)
    given = HOSTILE[name]()
    with pytest.raises(
        InputError,
        match=r"is too (large|slow) .*fewer and shorter|nested too deeply; use \$ref|longer than 512 kB; make it smaller",  # noqa: E501
    ) as caught:
        model.make(**given)
    assert caught.value.field in given
    assert len(str(caught.value)) < 500


def test_a_busy_machine_makes_no_grammar_too_slow(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The deadline is in seconds of a processor: here the trial waits for one longer than that, and is no worse."""
    (tmp_path / "waits.py").write_text(
        f"import sys, time\ntime.sleep(1.2)\nsys.path.insert(0, {str(Path(grammar_trial.__file__).parent)!r})\n"
        "import grammar_trial\ngrammar_trial.main()\n"
    )
    monkeypatch.setattr(grammar_trial, "__file__", str(tmp_path / "waits.py"))
    monkeypatch.setattr(grammar, "TRIAL_DEADLINE_S", 1)
    model.make(regex="[ab]{3}")


def test_a_compiler_that_dies_takes_nobody_along(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_TRIAL_MEMORY_BYTES", 48 << 20)
    with pytest.raises(InputError, match="too large: the compiler ended with status"):
        model.make(regex="|".join("a" * i + "b" for i in range(900)))


def test_what_is_needed_is_named(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = SamplingParams(regex="a")
    with pytest.raises(InputError, match=r"regex='a': needs a tokenizer.*add its tokenizer\.json"):
        StructureCompiler(None, 100, (0,)).compile(asked)
    with pytest.raises(InputError, match="does not say which bytes its tokens stand for"):
        StructureCompiler(word_piece(tmp_path), 20, (0,)).compile(asked)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install '\.\[structured\]' in a checkout, or"):
        StructureCompiler(model.tokenizer, model.size, model.end_ids).compile(asked)
    assert StructureCompiler(None, 100, (0,)).compile(SamplingParams()) is None


def test_a_vocabulary_without_bytes_can_come_to_a_dead_end(tmp_path: Path) -> None:
    tokenizer = metaspace(tmp_path)
    compiler = StructureCompiler(tokenizer, tokenizer.vocab_size, (0,))
    with pytest.raises(InputError, match=r"no answer fits.*vocabulary cannot write it"):
        compiler.compile(SamplingParams(regex="xyz"))
    held = compiler.compile(SamplingParams(regex=" cat猫s?"))
    assert held is not None
    assert held.forced(9) == tuple(tokenizer.vocabulary[token] for token in ("▁cat", "猫"))


@pytest.mark.parametrize("module", [grammar, structure])
def test_importing_does_not_need_the_library(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


# --- compiling once ---


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were tried from now on, in a compiler of one's own."""
    tried: list[str] = []

    def try_grammar(vocabulary: object, text: str) -> str:
        tried.append(text)
        return "nothing good" if "bad" in text else ""

    monkeypatch.setattr(structure, "try_grammar", try_grammar)
    return tried


def test_the_same_structure_is_compiled_once(model: Model, trials: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = StructureCompiler(model.tokenizer, model.size, model.end_ids)
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    for same in [schema, json.dumps(schema), dict(schema)] * 2:
        assert compiler.compile(SamplingParams(json_schema=same)) is not None
    assert len(trials) == 1
    compiler.compile(
        SamplingParams(json_schema={"type": "object", "properties": {"a": {}, "b": {}}})
    )  # another order, another answer
    assert len(trials) == 2
    for _ in range(2):
        with pytest.raises(InputError, match=r"bad.*nothing good"):
            compiler.compile(SamplingParams(regex="bad"))
    assert len(trials) == 3
    monkeypatch.setattr(structure, "_MAX_CACHED", 2)
    for regex in ("c", "d", "c", "e", "c", "d"):
        compiler.compile(SamplingParams(regex=regex))
    assert len(trials) == 7  # c d e, and d once more
    monkeypatch.setattr(structure, "_MAX_CACHED_BYTES", 10)
    compiler.compile(SamplingParams(regex="f"))
    assert len(compiler._cache) == 1


def test_two_answers_of_one_structure_are_independent(model: Model) -> None:
    one, two = (model.make(regex="ab|cd") for _ in range(2))
    a, b, c, d = model.spell("abcd")
    one.commit([a])
    assert two.mask([()])[0, [a, c]].all()
    two.commit([c])
    assert one.mask([()])[0].nonzero().flatten().tolist() == [b]
    assert two.mask([()])[0].nonzero().flatten().tolist() == [d]
