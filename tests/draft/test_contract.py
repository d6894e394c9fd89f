"""What every drafter owes the engine. A new drafter joins with one line in `CASES`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import DRAFT_DTYPES, DRAFTERS
from foretoken.core import Batch, BatchEntry, Request
from foretoken.draft.base import HiddenRows
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.lookahead import LookaheadDrafter
from foretoken.draft.recycling import RecyclingDrafter
from foretoken.engine.engine import Engine
from foretoken.model.interface import Segment
from foretoken.registry import HEADS, MTP
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.mtp_checkpoints import add_mtp
from tests.helpers.scripted import ScriptedModel, recite
from tests.helpers.specs import bare_drafter, predicting, spec_of
from tests.helpers.usual import some_of
from tests.helpers.watch import Watched, WatchedReader

LOW_BIT = ("draft_model:int8", "draft_model:int4")
MODEL_TREES = ("draft_model/static", "draft_model/best_first")
HEAD_TREES = ("eagle/best_first", "medusa:hydra/static", "block:cut/best_first")
CASES = (
    "draft_model",
    *LOW_BIT,
    *MODEL_TREES,
    "ngram",
    "suffix",
    "recycling",
    "predicted",
    "early_exit",
    "early_exit:adapter",
    "eagle",
    "eagle:1",
    *HEAD_TREES,
    "medusa",
    "block",
    "mtp",
    "mtp/best_first",
    "lookahead",
    "cascade",
    "mix",
)
HEAD_CASES = tuple(case for case in CASES if re.split("[:/]", case)[0] in (*HEADS, MTP))
LEARNING = ("suffix", "recycling", "lookahead", "mix")  # from the answers to other requests
TREES = (*MODEL_TREES, *HEAD_TREES, "mtp/best_first", "ngram", "suffix", "recycling", "lookahead", "mix")


NUM_TOKENS = 24
# Of every length from one token on, some with repeats, so that a lookup finds something.
PROMPTS = [token_ids(1 + i, seed=i) if i % 2 == 0 else token_ids(1 + i // 2, seed=i) * 3 for i in range(16)]
LONG = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
Outputs = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def pair(mtp_pair: SimpleNamespace) -> SimpleNamespace:
    return mtp_pair


@pytest.fixture(scope="module")
def llm(mtp_llm: LLM) -> LLM:
    return mtp_llm


# To an engine these are others of their kind in other numbers.
REPEATED = ("draft_model:int4", "eagle:1", "mtp/best_first")


@pytest.fixture(params=some_of(CASES, set(CASES) - set(REPEATED)))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def spec(name: str, pair: SimpleNamespace, request: pytest.FixtureRequest) -> functools.partial[SpecConfig]:
    """`SpecConfig` of the drafter; `num_draft` is left to the test. What is predicted stands in one of the plain
    answers.
    """
    return functools.partial(spec_of, name, pair.draft)


@pytest.fixture
def watched(llm: LLM, spec: functools.partial[SpecConfig], monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The drafter of the shared engine, watched."""
    return watch(llm, spec(), monkeypatch)


def watch(llm: LLM, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch) -> Watched:
    llm.prepare(spec)
    key = drafter_key(spec)
    assert key is not None
    watched = Watched(llm._drafters.drafters[key], llm.target.vocab_size)
    monkeypatch.setitem(llm._drafters.drafters, key, watched)
    return watched


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Outputs:
    """Plain greedy answers, one prompt at a time."""
    return [llm.generate([prompt], LONG)[0].token_ids for prompt in PROMPTS]


def test_every_drafter_is_in_the_suite() -> None:
    choices = {"auto"}  # among other drafters, each of which is here
    assert {re.split("[:/]", case)[0] for case in CASES} == set(DRAFTERS) - choices


