"""A thousand random requests through one engine: no block is lost, nothing is kept of anybody, and no answer depends
on the crowd. proof/test_conservation.py sends ten thousand.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from foretoken import InputError, SamplingParams, SpecConfig
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.group import DrafterGroup, drafter_key, own_drafters
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.other_vocabulary import OtherVocabularyDrafter
from foretoken.draft.predicted import PredictedDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.observers import Trace
from foretoken.engine.request import RequestState, each_answer
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.text.tokenizer import load_tokenizer
from foretoken.text.vocabulary import Side
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.helpers.foreign_tokenizers import PROSE, foreign_tokenizer
from tests.helpers.specs import predicting

NUM_REQUESTS = 1_000
VOCAB = 300
FIRST_ID = 10**12  # no other number in the engine lies near, so that a request's number is known wherever it is kept
MAX_IDS = 10**7
CACHE_TOKENS, BLOCK = 320, 4
MAX_LIVE = 60  # requests at a time
SEASON, KINDS = 100, 4  # so many requests come with so many kinds of drafting, so that drafters serve several at once
SHARED = [random.Random(seed).choices(range(1, VOCAB), k=24) for seed in range(4)]

TWO_LEVELS = SpecConfig("cascade", parts=(SpecConfig("draft_model", "d"), SpecConfig("draft_model", "big")))
FOREIGN = {how: SpecConfig("draft_model", "f", draft_vocabulary=how) for how in ("strings", "intersection")}
DRAFTING = (
    *(SpecConfig(name) for name in ("ngram", "suffix", "recycling", "lookahead", "early_exit")),
    SpecConfig("predicted"),
    *(SpecConfig("early_exit", **layers) for layers in ({"exit_layer": 1}, {"skip_layers": (1,)})),
    *(SpecConfig("draft_model", "d", tree=tree) for tree in ("chain", "chain", "static", "best_first")),
    *(
        SpecConfig("draft_model", "d", **less)
        for less in ({"draft_probability": 0.5}, {"min_confidence": 0.1, "draft_top_k": 20})
    ),
    SpecConfig("cascade", "d"),
    TWO_LEVELS,
    SpecConfig("mix", "d"),
    *FOREIGN.values(),
    SpecConfig("auto", "d"),
)
RULES = ("auto", "auto", "auto", "rejection", "block", "coupled", "tree", "traversal", "greedy")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("conservation")
    for seed, name in enumerate(("target", "d", "f")):
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
        tiny_checkpoint(
            folder / name,
            "llama",
            seed,
            num_hidden_layers=1 + (name == "target"),
            vocab_size=VOCAB,
            max_position_embeddings=64,
            **shape,
        )
        foreign_tokenizer(folder / name, "unigram", VOCAB) if name == "f" else tiny_tokenizer(
            folder / name, VOCAB, PROSE
        )
    return {name: folder / name for name in ("target", "d", "f")}


def engine_of(folders: dict[str, Path]) -> Engine:
    """Every drafter, each with a cache that is too small for the requests it serves."""

    def model(name: str, num_slots: int) -> PagedModel:
        return PagedModel(load_decoder(folders[name]), num_slots, BLOCK)

    target, text = model("target", CACHE_TOKENS), load_tokenizer(folders["target"])
    own, foreign = (load_tokenizer(folders[name]) for name in ("target", "f"))
    assert own is not None
    assert foreign is not None
    drafters = DrafterGroup(target)

    def other(how: str) -> OtherVocabularyDrafter:
        return OtherVocabularyDrafter(model("f", 120), Side(own, VOCAB, (0,)), Side(foreign, VOCAB, (2,)), how)

    made = {
        **{drafter_key(spec): other(how) for how, spec in FOREIGN.items()},
        drafter_key(TWO_LEVELS): CascadeDrafter([model("d", 100), model("target", 100)]),
    }
    parts = {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "recycling": lambda: RecyclingDrafter(VOCAB),
        "lookahead": LookaheadDrafter,
        "early_exit": lambda: EarlyExitDrafter(target),
        "predicted": PredictedDrafter,
        "draft_model": lambda: DraftModelDrafter(model("d", 140)),
        "cascade": lambda: CascadeDrafter([model("d", 100)], NgramDrafter()),
        "mix": lambda: MixDrafter(
            [NgramDrafter(), SuffixDrafter(), RecyclingDrafter(VOCAB), DraftModelDrafter(model("d", 100))]
        ),
    }
    for key, spec in ((key, spec) for drafting in DRAFTING for key, spec in own_drafters(drafting).items()):
        if key not in made:
            assert spec.drafter is not None
            made[key] = parts[spec.drafter]()
    drafters.drafters = made
    engine = Engine(target, drafters, text, SchedulerConfig(max_batch_size=24, max_prompt_tokens=64, cache_reserve=0.0))
    engine._ids = itertools.count(FIRST_ID)
    return engine


@dataclass
class Crowd:
    """Who asks: prompts that often begin alike, in one of three tenants; every hundredth answer is kept as a
    `sample`.
    """

    engine: Engine
    rng: random.Random
    num_asked: int = 0
    aborted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    kinds: tuple[SpecConfig, ...] = ()
    drawn: set[int] = field(default_factory=set)  # kinds of drafting that came at all
    sample: dict[int, RequestState] = field(default_factory=dict)

    def prompt(self) -> list[int]:
        rng = self.rng
        head = rng.choice(SHARED)[: rng.choice((8, 16, 24))] if rng.random() < 0.5 else []
        return [
            *head,
            *rng.choices(range(1, VOCAB) if rng.random() < 0.5 else range(1, 5), k=rng.randint(1, 40 - len(head))),
        ]

    def params(self) -> SamplingParams:
        rng, more = self.rng, {}
        if rng.random() < 0.5:
            more = {"temperature": rng.choice((0.5, 1.0)), "top_k": rng.choice((0, 0, 20))}
        if more and rng.random() < 0.7:
            more["seed"] = rng.randrange(2**32)
        if rng.random() < 0.1:
            more["stop"] = rng.choice((" ", "e", ["th", "a"]))
        if rng.random() < 0.1:
            more["repetition_penalty"] = 1.2
        if rng.random() < 0.05:
            more["prompt_logprobs"] = 1
        return SamplingParams(
            max_tokens=rng.randint(1, 12),
            n=rng.choices((1, 2, 3), (18, 1, 1))[0],
            ignore_eos=rng.random() < 0.5,
            **more,
        )

    def arrive(self) -> None:
        """One request of one or more answers."""
        rng, params = self.rng, self.params()
        if len(self.kinds) == 0 or rng.random() < 1 / SEASON:
            unseen = sorted(set(range(len(DRAFTING))) - self.drawn)
            drawn = rng.sample(unseen if len(unseen) >= KINDS else range(len(DRAFTING)), KINDS)
            drawn += unseen if len(unseen) < KINDS else []
            self.drawn.update(drawn)
            self.kinds = (SpecConfig(), *(DRAFTING[i] for i in drawn))
        spec = rng.choice(self.kinds)
        params = predicting(spec, replace(params, tenant=rng.choice(("", "a", "b"))), SHARED[0])
        num_draft, rule = rng.choice(("auto", 1, 3, 5)), rng.choice(RULES)
        if spec.drafter is not None:
            spec = replace(spec, num_draft=num_draft, rule=rule if rule != "greedy" or params.greedy else "auto")
        prompt = self.prompt()
        try:
            for one in each_answer(params):
                state = self.engine.submit(prompt, one, spec)
                if state.request_id % 100 == 0:
                    self.sample[self.num_asked] = state
                self.num_asked += 1
        except InputError as error:
            self.refused[error.field] += 1

    def leave(self) -> None:
        """Somebody loses patience, wherever the request stands."""
        kind = self.rng.choice(("waiting", "reading", "decoding"))
        there = [state for state in self.engine.states.values() if self.place(state) == kind]
        if there:
            self.engine.abort(self.rng.choice(there).request_id)
            self.aborted[kind] += 1

    def place(self, state: RequestState) -> str:
        """How far a request has come."""
        if state.provenance:
            return "decoding"
        return "reading" if state.request_id in self.engine.scheduler.running else "waiting"


def run(crowd: Crowd, num_requests: int) -> Iterator[int]:
    """Bursts and pauses; the number of each step."""
    engine, rng, step = crowd.engine, crowd.rng, 0
    while crowd.num_asked < num_requests or engine.has_work:
        if crowd.num_asked < num_requests and len(engine.states) < MAX_LIVE and rng.random() < 0.6:
            for _ in range(rng.choice((1, 2, 4, 12))):
                crowd.arrive()
        if rng.random() < 0.15:
            crowd.leave()
        engine.step()
        step += 1
        yield step


def check_blocks(engine: Engine, models: list[PagedModel]) -> None:
    """The target's cache and every draft's: free + used = total, all of it held by requests that are there."""
    for model in models:
        model.check()
        assert model.num_free_tokens() + model.allocator.num_used * BLOCK == model.capacity_tokens
        assert set(model.tables) <= set(engine.states)


def reachable(root: object) -> list[object]:
    """All that the engine's objects lead to, without tensors, modules and classes."""
    seen, found, waiting = {id(root)}, [], deque([root])
    while waiting:
        thing = waiting.popleft()
        found.append(thing)
        if isinstance(thing, dict):
            more = [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            more = list(thing)
        elif type(thing).__module__.startswith("foretoken") and not isinstance(thing, torch.nn.Module):
            more = [
                *getattr(thing, "__dict__", {}).values(),
                *(getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())),
            ]
        else:
            continue
        for one in more:
            if id(one) not in seen and not isinstance(one, str | bytes | float | torch.Tensor | type | None):
                seen.add(id(one))
                waiting.append(one)
    return found


