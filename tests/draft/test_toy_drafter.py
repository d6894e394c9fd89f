"""The drafter of docs/adding-a-drafter.md, taken out of the page, does what the page says and keeps the contract."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, ConfigError, InputError, SamplingParams, SpecConfig, add_drafter, config, registry
from foretoken.backend.drafting import parse_drafters
from foretoken.core import Batch, Draft, Mass
from foretoken.draft.base import Drafter
from foretoken.draft.group import drafter_key
from foretoken.draft.ngram import NgramDrafter
from tests.helpers import audit, distribution, watch
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.usual import some_of
from tests.helpers.watch import Watched

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-drafter.md"
PROMPTS = [token_ids(1 + i, seed=i) if i % 2 == 0 else token_ids(1 + i // 2, seed=i) * 3 for i in range(16)]
LONG = SamplingParams(max_tokens=24, ignore_eos=True)
RULES = ("rejection", "block", "tree", "traversal", "coupled")
NUM_REQUESTS = 1600


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that forgets afterwards what was added."""
    monkeypatch.setattr(registry, "ADDED", {})


@pytest.fixture
def toy(clean: None) -> Callable[[], Any]:
    """Makes the page's drafter, which is registered; its state is watched."""
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0], names)
    watch.STATE_CHECKS[names["BigramDrafter"]] = check_state
    audit.KEPT_BY_DRAFTER[names["BigramDrafter"]] = lambda drafter: drafter.followers
    return names["BigramDrafter"]


def check_state(drafter: Any, sequence: int, text: list[int], num_drafted: int, num_accepted: int) -> None:
    """It knows the whole text and nothing else."""
    assert drafter.followers[sequence] == dict(itertools.pairwise(text))


