"""How drafters and their options are named to the bench."""

from __future__ import annotations

import pytest

from foretoken import field_text, registry
from foretoken.backend.drafting import DrafterChoice, parse_drafters
from foretoken.config import DRAFTERS, SpecConfig, known_drafters
from foretoken.errors import ConfigError

FREE = [name for name in DRAFTERS if name not in (*registry.HEADS, registry.MTP)]


def test_all_is_the_registry(monkeypatch):
    """But trained heads, which need a folder each."""
    assert [choice.name for choice in parse_drafters(["all"])] == FREE
    monkeypatch.setattr(registry, "ADDED", {"mine": registry.Traits(None)})
    assert [choice.name for choice in parse_drafters(["all"])] == [*FREE, "mine"]


def test_who_is_named_is_required_and_not_twice_in_all():
    found = parse_drafters(["ngram", "all", "ngram"])
    assert [choice.name for choice in found] == ["ngram", *(name for name in FREE if name != "ngram")]
    assert [choice.required for choice in found] == [True] + [False] * (len(FREE) - 1)
    found = parse_drafters(["all", "ngram:num_draft=3"])  # with options it is another setting
    assert [choice.name for choice in found] == ["ngram", *FREE]


def test_options_become_fields_of_their_kind():
    (choice,) = parse_drafters(["draft_model:draft_top_k=5;min_confidence=0.4;draft=DIR;num_draft=3;rule=block"])
    assert choice.spec() == SpecConfig(
        "draft_model", draft="DIR", num_draft=3, rule="block", min_confidence=0.4, draft_top_k=5
    )
    assert choice.label == "draft_model(draft_top_k=5;min_confidence=0.4;draft=DIR)"
    assert (choice.own("num_draft"), choice.own("corpus")) == (3, None)
    assert "draft" not in choice.needs
    assert "draft" in choice.takes
    (auto,) = parse_drafters(["draft_model:draft_probability=auto;num_draft=auto"])
    assert auto.spec(draft="d") == SpecConfig("draft_model", draft="d", draft_probability="auto")
    (share,) = parse_drafters(["draft_model:draft_probability=0.5"])
    assert share.spec(draft="d").draft_probability == 0.5
    (text,) = parse_drafters(["suffix:corpus=3"])
    assert text.spec().corpus == "3"


def parse(field, text):
    return field_text.parse_field(SpecConfig, field, text, "+")


def test_lists_truths_and_fixed_words(monkeypatch):
    monkeypatch.setattr(
        field_text.typing,
        "get_type_hints",
        lambda kind: {"parts": tuple[str, ...], "draft": bool, "corpus": tuple[int, ...], "num_draft": float | None},
    )
    assert parse("parts", "ngram+suffix") == ("ngram", "suffix")
    assert parse("parts", "ngram") == ("ngram",)
    assert parse("corpus", "2+3") == (2, 3)
    assert parse("draft", "true") is True
    assert parse("num_draft", "2.5") == 2.5
    for field, value, message in (
        ("draft", "yes", "true or false"),
        ("corpus", "2+x", "whole numbers"),
        ("num_draft", "x", "a number"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(field, value)
    assert DrafterChoice("x", (("a", (2, 3)), ("b", True))).options == "a=2+3;b=true"


def test_what_a_drafter_takes_is_what_its_configuration_accepts():
    found = {choice.name: choice for choice in parse_drafters(["draft_model", "ngram", "predicted", "suffix"])}
    assert {name: set(choice.takes) for name, choice in found.items()} == {
        "draft_model": {"draft"},
        "ngram": set(),
        "predicted": {"prediction"},
        "suffix": set(),
    }
    assert {name: set(choice.needs) for name, choice in found.items()} == {
        "draft_model": {"draft"},
        "ngram": set(),
        "predicted": {"prediction"},
        "suffix": set(),
    }


def test_a_composite_needs_what_its_parts_need(monkeypatch):
    monkeypatch.setitem(registry.DRAFTERS, "ngram", registry.Traits(None, composite=True))
    (both,) = parse_drafters(["ngram:parts=draft_model+predicted"])
    assert both.needs == {"draft", "prediction"}
    assert both.leaves == {"draft_model", "predicted"}
    assert both.label == "ngram(parts=draft_model+predicted)"
    (one,) = parse_drafters(["ngram:parts=recycling+suffix"])
    assert (one.needs, one.takes) == (frozenset(), frozenset())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("oracle", "oracle"),
        ("draft_model:draft_topk=3", "draft_top_k"),
        ("draft_model:draft_top_k=x", "whole number"),
        ("draft_model:draft_top_k", "field=value"),
        ("ngram:draft_top_k=3", "draft_model"),
        ("predicted:prediction=x", "comes with each prompt"),
        ("suffix:tenant=x", "gets its own"),
        ("ngram:drafter=suffix", "before the colon"),
        ("ngram:rule=typical2", "typical2"),
        ("eagle", "eagle:head=DIR"),
    ],
)
def test_bad_drafters_and_options_are_refused_by_name(text, named):
    with pytest.raises(ConfigError, match=named):
        parse_drafters([text])


def test_a_sweep_is_every_drafter_at_every_fixed_number_and_trees() -> None:
    found = parse_drafters(("sweep",))
    labels = {(choice.label, choice.own("num_draft")) for choice in found}
    names = set(known_drafters()) - {"auto", *registry.HEADS, registry.MTP}
    assert labels == {
        (label, number)
        for label in (*names, "draft_model(tree=static)", "draft_model(tree=best_first)")
        for number in (2, 3, 5, 8)
    }
    assert not any(choice.required for choice in found)
    assert len(found) == len(labels)
