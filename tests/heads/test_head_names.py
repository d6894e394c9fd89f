"""C6: a configuration that names a head never reads it; its kind is read when the drafter is loaded."""

from __future__ import annotations

import builtins
import pickle
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.engine import drafters
from foretoken.errors import CheckpointError, ConfigError
from foretoken.heads import kind
from foretoken.heads.kind import with_head_kind
from foretoken.heads.kinds import KINDS
from foretoken.model import names
from foretoken.registry import HEAD_KINDS, load_source
from foretoken.train.head_recipes import RECIPES
from tests.helpers.tiny_heads import tiny_head


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is resolved, no file opened, no connection made."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a configuration reads nothing")

    monkeypatch.setattr(names, "_snapshot", refuse)
    monkeypatch.setattr(names, "fetch_packaged", refuse)
    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(socket, "socket", refuse)


@pytest.mark.parametrize("drafter", ["auto", "mix"])
def test_c6_constructing_reads_nothing(unreachable: None, drafter: str) -> None:
    spec = SpecConfig(drafter, head="org/x", draft_dtype="int8", num_draft=4)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(SpecConfig(drafter, head="org/x", draft_dtype="int8", num_draft=4))
    assert spec.for_request(None) == spec.for_request("expected") == spec
    assert spec.samples
    assert spec.declared[-1].head == "org/x"
    with pytest.raises(ConfigError, match="which drafter runs it is not known here: set head_kind"):
        _ = spec.configs
    known = replace(spec, head_kind="medusa")
    assert known.configs[-1] == SpecConfig("medusa", head="org/x", draft_dtype="int8")
    assert known.for_request("expected").leaves == {*known.leaves, "predicted"}
    SpecConfig(drafter, head="org/x", parts=("early_exit", "suffix"))
    with pytest.raises(ConfigError, match="must be the name of a text file"):
        SpecConfig(drafter, head="org/x", corpus="")
    with pytest.raises(ConfigError, match=r"drafter='(auto|mix)' \(parts: .*head\)"):
        SpecConfig(drafter, head="org/x", exit_layer=2)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "block"])
def test_c6_the_kind_is_read_when_it_is_asked_for(kind: str) -> None:
    spec = with_head_kind(SpecConfig("auto", head=f"reference:{kind}", tree="static"))
    assert spec.head_kind == kind
    assert with_head_kind(spec) is spec
    assert [part.drafter for part in spec.configs] == ["suffix", kind]
    assert spec.configs[-1].head == f"reference:{kind}"
    assert spec.leaves == {"suffix", kind}
    assert kind in spec.for_request("expected").leaves


def test_c6_a_head_that_is_not_there_is_an_error_of_loading(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = SpecConfig("auto", head="./nowhere")
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=64, profile="off") as llm:
        assert not llm.has_drafters(spec)
        with pytest.raises(CheckpointError, match="folder nowhere does not exist"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=2), spec)


def test_c6_a_request_reads_the_kind_of_its_head_once(
    pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = str(tiny_head(tmp_path, pair.target, "medusa"))
    read: list[str] = []

    def kind_of_head(name: str) -> str:
        read.append(name)
        return kind.kind_of_head(name)

    monkeypatch.setattr(drafters, "kind_of_head", kind_of_head)
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=64, profile="off") as llm:
        for prediction in (None, [3, 4]):
            params = SamplingParams(max_tokens=3, ignore_eos=True, prediction=prediction)
            llm.generate([[1, 2]], params, SpecConfig("auto", head=head))
        assert llm.has_drafters(SpecConfig("auto", head=head, num_draft=3))
        names = [drafter.name for drafter in llm.loaded_drafters()]
    assert read == [head]
    assert names == ["suffix", "medusa", "predicted"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"drafter": "auto", "head": "org/x", "head_kind": "eagel"}, "choose one of auto, eagle, medusa"),
        ({"drafter": "auto", "head_kind": "eagle"}, "runs a `head`"),
        ({"drafter": "eagle", "head": "org/x", "head_kind": "eagle"}, "name the drafter itself"),
    ],
)
def test_head_kinds_that_mean_nothing_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        SpecConfig(**given)
    assert caught.value.field == "head_kind"


def test_an_option_that_the_found_drafter_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "early_exit_adapter"}')
    spec = SpecConfig("auto", head=str(tmp_path), tree="static")
    with pytest.raises(ConfigError, match=r"tree='static': only .* \(parts: suffix, early_exit\)"):
        with_head_kind(spec)


def test_every_kind_of_head_stands_in_every_table() -> None:
    assert tuple(KINDS) == HEAD_KINDS
    assert {recipe.kind for recipe in RECIPES.values()} == set(KINDS)
    for name, row in KINDS.items():
        assert row.network.name == load_source(name).name == name  # type: ignore[attr-defined]
