"""A drafter that is wrong costs its draft tokens and nothing else: E5 (nonsense), C11 (ids and parents), H3 (what it
raises, and when).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import LLM, ConfigError, InputError, SamplingParams, SpecConfig, add_drafter, registry
from foretoken.control.config import PolicyConfig
from foretoken.control.policy import BudgetPolicy
from foretoken.core import Batch, BatchEntry, Draft, Mass, Probes, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.boundary import check_tree, draft_faults
from foretoken.draft.failures import MAX_FAILURES
from foretoken.draft.group import drafter_key
from foretoken.draft.lookup_tree import LookupTree
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.drafters import DEFAULT_LIMIT_S, limit_of
from foretoken.errors import DraftError, DrafterWarning
from tests.helpers import audit
from tests.helpers.checkpoints import token_ids

V = 8
NAN, INF = float("nan"), float("inf")
PROMPTS = [token_ids(6, seed=i) * 3 for i in range(4)]
LONG = SamplingParams(max_tokens=16, ignore_eos=True)


def entries(*num_draft: int, takes_trees: bool = True, num_probe: int = 0) -> list[BatchEntry]:
    return [
        BatchEntry(
            Request(i, (1,), LONG, SpecConfig(), 0),
            0,
            (1,),
            True,
            n,
            takes_trees=takes_trees,
            num_probe=num_probe,
            probe_depth=2,
        )
        for i, n in enumerate(num_draft)
    ]


def point(tokens: Sequence[int], parents: Sequence[int] | None = None, lengths: Sequence[int] | None = None) -> Draft:
    """A draft of deterministic tokens; one request, or `lengths` of several."""
    lengths = [len(tokens)] if lengths is None else lengths
    offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    parents = [place - 1 for n in lengths for place in range(n)] if parents is None else parents
    return Draft(torch.tensor(tokens, dtype=torch.int64), tuple(parents), tuple(offsets), ("x",) * len(lengths))


def drawn(distribution: Sequence[float], token: int = 2, rows: Sequence[int] = (0, -1)) -> Draft:
    """One draft token, drawn from `distribution`."""
    return replace(point([token]), sampled=(True,), mass=Mass(torch.tensor([distribution]), tuple(rows)))


def unchecked(draft: Draft, **fields: object) -> Draft:
    """The draft with other fields, as `python -O` makes it: without a look at how they fit each other."""
    draft.__dict__.update(fields)
    return draft


FAIR = [1 / V] * V
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no draft": (lambda: [1, 2], "not a Draft"),
    "nothing": (lambda: None, "not a Draft"),
    "two segments": (lambda: point([1, 2], lengths=[1, 1]), "2 segments"),
    "floats": (lambda: replace(point([1]), tokens=torch.tensor([1.0])), "float32"),
    "a matrix": (lambda: replace(point([1]), tokens=torch.tensor([[1]])), "shape"),
    "id V": (lambda: point([V]), f"token id {V} outside"),
    "id -1": (lambda: point([1, -1]), "token id -1 outside"),
    "more than granted": (lambda: point([1, 2, 3, 4, 5]), "5 tokens where at most 4"),
    "a parent behind its child": (lambda: point([1, 2], [1, -1]), "parent"),
    "its own parent": (lambda: point([1], [0]), "parent"),
    "parent -2": (lambda: point([1, 2], [-2, 0]), "parent"),
    "a parent far away": (lambda: point([1, 2], [-1, 7]), "parent"),
    "parents that are floats": (lambda: replace(point([1]), parents=(-1.0,)), "of type float"),
    "parents that are numbers of numpy": (lambda: replace(point([1]), parents=(np.int64(-1),)), "of type int64"),
    "no names": (lambda: unchecked(point([1]), drafters=()), "0 drafters for 1 requests"),
    "more parents than tokens": (lambda: unchecked(point([1]), parents=(-1, 0)), "2 parents and 1 tokens"),
    "twins": (lambda: point([3, 3], [-1, -1]), "twice"),
    "zero at the drawn token": (lambda: drawn([0.5, 0.5] + [0.0] * 6), "with mass 0"),
    "NaN": (lambda: drawn([NAN, *FAIR[1:]]), "not finite"),
    "NaN at the drawn token": (lambda: drawn([*FAIR[:2], NAN, *FAIR[3:]]), "not finite"),
    "infinite": (lambda: drawn([INF, *FAIR[1:]]), "not finite"),
    "both infinities": (lambda: drawn([INF, -INF, *FAIR[2:]]), "not finite"),
    "negative": (lambda: drawn([-0.5, 0.5, 0.5] + [0.0] * 5), "negative"),
    "more than 1": (lambda: drawn([0.2] * V), "more than 1"),
    "too narrow": (lambda: drawn([1 / 4] * 4), "shape"),
    "too wide": (lambda: drawn([1 / 9] * 9), "shape"),
    "half precision": (
        lambda: replace(point([2]), sampled=(True,), mass=Mass(torch.tensor([FAIR]).half(), (0, -1))),
        "float16",
    ),
    "no distribution": (lambda: drawn(FAIR, rows=(-1, -1)), "without its distribution"),
    "a distribution that is not there": (lambda: drawn(FAIR, rows=(1, -1)), "distribution_of_row"),
    "distribution -2": (lambda: drawn(FAIR, rows=(-2, -1)), "distribution_of_row"),
    "too few rows": (lambda: drawn(FAIR, rows=(0,)), "distribution_of_row"),
    "drawn outside": (lambda: drawn(FAIR, token=V), f"token id {V}"),
    "drawn, and a parent far away": (lambda: replace(drawn(FAIR), parents=(-9,)), "."),
    "probes beyond the grant": (
        lambda: replace(point([1]), probes=Probes(torch.tensor([1, 2, 3]), (-1, 0, 0), (0, 3))),
        "probes: 3 tokens",
    ),
    "probe id V": (lambda: replace(point([1]), probes=Probes(torch.tensor([V]), (-1,), (0, 1))), "probes: token id"),
}


def complaint(draft: object, *num_draft: int, **options: Any) -> str | None:
    """What the boundary says of a draft for one request."""
    try:
        faults = draft_faults(draft, entries(*(num_draft or (4,)), **({"num_probe": 2} | options)), V)
    except DraftError as error:
        return str(error)
    return "; ".join(faults.values()) or None


@pytest.mark.parametrize("name", WRONG)
def test_e5_what_cannot_be_verified_is_seen(name: str) -> None:
    make, words = WRONG[name]
    found = complaint(make())
    assert found is not None
    assert words == "." or words in found


def test_sound_drafts_pass() -> None:
    nothing = Draft(torch.empty(0, dtype=torch.int64), (), (0, 0), (None,))
    tree = point([1, 1, 2, 3], [-1, 0, 0, -1])
    deficit = drawn([0.3 * share for share in FAIR])
    came_to_nothing = replace(nothing, mass=Mass(torch.tensor([FAIR]), (0,)))
    below_rounding = drawn([1 / V * (1 + 5e-5)] * V)
    probes = replace(point([1]), probes=Probes(torch.tensor([1, 1]), (-1, -1), (0, 2)))
    for draft in (nothing, point([0, V - 1]), tree, drawn(FAIR), deficit, came_to_nothing, below_rounding, probes):
        assert complaint(draft) is None
    assert complaint(tree, takes_trees=False) is not None
    assert complaint(point([1, 2, 3, 4]), takes_trees=False) is None
    spare = replace(point([1]), mass=Mass(torch.tensor([FAIR]), (0, -1)))  # another token might have been sampled
    assert complaint(spare) is None
    assert str(complaint(spare, takes_trees=False)).startswith("a distribution beside a token that was not sampled")
    assert complaint(drawn(FAIR), takes_trees=False) is None
    deep = replace(point([1]), probes=Probes(torch.tensor([1, 1, 1]), (-1, 0, 1), (0, 3)))
    assert complaint(deep, num_probe=3) == "probes: deeper than 2"
    assert complaint(Draft(torch.tensor([1]), (-1,), (0, 2, 1), ("x", "x")), 4, 4) == "offsets that decrease"


def test_only_the_request_concerned_loses_its_draft_tokens() -> None:
    draft = replace(
        point([1, V, 3], lengths=[1, 1, 1]),
        sampled=(True, False, True),
        mass=Mass(torch.tensor([FAIR, [0.5] * V]), (0, -1, -1, -1, 1, -1)),
    )
    faults = draft_faults(draft, entries(1, 1, 1), V)
    assert set(faults) == {1, 2}
    assert "token id" in faults[1]
    assert "more than 1" in faults[2]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([1, 2], "LookupTree"),
        (LookupTree((1,), (-1,), ()), "one tree"),
        (LookupTree((1, 2), (-1,), (1.0, 1.0)), "one tree"),
        (LookupTree((V,), (-1,), (1.0,)), "token id"),
        (LookupTree((1, 2), (-1, 1), (1.0, 1.0)), "parent"),
        (LookupTree((1,) * 5, (-1, 0, 1, 2, 3), (1.0,) * 5), "5 tokens"),
        (LookupTree((1,), (-1,), (0.0,)), "a probability"),
        (LookupTree((1,), (-1,), (NAN,)), "a probability"),
        (LookupTree((1,), (-1,), (1.5,)), "a probability"),
    ],
)
def test_e5_drafts_that_are_shown_are_checked_too(tree: object, words: str) -> None:
    with pytest.raises(DraftError, match=words):
        check_tree(tree, 4, V, True)
    assert check_tree(LookupTree((1, 2), (-1, 0), (1.0, 0.5)), 4, V, True).tokens == (1, 2)


# ---- through the engine


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> Iterator[None]:
    """A registry that forgets what was added, and an engine that forgets its drafters."""
    monkeypatch.setattr(registry, "ADDED", {})
    yield
    for key in [key for key in llm._drafters.drafters if "bad" in str(key)]:
        del llm._drafters.drafters[key]
        llm._drafters.failures.deadlines.pop(key, None)
        llm._drafters.failures._warned.discard(key)


# Budgets are chosen in every round: deciding is never too slow for steps that take less than a millisecond.
EVERY_ROUND = PolicyConfig(slack_share=1000.0, decision_share=1000.0)


class Faulty(NgramDrafter):
    """Like `ngram`, and at one of its calls, from the `first` on, something goes wrong."""

    name = "bad"

    def __init__(self, at: str, fault: Callable[[], Any], first: int = 0) -> None:
        super().__init__()
        self.at, self.fault, self.first, self.num_calls = at, fault, first, 0

    def _at(self, place: str) -> Any:
        if place == self.at:
            self.num_calls += 1
            if self.num_calls > self.first:
                return self.fault()
        return None

    def start(self, request: Request) -> None:
        self._at("start")
        super().start(request)

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        wrong = self._at("look_up")
        return super().look_up(entry, ahead) if wrong is None else wrong

    def propose(self, batch: Batch) -> Draft:
        wrong = self._at("propose")
        return super().propose(batch) if wrong is None else wrong(batch)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        self._at("commit")
        super().commit(batch, draft, verdict, feedback)

    def finish(self, request_id: int) -> None:
        super().finish(request_id)
        self._at("finish")

    def release(self, request_id: int) -> None:
        self._at("release")


audit.KEPT_BY_DRAFTER[Faulty] = lambda drafter: drafter._indexes


def boom() -> None:
    raise ZeroDivisionError("[bold]boom[/]")


def outside(batch: Batch) -> Draft:
    """Every draft token is an id that the model does not have."""
    lengths = [entry.num_draft for entry in batch.decoding]
    draft = point([10**6] * sum(lengths), lengths=lengths)
    return replace(draft, drafters=tuple("bad" if n else None for n in lengths))


def generate(
    llm: LLM, drafter: Faulty, num_draft: int | str = 3, limit_s: float = DEFAULT_LIMIT_S, params: SamplingParams = LONG
) -> list[Any]:
    """Answers of four requests, the first and the third with the bad drafter, the second with an n-gram, the last
    plain.
    """
    add_drafter("bad", lambda factory, spec: drafter, limit_s)
    bad = SpecConfig("bad", num_draft=num_draft)  # type: ignore[arg-type]
    return llm.generate(PROMPTS, params, [bad, SpecConfig("ngram", num_draft=3), bad, SpecConfig()])


@pytest.mark.parametrize("params", [LONG, SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=5)])
@pytest.mark.parametrize("at", ["start", "propose", "look_up", "commit", "finish"])
def test_h3_what_a_drafter_raises_costs_its_draft_tokens(
    llm: LLM,
    registered: None,
    failed_drafters: list[str],
    at: str,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm.engine.chooser, "policy", BudgetPolicy(EVERY_ROUND))
    plain = [out.token_ids for out in llm.generate(PROMPTS, params)]
    num_draft = "auto" if at == "look_up" else 3  # drafts are shown where the number is open
    with pytest.warns(DrafterWarning, match="'bad' failed"):
        outs = generate(llm, Faulty(at, boom), num_draft, params=params)
    assert [out.token_ids for out in outs] == plain
    assert [out.finish_reason for out in outs] == ["length"] * 4
    for out in outs[::2]:
        num_failures = out.stats.draft_failures["bad"]
        if at == "look_up":  # how often the engine looks hangs on times
            assert 1 <= num_failures <= MAX_FAILURES
        else:
            assert num_failures == (1 if at in ("start", "commit", "finish") else MAX_FAILURES)
        is_off = at in ("start", "commit") or num_failures == MAX_FAILURES
        assert out.stats.disabled_drafters == ({"bad": "ZeroDivisionError: [bold]boom[/]"} if is_off else {})
        assert out.stats.as_dict()["draft_failures"] == {"bad": num_failures}
    for out in outs[1::2]:
        assert out.stats.draft_failures == {}
    assert llm.stats.draft_failures["bad"] >= 2
    audit.check_idle(llm)


@pytest.mark.parametrize("name", [name for name in WRONG if "probe" not in name and "segments" not in name])
def test_c11_nonsense_costs_its_draft_tokens(llm: LLM, registered: None, failed_drafters: list[str], name: str) -> None:
    plain = [out.token_ids for out in llm.generate(PROMPTS, LONG)]
    with pytest.warns(DrafterWarning, match="'bad' failed"):
        outs = generate(llm, Faulty("propose", lambda: lambda batch: WRONG[name][0]()))
    assert [out.token_ids for out in outs] == plain
    assert outs[0].stats.disabled_drafters.keys() == {"bad"}
    audit.check_idle(llm)


def test_c11_the_drafter_is_named(llm: LLM, registered: None, failed_drafters: list[str]) -> None:
    with pytest.warns(DrafterWarning, match=r"drafter 'bad' failed \(token id 1000000 outside the vocabulary"):
        outs = generate(llm, Faulty("propose", lambda: outside))
    assert "token id 1000000 outside" in outs[0].stats.disabled_drafters["bad"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "returned NoneType without start, propose, finish, commit"),
        (Faulty, "returned the class Faulty: return an object"),
        (SimpleNamespace(name="bad", start=boom, propose=boom, finish=boom), "SimpleNamespace without commit:"),
        (SimpleNamespace(start=boom, propose=boom, finish=boom, commit=boom), "with a name"),
    ],
    ids=["nothing", "a class", "no commit", "no name"],
)
def test_what_is_no_drafter_is_refused_when_it_is_made(llm: LLM, registered: None, made: object, said: str) -> None:
    """It failed the request when that was started, or when a failure of it was to be named."""
    add_drafter("bad", lambda factory, spec: made)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=said):
        llm.generate(PROMPTS, LONG, SpecConfig("bad", num_draft=3))
    audit.check_idle(llm)


def test_a_chance_fault_costs_a_round(llm: LLM, registered: None, failed_drafters: list[str]) -> None:
    """Two failures, then the drafter does as before, and is still asked."""
    plain = [out.token_ids for out in llm.generate(PROMPTS, LONG)]

    class Twice(Faulty):
        def propose(self, batch: Batch) -> Draft:
            self.num_calls += 1
            lengths = [entry.num_draft for entry in batch.decoding]
            sound = replace(point([1] * sum(lengths), lengths=lengths), drafters=("bad",) * len(lengths))
            return outside(batch) if self.num_calls <= MAX_FAILURES - 1 else sound

    audit.KEPT_BY_DRAFTER[Twice] = lambda drafter: drafter._indexes
    with pytest.warns(DrafterWarning):
        outs = generate(llm, Twice("", boom))
    assert [out.token_ids for out in outs] == plain
    assert outs[0].stats.draft_failures == {"bad": MAX_FAILURES - 1}
    assert outs[0].stats.disabled_drafters == {}
    assert outs[0].stats.num_drafted > 0


def test_other_arms_go_on(llm: LLM, registered: None, failed_drafters: list[str]) -> None:
    """Where several may draft, the one that fails is not chosen any more."""
    plain = [out.token_ids for out in llm.generate(PROMPTS, LONG)]
    drafter = Faulty("start", boom)
    add_drafter("bad", lambda factory, spec: drafter)
    spec = SpecConfig("auto", parts=("bad", "ngram"))
    with pytest.warns(DrafterWarning):
        outs = llm.generate(PROMPTS, LONG, spec)
    assert [out.token_ids for out in outs] == plain
    assert all(out.stats.disabled_drafters.keys() == {"bad"} for out in outs)


@pytest.mark.parametrize("at", ["propose", "commit", "start"])
def test_h3_a_drafter_that_hangs_is_interrupted(
    llm: LLM, registered: None, failed_drafters: list[str], at: str
) -> None:
    plain = [out.token_ids for out in llm.generate(PROMPTS, LONG)]

    def hang() -> None:
        while True:
            time.sleep(0.001)

    with pytest.warns(DrafterWarning, match="DraftTimeout"):
        outs = generate(llm, Faulty(at, hang), limit_s=0.05)
    assert [out.token_ids for out in outs] == plain
    assert outs[0].stats.disabled_drafters.keys() == {"bad"}


def test_the_limit_is_that_of_what_is_not_our_own(registered: None) -> None:
    assert limit_of(SpecConfig("ngram")) is None
    assert limit_of(SpecConfig()) is None
    add_drafter("bad", lambda factory, spec: NgramDrafter(), 2.5)
    assert limit_of(SpecConfig("bad")) == 2.5
    assert limit_of(SpecConfig("mix", parts=("ngram", "bad"))) == 2.5
    for value in (0, -1, NAN, INF, "1", True, None):
        with pytest.raises(InputError, match="limit_s"):
            add_drafter("bad", lambda factory, spec: NgramDrafter(), value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name"):
        add_drafter("ngram", lambda factory, spec: NgramDrafter())


def test_an_interrupt_is_no_failure(llm: LLM, registered: None) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(llm, Faulty("propose", interrupt))
    audit.check_idle(llm)
    assert drafter_key(SpecConfig("bad")) is not None


def test_a_shared_engine_of_scripted_parts_is_checked_once(pair: SimpleNamespace) -> None:
    """What is shown and then drafted passes the boundary without being changed."""
    with LLM(pair.target, dtype="float32", cache_tokens=1024, spec=SpecConfig("ngram")) as llm:
        llm.engine.chooser.policy = BudgetPolicy(EVERY_ROUND)
        outs = llm.generate(PROMPTS, LONG)
        assert sum(out.stats.num_drafted for out in outs) > 0
        assert llm.stats.draft_failures == {}
