"""What goes wrong while a structured answer is written: told by name, to the request at fault and to no other."""

from __future__ import annotations

import random
import re

import pytest
import torch

from foretoken.errors import InputError
from foretoken.text import grammar, structure
from foretoken.text.structure import Structure
from tests.text.structures import Model, reference_tokenizer


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(reference_tokenizer(), "reference")


TOO_SLOW = "became too slow to follow .*fewer and shorter"


def test_a_bomb_that_compiles_ends_in_an_error(model: Model) -> None:
    held, a, taken = model.make(regex="(a{1,1000}){1,1000}"), model.spell("a")[0], 0
    while held.error is None and taken < 300:
        assert held.mask([()])[0, a] or held.error is not None
        held.commit([a])
        taken += 1
    assert 0 < taken < 300
    assert isinstance(held.error, InputError)
    assert held.error.field == "regex"
    assert re.search(TOO_SLOW, str(held.error))
    assert held.mask([(), (5,)]).all()
    assert held.forced(4) == ()
    assert not held.finished
    held.commit([3, 4])


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model whose grammars soon run out of fuel; with its own compiler, so that nothing of it stays."""
    monkeypatch.setitem(grammar.LIMITS, "step_lexer_fuel", 2_000)
    monkeypatch.setattr(structure, "_RESTART_COMPILE_S", 1e9)
    return Model(reference_tokenizer(), "reference")


GROWING = "[ab]*a[ab]{200}c|x+"  # every token makes the next step dearer


def walk_until_error(held: Structure, tokens: list[int]) -> int:
    for count, token in enumerate(tokens):
        held.mask([()])
        if held.error is not None:
            return count
        held.commit([token])
    raise AssertionError("no error")


def steps(model: Model) -> list[int]:
    return model.spell("".join(random.Random(0).choices("ab", k=300)))


def test_one_request_does_not_ruin_another(weak: Model) -> None:
    """Copies of a grammar share a lexer, and one of them runs it out of fuel: the others go on, old and new ones."""
    before = weak.make(regex=GROWING)
    bystander = weak.make(regex=GROWING)
    expected = before.mask([()])
    x = weak.spell("x")[0]
    bystander.commit([x, x])
    behind = bystander.mask([()])
    ruined = weak.make(regex=GROWING)
    assert walk_until_error(ruined, steps(weak)) > 20
    fresh = weak.make(regex=GROWING)
    assert torch.equal(fresh.mask([()]), expected)
    bystander.commit([x])
    assert torch.equal(bystander.mask([(), (x,)]), behind.expand(2, -1))
    assert bystander._restarts == 1
    walk_until_error(
        weak.make(regex=GROWING), steps(weak)
    )  # no longer in reach of the bystander, who has a lexer of its own
    bystander.commit([x])
    assert torch.equal(bystander.mask([(), (x,)]), behind.expand(2, -1))
    assert bystander._restarts == 1
    assert fresh.error is bystander.error is None


def test_what_a_draft_meets_is_no_error_of_the_answer(weak: Model) -> None:
    """A draft leads to where the engine gives up: no error until the answer comes there; other rows stay right."""
    limit = walk_until_error(weak.make(regex=GROWING), steps(weak))
    held, tokens = weak.make(regex=GROWING), steps(weak)
    held.commit(tokens[: limit - 2])
    x = weak.spell("x")[0]
    plain = weak.make(regex=GROWING)
    for token in tokens[: limit - 2]:
        plain.mask([()])
        plain.commit([token])
    draft = tuple(tokens[limit - 2 : limit + 3])
    paths = [draft[:length] for length in range(len(draft) + 1)]
    mask = held.mask(paths)
    assert held.error is None
    assert torch.equal(mask[0], plain.mask([()])[0])
    assert torch.equal(mask[1], plain.mask([draft[:1]])[0])
    assert mask[2:].all()
    assert not mask[1].all()
    assert x not in mask[1].nonzero()
    held.commit(draft[:1])
    assert held.error is None
    held.commit(draft[1:2])
    assert isinstance(held.error, InputError)
    assert re.search(TOO_SLOW, str(held.error))


def test_a_draft_that_is_too_dear_to_check_costs_its_answer_nothing(
    weak: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking it ruins the lexer: the answer goes on with another one, and its drafts are no longer checked."""
    held, tokens, x = weak.make(regex=GROWING), steps(weak), weak.spell("x")[0]
    expected = held.mask([(), (tokens[0],)])
    assert held.allowed([tokens[0], x], [-1, 0]) == [True, False]
    assert all(held.allowed(tokens, range(-1, len(tokens) - 1)))
    assert held.error is None
    assert torch.equal(held.mask([(), (tokens[0],)]), expected)
    held.commit(tokens[:1])
    assert torch.equal(held.mask([()])[0], expected[1])
    assert held.allowed([tokens[1], x], [-1, 0]) == [True, True]
    assert (held.error, held._restarts) == (None, 0)
    monkeypatch.setattr(structure, "_RESTART_COMPILE_S", -1.0)
    dear = weak.make(regex=GROWING)
    assert dear.allowed([tokens[0], x], [-1, 0]) == [True, True]


def test_a_token_that_the_structure_forbids_is_an_error(model: Model) -> None:
    """Nobody should emit one; whoever does hears of it, and no more is said about what may follow."""
    held = model.make(regex="ab")
    held.commit(model.spell("x"))
    assert isinstance(held.error, InputError)
    assert re.search(r"could not be followed .*satisfy the grammar.*report this", str(held.error))
    assert held.mask([()]).all()


def test_an_answer_is_not_walked_again_for_ever(weak: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walk costs a compilation; a grammar that is slow to compile is not compiled again at all."""
    built = []
    build = structure.build_matcher
    monkeypatch.setattr(structure, "build_matcher", lambda *given: (built.append(1), build(*given))[1])
    walk_until_error(weak.make(regex=GROWING), steps(weak))
    assert 2 <= len(built) <= 1 + structure._MAX_RESTARTS + 1
    built.clear()
    monkeypatch.setattr(structure, "_RESTART_COMPILE_S", -1.0)
    walk_until_error(weak.make(regex=GROWING), steps(weak))
    assert len(built) <= 1  # only a new shared one, as the request before has ruined the old one
