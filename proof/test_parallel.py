"""Ranks at length: every drafter and family on 2 and 3 processes, and ranks that are lost at random moments.

`make proof` runs the drafters, the families on 2 ranks, and 20 random moments; the release 4 ranks too, and 1,000
moments in turns of 20, so that a run that was ended can go on (`pytest -m "" -k "moments and turn17"`).
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, RankError, SamplingParams, SpecConfig
from foretoken.parallel import group
from tests.engine.test_exactness import PROMPTS, all_specs
from tests.helpers import faulty_rank
from tests.helpers.checkpoints import related_pair, tiny_checkpoint, variant
from tests.helpers.deadline import within
from tests.helpers.specs import predicting
from tests.model.test_sharding import FAMILIES
from tests.parallel.test_ranks import GREEDY, SHAPE, answers, opened, same_on
from tests.server.test_life import KEYS, REFERENCE, children, is_alive, serving, until

pytestmark = pytest.mark.filterwarnings("ignore:the draft has .* MB of weights to read")
# Exchanges of an answer of `LONG` and its prompt: 32 steps of 2 * 2 layers, embedding and logits, and a prompt.
NUM_EXCHANGES = 190
LONG = SamplingParams(max_tokens=32, ignore_eos=True)
PATIENCE_S = 1.0
DEADLINE_S = 60.0  # of a moment, the start of its ranks on a loaded machine included


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return related_pair(tmp_path_factory.mktemp("divisible"), **SHAPE)


@pytest.fixture(scope="module", params=[2, 3])
def divided(pair: SimpleNamespace, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with opened(pair, request.param) as llm:
        yield llm


def test_every_drafter_and_number_of_draft_tokens(pair: SimpleNamespace, divided: LLM) -> None:
    specs = all_specs(pair.draft)
    with opened(pair, 1) as one:
        for start in range(0, len(specs), 16):
            turn = specs[start : start + 16]
            params = [predicting(spec, LONG, PROMPTS[4] * 2) for spec in turn]
            assert answers(divided, turn, params) == answers(one, turn, params)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.release)])
@pytest.mark.parametrize("name", [*FAMILIES])
def test_every_family(tmp_path: Path, name: str, world: int) -> None:
    """Of four heads; with key/value heads that are divided or repeated."""
    target = SimpleNamespace(target=variant(tmp_path, name))
    specs = [SpecConfig(), SpecConfig("ngram", num_draft=4), SpecConfig("early_exit", exit_layer=1, num_draft=3)] * 2
    found = []
    for ranks in (1, world):
        with opened(target, ranks) as llm:
            found.append(answers(llm, specs, [GREEDY] * len(specs)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mistral-sliding", {"weights": "int4"}),
        ("qwen2-tied", {"weights": "int8"}),
        ("gemma2", {"weights": "int8"}),
    ],
)
def test_quantised_weights(tmp_path: Path, name: str, options: dict[str, str]) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    assert same_on(2, variant(tmp_path, name, **shape), cache_dtype="model", **options)


NUM_MOMENTS = 20  # of a turn
FAULTS = {
    "kill": 8,
    "stop": 1,
    "raise": 3,
    "slow": 4,
    "perturb": 4,
}  # in a turn on average; the first three end a group


@pytest.mark.parametrize(
    "turn",
    [pytest.param(turn, id=f"turn{turn}", marks=[pytest.mark.release] if turn else []) for turn in range(50)],
)
def test_random_moments_of_a_fault_end_in_an_error_or_in_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """Killed, stopped, raising, slow or deciding near ties otherwise from a random exchange on, of two or three ranks:
    the tokens of one process, or a `RankError`. Never a hang: the deadline ends the test process.
    """
    rng = random.Random(turn)
    target = SimpleNamespace(target=tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2, **SHAPE))
    with opened(target, 1) as one:
        expected = one.generate([PROMPTS[2]], LONG)[0].token_ids
    monkeypatch.setattr(group, "RANK_COMMAND", faulty_rank.COMMAND)
    monkeypatch.setattr(group, "PATIENCE_S", PATIENCE_S)
    outcomes = set[str]()
    for _ in range(NUM_MOMENTS):
        world, what = rng.choice((2, 3)), rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        last = LONG.max_tokens if what == "perturb" else NUM_EXCHANGES + 20
        fault = f"{rng.randrange(1, world)}:{what}:{rng.randrange(1, last)}"
        monkeypatch.setenv(faulty_rank.VARIABLE, fault)
        with within(DEADLINE_S), opened(target, world) as llm:
            try:
                assert llm.generate([PROMPTS[2]], LONG)[0].token_ids == expected, fault
                outcomes.add("equal")
            except RankError:
                outcomes.add("lost")
                assert what not in ("slow", "perturb"), fault
    assert outcomes == {"equal", "lost"}


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
        until(lambda: server.get("/ready").status_code == 200, "no worker came back")
        assert server.complete(temperature=0.0).json()["choices"] == expected
        (worker,) = server.invariants()["workers"]
        (rank,) = children(worker["pid"])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        until(lambda: not is_alive(rank), "a rank is left")
