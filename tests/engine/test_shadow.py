"""The shadow: counts what it should, in an order that cannot fool it, in the room it is given, and raises the alarm
once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.core import Request
from foretoken.engine.request import RequestState
from foretoken.engine.shadow.shadow import Shadow
from foretoken.verify.rejection import RejectionRule
from tests.helpers.audit import open_sequences
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import ScriptedModel


class Offered(Shadow):
    """A shadow beside no engine: the whole cache is free unless a `room` is given, and answers may be offered when they
    have ended.
    """

    def __init__(self, target: ScriptedModel, rate: float, room: object = None, **options: object) -> None:
        options.setdefault("fresh_processors", lambda request: None)
        super().__init__(target, rate, room or FreeRoom(target), **options)

    def offer(self, request: Request, output_ids: list[int]) -> bool:
        """Whether the request was selected."""
        state = RequestState(request, None, frozenset(), 100)  # type: ignore[arg-type]
        self.begin(state)
        state.tokens += output_ids
        is_chosen = request.request_id in self._cases
        self.end(state)
        return is_chosen


class FreeRoom:
    """Lends all cache that is free."""

    def __init__(self, target: ScriptedModel) -> None:
        self.target = target

    def borrow(self, num_tokens: int, reclaim: Callable[[], None]) -> bool:
        return num_tokens <= self.target.num_free_tokens()

    def give_back(self) -> None:
        pass


PROMPTS = [token_ids(5 + i % 7, seed=i) for i in range(16)]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)


@pytest.fixture
def watched(llm: LLM) -> Iterator[Callable[..., Shadow]]:
    """Lets a shadow watch the shared engine; what it does not hold at the end is checked after every test."""
    made: list[Shadow] = []

    def watch(rate: float = 1.0, **options: object) -> Shadow:
        made.append(
            Shadow(
                llm.target,
                rate,
                room=llm.engine.scheduler,
                fresh_processors=llm.engine.admission.fresh_processors,
                **options,
            )
        )
        llm.engine.watchers.append(made[-1])
        return made[-1]

    yield watch
    for shadow in made:
        llm.engine.watchers.remove(shadow)
        shadow.close()


def specs(draft: Path) -> list[SpecConfig]:
    return [
        SpecConfig(),
        SpecConfig("ngram", num_draft=4, rule="rejection"),
        *(SpecConfig("draft_model", str(draft), num_draft=3, rule=rule) for rule in ("rejection", "block", "coupled")),
    ]


def test_a_sound_engine_raises_no_alarm(llm: LLM, pair: SimpleNamespace, watched: Callable[..., Shadow]) -> None:
    """Sampled and greedy, with and without processors, every drafter and rule, in one batch: all is counted, nothing is
    found.
    """
    shadow = watched(tokens_per_step=8)
    params = [
        SAMPLED,
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(
            max_tokens=20, temperature=1.0, top_p=0.8, repetition_penalty=1.4, frequency_penalty=0.3, min_tokens=4
        ),
    ]
    chosen = specs(pair.draft)
    for turn in range(3):
        each = [replace(params[(turn + i) % 3], seed=100 * turn + i) for i in range(16)]
        llm.generate(PROMPTS, each, [chosen[i % len(chosen)] for i in range(16)])
    found = shadow.drain()
    assert (found.num_requests, found.num_waiting, found.alarm, found.message) == (48, 0, False, "")
    assert found.num_tokens > 16 * (24 + 20)
    assert found.num_greedy_tokens == 16 * 20
    assert (found.num_greedy_other, found.max_greedy_gap) == (0, pytest.approx(0, abs=1e-4))
    assert 0 < found.e_value < 100
    assert open_sequences(llm.target) == []


def broken(self: RejectionRule, draft: object, probs: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return probs[list(rows)]


def test_a_wrong_residual_is_found_while_the_engine_runs(
    llm: LLM, pair: SimpleNamespace, watched: Callable[..., Shadow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug of a residual that is the target's distribution: the alarm comes once, as a warning and as a flag."""
    monkeypatch.setattr(RejectionRule, "next_token_weights", broken)
    shadow, spec = (
        watched(tokens_per_step=10_000),
        SpecConfig("draft_model", str(pair.draft), num_draft=4, rule="rejection"),
    )
    params = SamplingParams(max_tokens=32, temperature=0.5, ignore_eos=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turns = iter(range(20))
        while not shadow.drain().alarm:
            llm.generate(
                PROMPTS, [replace(params, seed=16 * turn + i) for turn in [next(turns)] for i in range(16)], spec
            )
        llm.generate(PROMPTS, [replace(params, seed=1000 + i) for i in range(16)], spec)  # no second warning
    shadow.drain()
    found = shadow.stats
    assert len(caught) == 1
    assert str(caught[0].message) == found.message
    assert "sampled tokens do not follow the target's distribution: e-value" in found.message
    assert found.alarm
    assert found.e_value > 1e6


def requests(count: int, **params: object) -> list[Request]:
    return [
        Request(i, (1, 2), SamplingParams(**{"max_tokens": 8, "temperature": 1.0, **params}), SpecConfig(), 1000 + i)
        for i in range(count)
    ]


def answers(rng: np.random.Generator, distribution: Sequence[float], length: int = 8) -> list[int]:
    return [int(token) for token in rng.choice(len(distribution), size=length, p=distribution)]


def scripted(distribution: Sequence[float]) -> ScriptedModel:
    """Every next token has the same distribution."""
    return ScriptedModel(
        lambda context: [math.log(p) if p else -math.inf for p in distribution], vocab_size=len(distribution)
    )


LAW = (0.5, 0.3, 0.2, 0.0)


def test_which_requests_are_followed() -> None:
    """A share of about `rate`, the same ones every time, whatever else the program draws."""
    chosen = []
    for turn in range(2):
        shadow, rng = Offered(scripted(LAW), 0.3), np.random.default_rng(turn)
        chosen.append(
            [
                request.request_id
                for request in requests(400)
                if shadow.offer(request, answers(rng, LAW)) | bool(shadow.drain().alarm)
            ]
        )
    assert chosen[0] == chosen[1]
    assert 90 < len(chosen[0]) < 150
    none, every = Offered(scripted(LAW), 0.0), Offered(scripted(LAW), 1.0)
    assert not any(none.offer(request, [0]) for request in requests(50))
    assert all(every.offer(request, [0]) for request in requests(50))
    assert every.drain().num_requests == 50


def test_what_is_left_out() -> None:
    """A lossy rule claims no distribution; a seed that was given twice would count twice; too many waiting answers cost
    memory.
    """
    shadow = Offered(scripted(LAW), 1.0, max_waiting=2)
    lossy = Request(0, (1,), SAMPLED, SpecConfig("ngram", rule="typical", allow_lossy=True), 5)
    seeded = [Request(i, (1,), SamplingParams(temperature=1.0, seed=7), SpecConfig(), 7) for i in (1, 2)]
    greedy = [Request(i, (1,), SamplingParams(seed=7), SpecConfig(), 7) for i in (3, 4)]
    assert not shadow.offer(lossy, [0])
    assert [shadow.offer(request, [0, 1]) for request in seeded] == [True, False]
    shadow.drain()
    assert [shadow.offer(request, [0, 0]) for request in greedy] == [True, True]
    assert not shadow.offer(requests(1)[0], [0])
    assert shadow.drain().num_requests == 3


def test_temperature_zero() -> None:
    """One token that is not the argmax is enough, unless rounding explains it; the gap is told."""
    close = ScriptedModel(lambda context: [8.0, 8.0 - 1e-5, 0.0], vocab_size=3)
    shadow = Offered(close, 1.0)
    shadow.offer(requests(1, temperature=0.0)[0], [0, 0, 1, 0])
    found = shadow.drain()
    assert (found.num_greedy_tokens, found.num_greedy_other, found.alarm) == (4, 1, False)
    assert found.max_greedy_gap == pytest.approx(1e-5, rel=0.1)
    shadow.offer(requests(1, temperature=0.0)[0], [0, 2])
    with pytest.warns(UserWarning, match="1 greedy tokens are not the target's choice, by up to 8 in logits"):
        assert shadow.drain().alarm


def test_an_impossible_token() -> None:
    shadow = Offered(scripted(LAW), 1.0)
    shadow.offer(requests(1)[0], [0, 1, 3])
    with pytest.warns(UserWarning, match="request 0: 1 tokens have probability 0 under the target"):
        shadow.drain()
    shadow.offer(requests(1)[0], [3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no second one
        shadow.drain()


def test_broken_logits() -> None:
    shadow = Offered(ScriptedModel(lambda context: [float("nan")] * 3, vocab_size=3), 1.0)
    shadow.offer(requests(1)[0], [0])
    with pytest.warns(UserWarning, match="request 0: the target's logits are not finite"):
        assert shadow.drain().alarm
    assert not shadow.target.sequences


# ---- order of arrival


def begun(shadow: Shadow, count: int) -> list[RequestState]:
    """Requests that all arrive now; what they emit is told later."""
    states = [RequestState(request, None, frozenset(), 100) for request in requests(count)]  # type: ignore[arg-type]
    for state in states:
        shadow.begin(state)
    return states


def test_short_answers_that_finish_first_do_not_fool_it() -> None:
    """Half of all answers end at once, the others go on. Counted as they finish, the first hundred would all say
    'end'.
    """
    rng, distribution = np.random.default_rng(0), (0.5, 0.5)
    texts = [answers(rng, distribution, 40) for _ in range(300)]
    texts = [text[: text.index(0) + 1] if 0 in text else text for text in texts]  # 0 ends an answer
    by_finish = sorted(range(300), key=lambda i: len(texts[i]))
    shadow, naive = (
        Offered(scripted(distribution), 1.0, alpha=1e-3, max_waiting=300),
        Offered(scripted(distribution), 1.0, alpha=1e-3),
    )
    states, largest = begun(shadow, 300), 0.0
    for i in by_finish:
        states[i].tokens += texts[i]
        shadow.end(states[i])
        largest = max(largest, shadow.drain().e_value)
    assert shadow.stats.num_requests == 300
    assert largest < 20
    for i in by_finish[:150]:
        naive.offer(states[i].request, texts[i])
    with pytest.warns(UserWarning, match="do not follow"):
        naive.drain()


def test_an_answer_that_was_dropped_counts_as_far_as_it_came() -> None:
    shadow = Offered(scripted(LAW), 1.0)
    states = begun(shadow, 3)
    states[0].tokens += [0, 1]
    for state, reason in zip(states, ("abort", "abort", "stop"), strict=True):
        state.finish_reason = reason
    for state in states[1:]:  # nothing came yet
        shadow.end(state)
    assert shadow.drain().num_requests == 0
    shadow.end(states[0])
    found = shadow.drain()
    assert (found.num_requests, found.num_tokens, found.num_waiting) == (3, 2, 0)


# ---- room and pieces


class Spare:
    """A room with a switch; the reclaim of the open loan is kept."""

    def __init__(self) -> None:
        self.open, self.lent, self.reclaim = True, 0, None

    def borrow(self, num_tokens: int, reclaim: Callable[[], None]) -> bool:
        assert not self.lent, "one loan at a time"
        self.lent, self.reclaim = (num_tokens, reclaim) if self.open else (0, None)
        return self.open

    def give_back(self) -> None:
        self.lent, self.reclaim = 0, None


def test_pieces_are_bounded_and_room_is_asked_for() -> None:
    model, spare = scripted(LAW), Spare()
    shadow = Offered(model, 1.0, room=spare)
    for request in requests(3):
        shadow.offer(request, [0, 1, 2, 0, 1])
    spare.open = False
    assert shadow.advance(100) == 0  # waits
    assert not model.sequences
    spare.open = True
    assert [shadow.advance(4) for _ in range(4)] == [4, 4, 4, 4]  # 6 tokens each: prompt and answer without its last
    assert (spare.lent, len(model.sequences), shadow.stats.num_requests) == (6, 1, 2)
    assert shadow.advance(100) == 2
    assert (spare.lent, len(model.sequences), shadow.stats.num_requests) == (0, 0, 3)
    assert shadow.advance(100) == 0


def test_processors_are_made_once_there_is_room() -> None:
    """A grammar may take seconds, in the engine's thread, and a busy engine refuses room at every step."""
    spare, made = Spare(), list[int]()
    shadow = Offered(scripted(LAW), 1.0, room=spare, fresh_processors=lambda request: made.append(request.request_id))
    shadow.offer(requests(1)[0], [0, 1, 2])
    spare.open = False
    assert [shadow.advance(100) for _ in range(3)] == [0, 0, 0]
    assert made == []
    spare.open = True
    assert (shadow.drain().num_requests, made) == (1, [0])


def test_a_request_that_needs_the_room_gets_it_at_once() -> None:
    """What was begun is begun anew, and counts once."""
    model, spare = scripted(LAW), Spare()
    shadow, undisturbed = Offered(model, 1.0, room=spare), Offered(scripted(LAW), 1.0)
    rng = np.random.default_rng(0)
    for request in requests(4):
        text = answers(rng, LAW)
        shadow.offer(request, text)
        undisturbed.offer(request, text)
    shadow.advance(7)
    assert spare.reclaim is not None
    spare.reclaim()
    assert (spare.lent, list(model.sequences)) == (0, [])
    assert shadow.drain() == undisturbed.drain()


def test_a_full_cache_is_waited_for() -> None:
    model = scripted(LAW)
    model.capacity_tokens = 12
    model.open(1)
    model.sequences[1] = [0] * 9
    shadow = Offered(model, 1.0)
    shadow.offer(requests(1)[0], [0] * 8)
    assert shadow.drain().num_requests == 0
    assert list(model.sequences) == [1]
    model.close(1)
    assert shadow.drain().num_requests == 1


def test_closing_gives_everything_back() -> None:
    model, spare = scripted(LAW), Spare()
    shadow = Offered(model, 1.0, room=spare)
    begun(shadow, 2)
    shadow.offer(requests(3)[2], [0, 1, 2])
    shadow.advance(2)
    assert model.sequences
    shadow.close()
    shadow.close()
    assert (spare.lent, list(model.sequences), shadow.stats.num_waiting, shadow.advance(9)) == (0, [], 0, 0)
