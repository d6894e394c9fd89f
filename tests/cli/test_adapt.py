"""--adapt: a trained head learns from what is served; refused where nobody would learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import SpecConfig
from foretoken.engine import llm
from foretoken.server import run
from foretoken.server.config import ServerConfig
from foretoken.server.run import Readiness
from tests.cli.conftest import Run
from tests.helpers.tiny_heads import tiny_head

SHORT = ("--max-tokens", 6, "--cost-profile", "off", "--json")


@pytest.fixture
def medusa(pair: SimpleNamespace, tmp_path: Path) -> Path:
    """A random head."""
    return tiny_head(tmp_path / "medusa", pair.target, "medusa")


@pytest.mark.parametrize("drafter", [(), ("--drafter", "auto")], ids=["its own drafter", "auto"])
def test_a_head_learns_while_generate_answers(
    foretoken: Run, pair: SimpleNamespace, medusa: Path, drafter: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[int] = []
    close = llm.LLM.close
    monkeypatch.setattr(llm.LLM, "close", lambda one: (learnt.append(len(one.adaptations)), close(one)))
    asked = ("generate", "-t", pair.target, "--prompt-ids", "5,6,7", "--head", medusa, *drafter, *SHORT)
    answers = []
    for flags in ((), ("--adapt",)):
        done = foretoken(*asked, *flags)
        assert done.code == 0, done.err
        answers.append(json.loads(done.lines[-1])["token_ids"])
    assert learnt == [0, 1]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("verb", ["generate", "chat", "serve"])
@pytest.mark.parametrize("flags", [(), ("--drafter", "none"), ("--drafter", "ngram")], ids=" ".join)
def test_without_a_head_it_is_refused(foretoken: Run, verb: str, flags: tuple[str, ...]) -> None:
    prompt = ("--prompt", "x") if verb == "generate" else ()
    done = foretoken(verb, "-t", "m", *prompt, "--adapt", *flags)
    assert done.code == 2
    assert "adapt=True: nobody would learn: name a trained head with --head" in done.err


def test_a_head_inside_of_a_mix_does_not_learn(foretoken: Run, medusa: Path) -> None:
    done = foretoken("generate", "-t", "m", "--prompt", "x", "--drafter", "mix", "--head", medusa, "--adapt")
    assert (done.code, "mix does not learn" in done.err) == (2, True), done.err


def test_the_flag_reaches_the_worker(foretoken: Run, medusa: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerConfig] = []

    def stand_in(config: ServerConfig, on_ready: Callable[[Readiness], None]) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr(run, "run_server", stand_in)
    for flags in ((), ("--adapt",)):
        done = foretoken("serve", "--head", medusa, *flags)
        assert done.code == 0, done.err
    assert [config.engine.adapt for config in served] == [False, True]
    assert served[1].engine.spec == SpecConfig("medusa", head=str(medusa))
