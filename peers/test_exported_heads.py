"""Exported heads (EAGLE-1, Medusa) in vLLM, started from the printed line: their texts, and what they accept.

FORETOKEN_VLLM names the program `vllm` (0.32; `make peers` installs the CPU build). The oracle of the texts is the same
server without speculation; that of acceptance is this engine with the same head. An engine that computes a head in
another way still answers rightly, and accepts less.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.backend.answering import SERVED, Drafting, Question
from foretoken.backend.http import HttpBackend, ServerAddress
from foretoken.export.engines import engine_of
from foretoken.export.write import export_head
from foretoken.measure.workload import slices
from foretoken.model.names import model_folder

TARGET = model_folder("reference:target")
NUM_DRAFT, MAX_TOKENS, START_S = 3, 48, 900
PROMPTS = [prompt.text for prompt in slices(per_slice=3)][:12]
# Drafts at the end of an answer are cut here and not in vLLM; this is how far its share of accepted tokens may be off.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Asked:
    """The texts of a server, and the share of drafts whose token at each place was accepted."""

    texts: Sequence[str]
    places: Sequence[float]


@contextmanager
def started(argv: Sequence[str], log: Path) -> Iterator[str]:
    """The address of the server that `argv` starts; it is stopped at the end."""
    program = os.environ.get("FORETOKEN_VLLM")
    assert program, "FORETOKEN_VLLM must name the program `vllm` of a vLLM 0.32; `make peers` installs one"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
    with log.open("w") as out:
        process = subprocess.Popen([program, *argv[1:], *own], stdout=out, stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _is_ready(url):
            assert process.poll() is None, f"{' '.join(argv)} ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"{' '.join(argv)} did not start: {log.read_text()[-3000:]}"
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


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
def plain(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """vLLM without speculation."""
    with started(["vllm", "serve", str(TARGET)], tmp_path_factory.mktemp("plain") / "log") as url:
        return ask(url)


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
    spec = SpecConfig(kind, head=str(head), tree="chain", num_draft=NUM_DRAFT, draft_dtype="float32")
    assert asked.texts == plain.texts
    assert asked.places == pytest.approx(own_places(spec), abs=TOLERANCE)
