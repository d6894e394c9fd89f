"""Ranks at length: every drafter on 2 and 3 processes, and ranks that are lost at random moments.

`make proof` runs the drafters and 20 random moments; the release families on 4 ranks too, and 1,000 moments, which
`python -m proof.moments` runs in turns. Families and forms of weights: `test_rank_forms`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from proof.moments import EQUAL, LOST, Moments, failures
from tests.engine.test_exactness import PROMPTS, all_specs
from tests.helpers.checkpoints import related_pair, variant
from tests.helpers.specs import predicting
from tests.model.test_sharding import FAMILIES
from tests.parallel.test_ranks import GREEDY, SHAPE, answers, opened
from tests.server.test_life import KEYS, REFERENCE, children, is_alive, serving, until

pytestmark = pytest.mark.filterwarnings("ignore:the draft has .* MB of weights to read")
LONG = SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return related_pair(tmp_path_factory.mktemp("divisible"), **SHAPE)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(scope="module")
def divided(pair: SimpleNamespace, ranks: int) -> Iterator[LLM]:
    with opened(pair, ranks) as llm:
        yield llm


@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.release)])
def test_every_drafter_and_number_of_draft_tokens(pair: SimpleNamespace, divided: LLM, ranks: int, stride: int) -> None:
    """Turn by turn on 2 or on 3 ranks, and before a release on both."""
    specs = all_specs(pair.draft)
    with opened(pair, 1) as one:
        for start in range(ranks % stride * 16, len(specs), 16 * stride):
            turn = specs[start : start + 16]
            params = [predicting(spec, LONG, PROMPTS[4] * 2) for spec in turn]
            assert answers(divided, turn, params) == answers(one, turn, params)


@pytest.mark.release
@pytest.mark.parametrize("name", [*FAMILIES])
def test_every_family_on_4_ranks(tmp_path: Path, name: str) -> None:
    """Of four heads and two key/value heads, which are repeated. On 2 and 3 ranks: `test_rank_forms`."""
    target = SimpleNamespace(target=variant(tmp_path, name))
    specs = [SpecConfig(), SpecConfig("ngram", num_draft=4), SpecConfig("early_exit", exit_layer=1, num_draft=3)] * 2
    found = []
    for ranks in (1, 4):
        with opened(target, ranks) as llm:
            found.append(answers(llm, specs, [GREEDY] * len(specs)))
    assert found[0] == found[1]


@pytest.mark.usefixtures("failed_drafters")  # one whose pass loses a rank fails by it, before the request does
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.release)])
def test_a_fault_at_a_random_moment_ends_in_an_error_or_in_the_same_tokens(tmp_path: Path, count: int) -> None:
    moments = Moments(tmp_path / "state.json", tmp_path)
    moments.run(count)
    assert not failures(moments.done)
    assert {moment["outcome"] for moment in moments.done} == {EQUAL, LOST}
    assert len(moments.done) == count


def test_a_server_restarts_a_worker_whose_rank_was_killed() -> None:
    """A request in flight gets `worker_died`; the next worker has new ranks, and none is left when the server ends."""
    with serving(*REFERENCE, *KEYS, "--tp", "2") as server:
        server.wait_ready()
        (worker,) = server.invariants()["workers"]
        expected = server.complete(temperature=0.0).json()["choices"]
        (rank,) = children(worker["pid"])
        stream = server.stream()
        next(stream)
        os.kill(rank, signal.SIGKILL)
        assert json.loads([*stream][-1])["error"]["code"] == "worker_died"
        until(lambda: not is_alive(worker["pid"]), "the worker did not end")
        until(lambda: server.get("/ready").status_code == 503, "the server did not hear of it")
        until(lambda: server.get("/ready").status_code == 200, "no worker came back")
        assert server.complete(temperature=0.0).json()["choices"] == expected
        (worker,) = server.invariants()["workers"]
        (rank,) = children(worker["pid"])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        until(lambda: not is_alive(rank), "a rank is left")
