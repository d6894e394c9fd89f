"""`foretoken bench --url` on our own server: its figures are those of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken import LLM, SpecConfig
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.measure.url.plan import UrlOptions
from foretoken.measure.url.run import run_url
from foretoken.server.api.app import create_app
from tests.server.serving import served


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    spec = SpecConfig("ngram", num_draft=4)
    with LLM("reference:target", spec, dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        yield engine


def test_tokens_and_acceptance_are_those_of_the_engine(engine: AsyncEngine, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def a():\\n    return 1\\n\\n\\ndef b():\\n    return 1\\n\\n\\ndef c():\\n"}\n')
    with served(create_app(LocalBackend(engine, "reference"))) as url:
        options = UrlOptions(url, prompts=prompts, rates=(50.0,), requests=4, max_tokens=24, warmup=0)
        report = run_url(options)
    (row,) = report.rows
    stats = engine.llm.stats
    assert (row.num_ok, row.num_tokens, stats.num_emitted) == (4, 96, 96)
    assert (row.num_drafted, row.num_accepted) == (stats.num_drafted, stats.num_accepted)
    assert row.num_accepted > 0
    assert report.results["model"] == "reference"
    for one in report.results["requests"]:
        assert sum(count for _, count in one["pieces"]) == 24
        assert len(one["pieces"]) < 24  # a piece is what one step emitted
