"""trace.jsonl tells the same story as the outputs, in the documented schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig, StorageError
from tests.helpers.checkpoints import token_ids

PROMPTS = [token_ids(6, seed=i) * 2 for i in range(4)]


def test_the_trace_agrees_with_the_outputs(pair: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    specs = [
        SpecConfig(),
        SpecConfig("ngram"),
        SpecConfig("draft_model", str(pair.draft), num_draft=3),
        SpecConfig("ngram", rule="tree"),
    ]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t) for t in (0.0, 0.0, 1.0, 0.8)]
    with LLM(pair.target, dtype="float32", cache_tokens=1024, trace=file) as llm:
        outputs = llm.generate(PROMPTS, params, specs)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["schema"] == 1 and line["event"] in ("begin", "round", "end") for line in lines)
    for number, out in enumerate(outputs):
        own = [line for line in lines if line["request"] == number]
        assert [line["event"] for line in own] == ["begin", *["round"] * (len(own) - 2), "end"]
        rounds = own[1:-1]
        assert [token for line in rounds for token in line["emitted"]] == list(out.token_ids)
        assert [kind for line in rounds for kind in line["kinds"]] == [origin.kind for origin in out.provenance]
        assert sum(len(line["drafted"]) for line in rounds) == out.stats.num_drafted
        assert own[-1]["finish_reason"] == "length"
        assert own[-1]["stats"]["num_accepted"] == out.stats.num_accepted
        for line in rounds:
            assert len(line["parents"]) == len(line["drafted"]) == len(line["probabilities"])
            assert all(0 <= chance <= 1 for chance in line["probabilities"] if chance is not None)
    chances = [origin.probability for out in outputs for origin in out.provenance if origin.kind == "accepted"]
    assert chances
    assert all(chance is not None and 0 < chance <= 1 for chance in chances)


def test_every_field_is_documented(pair: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with LLM(pair.target, dtype="float32", cache_tokens=1024, trace=file) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4), SpecConfig("ngram"))
    fields = {
        (json.loads(line)["event"], field) for line in file.read_text().splitlines() for field in json.loads(line)
    }
    text = (Path(__file__).parents[2] / "docs" / "trace.md").read_text()
    documented = set(re.findall(r"`(\w+)`", text))
    assert {field for _, field in fields} <= documented


def test_an_aborted_request_ends_in_the_trace(pair: SimpleNamespace, tmp_path: Path) -> None:
    with LLM(pair.target, dtype="float32", cache_tokens=1024, trace=tmp_path / "t.jsonl") as llm:
        state = llm.submit(PROMPTS[0], SamplingParams(max_tokens=9), SpecConfig())
        llm.engine.step()
        llm.engine.abort(state.request_id)
    last = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["finish_reason"]) == ("end", "abort")


def test_a_trace_that_cannot_be_written(pair: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write the trace"):
        LLM(pair.target, cache_tokens=512, trace=tmp_path / "no" / "t.jsonl")