# Every number of draft tokens, and other sizes of batch: proof/test_contract.py.
@pytest.mark.parametrize(("num_draft", "batch"), [(8, 16)])
def test_greedy_equals_plain(
    llm: LLM,
    pair: SimpleNamespace,
    watched: Watched,
    spec: functools.partial[SpecConfig],
    plain: Outputs,
    num_draft: int,
    batch: int,
) -> None:
    """In batches mixed with plain requests, the other drafters, and other numbers of draft tokens."""
    others = [SpecConfig(), *(spec_of(other, pair.draft, num_draft=3) for other in CASES)]
    for start in range(0, len(PROMPTS) if batch > 1 else 3, batch):
        chosen = range(start, start + batch)
        specs = [
            spec(num_draft=num_draft) if i % 2 == 0 or batch == 1 else others[i // 2 % len(others)]
            for i in range(batch)
        ]
        params = [predicting(one, LONG, plain[4 if i % 2 == 0 else 2]) for i, one in enumerate(specs)]
        outputs = llm.generate([PROMPTS[i] for i in chosen], params, specs)
        assert [out.token_ids for out in outputs] == [plain[i] for i in chosen]
        assert all(
            out.stats.num_drafted <= num_draft * out.stats.num_steps
            for out, one in zip(outputs, specs, strict=True)
            if one == spec()
        )
    if num_draft == 0:
        assert all(out.stats.num_drafted == 0 for out in outputs[::2])
    elif batch == 16:
        assert watched.num_drafted > 0  # the test means something


# A chain is a chain under any rule, so that who drafts chains alone is asked once; "rejection": proof/test_contract.py.
@pytest.mark.parametrize(
    ("name", "rule"),
    some_of(
        [*((name, "auto") for name in CASES), *((name, "block") for name in CASES if name in TREES)],
        {
            *((name, "auto") for name in CASES),
            *((name, "block") for name in ("draft_model/best_first", "ngram", "eagle/best_first", "lookahead", "mix")),
        },
    ),
)
def test_trees_where_the_rule_takes_them_and_chains_elsewhere(
    llm: LLM, watched: Watched, spec: functools.partial[SpecConfig], name: str, plain: Outputs, rule: str
) -> None:
    """Two turns where a store or a matrix learns from the first; that no chain rule is handed a tree is checked by
    `Watched`.
    """
    for _ in range(2 if name in LEARNING else 1):
        params = replace(predicting(spec(), LONG, plain[4]), tenant=f"trees {rule}")
        outputs = llm.generate(PROMPTS, params, spec(num_draft=6, rule=rule))
        assert [out.token_ids for out in outputs] == plain
    assert (watched.num_trees > 0) == (rule == "auto" and name in TREES)
    assert sum(out.stats.num_accepted for out in outputs) > 0


def test_sampled_drafts_keep_the_contract(
    llm: LLM, watched: Watched, spec: functools.partial[SpecConfig], plain: Outputs
) -> None:
    check_sampled_drafts(llm, watched, spec, plain, 1.0)  # another temperature: proof/test_contract.py


def check_sampled_drafts(
    llm: LLM, watched: Watched, spec: functools.partial[SpecConfig], plain: Outputs, temperature: float
) -> None:
    """The distributions sum to one, drawn tokens lie in their support, the drafter's state follows the text: checked by
    `Watched`.
    """
    params = [
        SamplingParams(
            max_tokens=20, temperature=temperature, top_k=(0, 5)[i % 2], top_p=(1.0, 0.9)[i // 2 % 2], seed=i
        )
        for i in range(16)
    ]
    params[3] = SamplingParams(max_tokens=20)  # one greedy request among them
    outputs = llm.generate(PROMPTS, [predicting(spec(), one, plain[4]) for one in params], spec(num_draft=4))
    assert watched.num_drafted > 0
    assert all(len(out.token_ids) <= 20 for out in outputs)


@pytest.mark.parametrize("dtype", DRAFT_DTYPES)
def test_laws_of_a_draft_model_are_whole(
    llm: LLM, pair: SimpleNamespace, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=3, draft_dtype=dtype)
    watched, sums = watch(llm, spec, monkeypatch), []
    original = watched.inner.propose

    def record(batch: Batch) -> object:
        draft = original(batch)
        if draft.mass is not None:
            sums.append(draft.mass.distributions.double().sum(-1))
        return draft

    monkeypatch.setattr(watched.inner, "propose", record)
    llm.generate(PROMPTS[:4], SamplingParams(max_tokens=10, temperature=0.8), spec)
    torch.testing.assert_close(
        torch.cat(sums), torch.ones(len(torch.cat(sums)), dtype=torch.float64), atol=1e-5, rtol=0
    )


def test_eos_anywhere(
    llm: LLM, watched: Watched, spec: functools.partial[SpecConfig], plain: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any token may be the end, another one for each request: the answer is the plain one, cut right after it."""
    params = predicting(spec(), SamplingParams(max_tokens=NUM_TOKENS), plain[4])
    for place in (2, 5, 9, 14):
        states = {}
        for i in range(0, 16, 2):
            monkeypatch.setattr(llm.engine.admission, "eos_token_ids", frozenset({plain[i][place]}))
            states[i] = llm.submit(PROMPTS[i], params, spec(num_draft=6))
        run(llm.engine)
        for i, state in states.items():
            assert tuple(state.output_ids) == plain[i][: plain[i].index(plain[i][place]) + 1]
            assert state.finish_reason == "stop"


@pytest.mark.parametrize("name", [case for case in CASES if case not in HEAD_CASES])
def test_eos_inside_an_accepted_run(name: str) -> None:
    """The target recites a text that the prompt holds already, so that every drafter drafts all of it, the end
    included. It has no hidden states: heads are in tests/draft/test_trained_heads.py.
    """
    text = list(range(1, 21))
    prompt = [*text, 1, 2]
    said = recite(text[2:], len(prompt))
    cut_runs = 0
    for eos in text[2:]:
        spec = spec_of(name, "d", num_draft=6)
        target = ScriptedModel(said, 30, [eos])
        drafters = DrafterGroup(target)
        drafters.drafters[drafter_key(spec)] = Watched(
            bare_drafter(name, target if name.startswith("early_exit") else ScriptedModel(said, 30), 30), 30
        )
        engine = Engine(target, drafters)
        if name == "recycling":  # its matrix knows the text once it was said
            engine.submit(prompt, SamplingParams(max_tokens=len(text) - 2, ignore_eos=True), spec)
            run(engine)
        state = engine.submit(prompt, predicting(spec, SamplingParams(max_tokens=50), text[2:]), spec)
        run(engine)
        assert state.output_ids == list(range(3, eos + 1))
        assert state.finish_reason == "stop"
        assert state.stats.num_emitted == len(state.output_ids) == len(state.provenance)
        assert state.stats.num_accepted == sum(origin.kind == "accepted" for origin in state.provenance)
        cut_runs += state.provenance[-1].kind == "accepted"  # a whole round ends with a token of the target's own
    assert cut_runs > 5  # the test means something


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


SMALL = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A target of 24 positions, a `draft` of 17, and plain answers that end with the context."""
    folder = tmp_path_factory.mktemp("small")
    target = tiny_checkpoint(folder / "target", "llama", num_hidden_layers=2, max_position_embeddings=24)
    add_mtp(target)
    draft = tiny_checkpoint(folder / "draft", "llama", num_hidden_layers=1, max_position_embeddings=17)
    prompts = [token_ids(n, seed=n) * r for n, r in ((1, 1), (3, 4), (16, 1), (11, 2), (23, 1))]
    with LLM(target, cache_tokens=1024) as llm:
        yield SimpleNamespace(llm=llm, draft=draft, prompts=prompts, answers=llm.generate(prompts, SMALL))


def test_context_end(name: str, small: SimpleNamespace) -> None:
    """Up to the last position, with a draft whose own context ends before the target's."""
    for num_draft in (1, 8):
        spec = spec_of(name, small.draft, num_draft=num_draft)
        params = predicting(spec, SMALL, small.answers[1].token_ids)
        got = small.llm.generate(small.prompts, params, spec)
        assert [out.token_ids for out in got] == [out.token_ids for out in small.answers]
        assert all(out.finish_reason == "length" and len(out.prompt_ids) + len(out.token_ids) == 24 for out in got)
    check_idle(small.llm)


def test_finish_and_abort_leave_nothing(
    llm: LLM, watched: Watched, spec: functools.partial[SpecConfig], plain: Outputs
) -> None:
    """Abort after 0, 1, 2, ... steps, alone and while a neighbour goes on."""
    params = predicting(spec(), LONG, plain[4])
    for num_steps in range(6):
        states = [llm.submit(prompt, params, spec(num_draft=4)) for prompt in PROMPTS[4:7]]
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort(states[1].request_id)
        assert states[1].request_id not in watched.texts
        llm.engine.step()
        for state in states:
            llm.engine.abort(state.request_id)
        assert not watched.texts
    llm.generate(PROMPTS[:3], params, spec(num_draft=4))
    assert not watched.texts  # the fixture `conserved` looks at the drafter's own state


def entry(request_id: int, prompt: list[int], num_draft: int, params: SamplingParams, spec: SpecConfig) -> BatchEntry:
    request = Request(request_id, tuple(prompt), params, spec, request_id, (5, 6, 7, 8))
    return BatchEntry(request, len(prompt) - 1, (prompt[-1],), True, num_draft)


def states_of(llm: LLM, request_id: int, prompt: list[int], layers: Sequence[int]) -> HiddenRows:
    """The target's states of a prompt without its last token."""
    count = len(prompt) - 1
    llm.target.open(request_id)
    segment = Segment(request_id, count, (), 0, num_taps=count)
    states = llm.target.forward(torch.tensor(prompt[:-1]), [segment], layers).taps
    llm.target.close(request_id)
    return HiddenRows(request_id, 0, tuple(prompt[:-1]), prompt[-1], states)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_propose_gives_each_request_its_own_number(
    llm: LLM, watched: Watched, spec: functools.partial[SpecConfig], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero included, in one call; a request that is not asked this time keeps its state.

    The text repeats, so that every drafter uses all it may.
    """
    params = SamplingParams(temperature=temperature)
    prompt = [5, 6, 7, 8] * 4
    if isinstance(watched.inner, RecyclingDrafter):
        watched.inner.successors[[5, 6, 7, 8], 0] = [6, 7, 8, 5]
    entries = [entry(100 + i, prompt, i % 4, params, spec(num_draft=3)) for i in range(7)]
    for one in entries:
        watched.start(one.request)
        if isinstance(watched.inner, EarlyExitDrafter):  # drafts in the target's cache
            llm.target.open(one.request.request_id)
            llm.target.forward(torch.tensor(prompt[:-1]), [Segment(one.request.request_id, len(prompt) - 1, (), 0)])
            llm.target.commit(one.request.request_id, len(prompt) - 1)
        if isinstance(watched, WatchedReader) and watched.hidden_layers():
            watched.read_hidden([states_of(llm, one.request.request_id, prompt, watched.hidden_layers())])
        if isinstance(watched.inner, LookaheadDrafter):  # its pool knows two tokens at a time
            watched.inner._requests[one.request.request_id].pool.add(8, (9, 5))
    draft = watched.propose(Batch(tuple(entries)))
    assert draft.lengths == tuple(i % 4 for i in range(7))
    again = watched.propose(Batch(tuple(entries[4:5])))
    assert again.lengths == (0,)
    for one in entries:
        watched.finish(one.request.request_id)
        if isinstance(watched.inner, EarlyExitDrafter):
            llm.target.close(one.request.request_id)
