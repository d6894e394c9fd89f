"""The table of decoding beside a process that loops."""

from __future__ import annotations

import argparse
import io
import json
import sys

import pytest

from foretoken import LLM, SpecConfig
from foretoken.errors import InputError
from studies.neighbour import PLAIN, peers_of, summary, work


def line(drafter: str, waiting: str, beside: bool, repeat: int, speed: float) -> dict[str, object]:
    return {
        "repeat": repeat,
        "prompt": 0,
        "drafter": drafter,
        "waiting": waiting,
        "beside": beside,
        "tokens_per_s": speed,
    }


def test_drafters_are_compared_with_plain_decoding_of_the_same_turn() -> None:
    lines = [
        line(PLAIN, "spin", True, 0, 3.0),
        line("draft_model", "spin", True, 0, 0.9),
        line(PLAIN, "sleep", True, 0, 3.5),
        line("draft_model", "sleep", True, 0, 7.0),
        line(PLAIN, "sleep", True, 1, 7.0),
        line("draft_model", "sleep", True, 1, 7.0),
        line("ngram", "sleep", False, 0, 9.0),  # its plain turn was not reached
    ]
    rows = {(row["drafter"], row["waiting"], row["beside"]): row for row in summary(lines)}
    assert rows["draft_model", "spin", True]["over_plain"] == pytest.approx(0.3)
    assert rows["draft_model", "sleep", True]["over_plain"] == pytest.approx(1.5)
    assert rows["draft_model", "sleep", True]["num_answers"] == 2
    assert rows["ngram", "sleep", False]["over_plain"] is None
    assert rows["draft_model", "sleep", True]["over_alone"] is None
    alone = summary([*lines, line(PLAIN, "spin", False, 0, 12.0)])
    row = next(row for row in alone if (row["drafter"], row["waiting"], row["beside"]) == (PLAIN, "spin", True))
    assert row["over_alone"] == pytest.approx(0.25)


def test_a_setting_of_another_engine_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETOKEN_LLAMA_CPP", raising=False)
    options = argparse.Namespace(
        target="reference:target", draft="reference:draft", threads=1, peers=("transformers-lookup-7", "llama.cpp")
    )
    with pytest.raises(InputError, match=r"backends='llama.cpp'.*FORETOKEN_LLAMA_CPP"):
        peers_of(options)
    options.peers = ("transformers-magic-7",)
    with pytest.raises(InputError, match=r"peers='transformers-magic-7'.*transformers-lookup-7"):
        peers_of(options)
    options.peers = ("transformers-lookup-7",)
    assert list(peers_of(options)) == ["transformers-lookup-7"]


def test_no_answer_is_drafted_from_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(
        target="reference:target", draft="reference:draft", threads=1, max_tokens=24, drafters=("suffix",), peers=()
    )
    job = json.dumps({"drafter": "suffix", "prompt": 0}) + "\n"
    reset, resets = LLM.reset_drafters, list[str | None]()

    def counted(llm: LLM, spec: SpecConfig) -> None:
        resets.append(spec.drafter)
        reset(llm, spec)

    monkeypatch.setattr(LLM, "reset_drafters", counted)
    monkeypatch.setattr(sys, "stdin", io.StringIO(job * 2))
    work(options)
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [answer["num_emitted"] for answer in answers] == [24, 24]
    assert resets == ["suffix"] * 3  # before the answer that warms up, too
