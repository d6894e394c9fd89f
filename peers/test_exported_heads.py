"""Exported heads (EAGLE-1, Medusa) in vLLM, started from the printed line: their texts, and what they accept.

FORETOKEN_VLLM names the program `vllm` (0.32; `make peers` installs the CPU build). The oracle of the texts is the same
server without speculation; that of acceptance is this engine with the same head. An engine that computes a head in
another way still answers rightly, and accepts less.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams, SpecConfig, diagnose
from foretoken.backend.answering import SERVED, Drafting, Question
from foretoken.backend.http import HttpBackend, ServerAddress
from foretoken.export.engines import engine_of
from foretoken.export.write import export_head
from foretoken.measure.workload import slices
from foretoken.model.names import model_folder
from peers.starting import started

TARGET = model_folder("reference:target")
NUM_DRAFT, MAX_TOKENS = 3, 48
PROMPTS = [prompt.text for prompt in slices(per_slice=3)][:12]
# Drafts at the end of an answer are cut here and not in vLLM; this is how far its share of accepted tokens may be off.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Asked:
    """The texts of a server, and the share of drafts whose token at each place was accepted."""

    texts: Sequence[str]
    places: Sequence[float]


def ask(url: str) -> Asked:
    """Every prompt once, greedy."""
    backend = HttpBackend(ServerAddress(url))
    before = backend.position_counters()
    texts = [backend.answer(Question(text, (), MAX_TOKENS, 0.0), Drafting(SERVED)).text for text in PROMPTS]
    after = backend.position_counters()
    if before is None or after is None:
        return Asked(texts, ())
    own = after.since(before)
    return Asked(texts, [count / own.num_drafts for count in own.accepted[:NUM_DRAFT]])


@pytest.fixture(scope="session")
def plain(plain_url: str) -> Asked:
    """The answers of vLLM without speculation."""
    return ask(plain_url)


def own_places(spec: SpecConfig) -> list[float]:
    """The share of drafts whose token at each place is accepted here."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    with LLM(str(TARGET), spec, dtype="float32", device="cpu") as llm:
        counts = [out.stats.accepted_per_position for out in llm.generate(PROMPTS, params)]
    drafts = sum(answer[0][0] for answer in counts if answer)
    return [sum(answer[k][1] for answer in counts if len(answer) > k) / drafts for k in range(NUM_DRAFT)]


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_an_exported_head_starts_and_accepts_what_it_does_here(kind: str, plain: Asked, tmp_path: Path) -> None:
    head = model_folder(f"reference:{kind}")
    export_head(head, TARGET, str(TARGET), engine_of("vllm", "0.32.0"), tmp_path / "head", NUM_DRAFT)
    launch = json.loads((tmp_path / "head" / "launch.json").read_text())
    with started(launch["argv"], tmp_path / "log") as url:
        asked = ask(url)
        found = diagnose(str(TARGET), str(head), url=url, num_prompts=6, num_draft=NUM_DRAFT, max_tokens=MAX_TOKENS)
    spec = SpecConfig(kind, head=str(head), tree="chain", num_draft=NUM_DRAFT, draft_dtype="float32")
    assert asked.texts == plain.texts
    assert asked.places == pytest.approx(own_places(spec), abs=TOLERANCE)
    assert (found.results["cause"], len(found.results["reported"]["places"])) == (None, NUM_DRAFT)
