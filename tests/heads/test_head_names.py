"""C6: a configuration that names a head is made without reading it; its kind is read when it is first needed."""

from __future__ import annotations

import builtins
import pickle
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from foretoken import SpecConfig
from foretoken.errors import CheckpointError, ConfigError
from foretoken.model import names


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
    assert spec.for_request(None) == spec
    assert spec.samples
    SpecConfig(drafter, head="org/x", parts=("early_exit", "suffix"))
    with pytest.raises(ConfigError, match="must be the name of a text file"):
        SpecConfig(drafter, head="org/x", corpus="")
    with pytest.raises(ConfigError, match=r"drafter='(auto|mix)' \(parts: .*head\)"):
        SpecConfig(drafter, head="org/x", exit_layer=2)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "block"])
def test_c6_the_kind_is_read_when_it_is_needed(kind: str) -> None:
    spec = SpecConfig("auto", head=f"reference:{kind}", tree="static")
    assert [part.drafter for part in spec.configs] == ["suffix", kind]
    assert spec.configs[-1].head == f"reference:{kind}"
    assert spec.leaves == {"suffix", kind}
    assert kind in spec.for_request("expected").leaves


def test_c6_a_head_that_is_not_there_is_an_error_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    spec = SpecConfig("auto", head="./nowhere")
    with pytest.raises(CheckpointError, match="folder nowhere does not exist"):
        _ = spec.configs


def test_an_option_that_the_found_drafter_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "early_exit_adapter"}')
    spec = SpecConfig("auto", head=str(tmp_path), tree="static")
    with pytest.raises(ConfigError, match=r"tree='static': only .* \(parts: suffix, early_exit\)"):
        _ = spec.configs
