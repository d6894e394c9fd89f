"""Structured answers at their edges: tokens that are forced, tokens that end an answer, columns without a token."""

from __future__ import annotations

import random
from pathlib import Path

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
from tests.text.test_structure import ANY, model, models
from tests.text.test_tokenizer import save

__all__ = ["model", "models"]  # fixtures


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