def check_nothing_kept(engine: Engine) -> None:
    """No number of a request and no state is left anywhere, whatever it would be called."""
    found = reachable(engine)
    assert not [thing for thing in found if isinstance(thing, int) and FIRST_ID <= thing < FIRST_ID + MAX_IDS]
    assert not [thing for thing in found if isinstance(thing, RequestState)]


@pytest.mark.repeated
def test_a_thousand_requests(folders: dict[str, Path], tmp_path: Path) -> None:
    check_many_requests(folders, tmp_path, NUM_REQUESTS)


def check_many_requests(folders: dict[str, Path], tmp_path: Path, num_requests: int) -> None:
    """Blocks, leftovers and answers of `num_requests` requests that come, wait, leave and end in every way."""
    engine = engine_of(folders)
    with contextlib.closing(Trace(tmp_path / "trace.jsonl")) as trace:
        engine.watchers.append(trace)
        _check_crowd(engine, folders, num_requests)


def _check_crowd(engine: Engine, folders: dict[str, Path], num_requests: int) -> None:
    crowd = Crowd(engine, random.Random(7))
    models = [thing for thing in reachable(engine) if isinstance(thing, PagedModel)]
    assert len(models) == 8
    for step in run(crowd, num_requests):
        if step % 20 == 0:
            check_blocks(engine, models)
    check_blocks(engine, models)
    check_idle(engine)
    check_nothing_kept(engine)
    assert set(crowd.refused) <= {"rule"}, "rules that judge chains of one kind only"
    assert min(crowd.aborted[kind] for kind in ("waiting", "reading", "decoding")) > num_requests // 500
    assert len(crowd.drawn) == len(DRAFTING), "every kind of drafting comes"
    compare_with_alone(crowd, folders)


def compare_with_alone(crowd: Crowd, folders: dict[str, Path]) -> None:
    """Greedy and coupled answers are those of the same request alone, undrafted; an aborted one is the beginning of
    it.
    """
    alone, num_compared = engine_of(folders), 0
    for state in crowd.sample.values():
        request = state.request
        if state.rule not in ("greedy", "coupled") and not request.params.greedy:
            continue
        other = alone.submit(
            request.prompt_ids, replace(request.params, seed=request.seed, prediction=None), SpecConfig()
        )
        while alone.has_work:
            alone.step()
        assert state.output_ids == other.output_ids[: len(state.output_ids)]
        assert state.finish_reason == "abort" or state.output_ids == other.output_ids
        num_compared += 1
    assert num_compared > crowd.num_asked // 400