@pytest.fixture
def watched(llm: LLM, toy: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """The toy in the shared engine, where nothing of it is left afterwards."""
    watched = Watched(toy(), llm.target.vocab_size)
    add_drafter("bigram", lambda factory, spec: watched)
    yield watched
    assert not watched.texts
    assert not watched.inner.followers  # type: ignore[attr-defined]
    llm._drafters.drafters.pop(drafter_key(SpecConfig("bigram")), None)


@pytest.mark.parametrize("batch", some_of([1, 4, 16], {1, 16}))
def test_greedy_equals_plain_in_mixed_batches(llm: LLM, watched: Watched, pair: SimpleNamespace, batch: int) -> None:
    plain = [llm.generate([prompt], LONG)[0].token_ids for prompt in PROMPTS]
    others = [
        SpecConfig(),
        SpecConfig("ngram", num_draft=3),
        SpecConfig("draft_model", draft=str(pair.draft), num_draft=2),
    ]
    for num_draft in range(6):
        for start in range(0, 16 if batch > 1 else 3, batch):
            chosen = range(start, start + batch)
            specs = [SpecConfig("bigram", num_draft=num_draft) if i % 2 == 0 else others[i // 2 % 3] for i in chosen]
            outputs = llm.generate([PROMPTS[i] for i in chosen], LONG, specs)
            assert [out.token_ids for out in outputs] == [plain[i] for i in chosen]
    assert watched.num_drafted > 0


def test_ends_inside_a_draft_and_aborts(llm: LLM, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SpecConfig("bigram", num_draft=3)
    answer = llm.generate([PROMPTS[5]], LONG)[0].token_ids
    for place in (2, 9, 14):
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.admission, "eos_token_ids", frozenset({answer[place]}))
            out = llm.generate([PROMPTS[5]], SamplingParams(max_tokens=24), spec)[0]
        assert out.token_ids == answer[: answer.index(answer[place]) + 1]
    states = [llm.submit(prompt, LONG, spec) for prompt in PROMPTS[:3]]
    llm.engine.step()
    for state in states:
        llm.engine.abort(state.request_id)
    assert watched.num_drafted > 0


def test_context_end(toy: Callable[[], Any], tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2, max_position_embeddings=24)
    prompts = [token_ids(n, seed=n) * r for n, r in ((1, 1), (3, 4), (23, 1))]
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    with LLM(target, cache_tokens=1024) as small:
        expected = [out.token_ids for out in small.generate(prompts, params)]
        assert [out.token_ids for out in small.generate(prompts, params, SpecConfig("bigram", num_draft=8))] == expected
        audit.check_idle(small)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return distribution.narrow_models(tmp_path_factory.mktemp("narrow"))


def answers(narrow: SimpleNamespace, drafter: Drafter, rules: tuple[str, ...]) -> Any:
    """Sampled answers of requests that all go to `drafter`, under the rules in turn."""
    params = SamplingParams(max_tokens=distribution.LENGTH + 3, temperature=1.0, ignore_eos=True)
    specs = [SpecConfig("bigram", num_draft=1 + i % 4, rule=rules[i % len(rules)]) for i in range(NUM_REQUESTS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            distribution,
            "narrow_engine",
            lambda models, engine_of=distribution.narrow_engine: with_drafter(engine_of(models), drafter),
        )
        asked = [(replace(params, seed=seed), spec) for seed, spec in enumerate(specs)]
        return distribution.p_values(distribution.sample_answers(narrow, asked), distribution.exact_law(narrow, params))


def with_drafter(engine: Any, drafter: Drafter) -> Any:
    engine.drafters.drafters[drafter_key(SpecConfig("bigram"))] = drafter
    return engine


@pytest.mark.repeated
def test_sampled_answers_have_the_law(narrow: SimpleNamespace, toy: Callable[[], Any]) -> None:
    assert min(answers(narrow, Watched(toy(), distribution.VOCAB), RULES)) > distribution.ALARM


@pytest.mark.repeated
def test_a_drafter_that_lies_about_its_mass_is_seen(narrow: SimpleNamespace, toy: Callable[[], Any]) -> None:
    """The same draft tokens, said to be drawn from a uniform distribution."""
    honest = toy()

    class Liar:
        name = honest.name
        start, commit, finish = honest.start, honest.commit, honest.finish

        def propose(self, batch: Batch) -> Draft:
            draft = honest.propose(batch)
            uniform = torch.full((1, distribution.VOCAB), 1 / distribution.VOCAB)
            leaves = {draft.anchor_row(b) + draft.lengths[b] for b in range(draft.num_requests)}
            rows = tuple(-1 if row in leaves else 0 for row in range(draft.num_rows))
            return replace(draft, sampled=(True,) * draft.num_nodes, mass=Mass(uniform, rows))

    audit.KEPT_BY_DRAFTER[Liar] = lambda drafter: honest.followers
    assert min(answers(narrow, Liar(), ("rejection",))) < distribution.ALARM / 1000


def test_only_what_was_added_is_known(clean: None) -> None:
    with pytest.raises(ConfigError, match="bigram"):
        SpecConfig("bigram")
    add_drafter("bigram", lambda factory, spec: NgramDrafter())
    assert SpecConfig("bigram").drafter == "bigram"
    add_drafter("bigram", lambda factory, spec: NgramDrafter())  # again, as in a notebook
    assert config.known_drafters() == (*config.DRAFTERS, "bigram")
    assert parse_drafters(["bigram:num_draft=3"])[0].spec() == SpecConfig("bigram", num_draft=3)
    for name in ("ngram", "two words", "", 3):
        with pytest.raises(ConfigError, match="identifier"):
            add_drafter(name, lambda factory, spec: NgramDrafter())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("make", None),
        ("make", "my_package:MyDrafter"),
        ("samples", "no"),
        ("options", dict),
        ("options", {"width": 3}),
        ("fields", "draft"),
        ("fields", ("drafft",)),
    ],
)
def test_arguments_that_would_fail_later_are_refused_when_it_is_added(field: str, value: object, clean: None) -> None:
    arguments = {"make": lambda factory, spec: NgramDrafter()} | {field: value}
    with pytest.raises(InputError, match=field):
        add_drafter("bigram", **arguments)  # type: ignore[arg-type]
    assert config.known_drafters() == tuple(config.DRAFTERS)
