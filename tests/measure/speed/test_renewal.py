"""Nothing that a drafter keeps reaches the next setting or repeat: the whole registry, and one that remembers all and
cannot be reset.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from foretoken import LLM, SpecConfig
from foretoken.backend.answering import Answer
from foretoken.config import known_drafters
from foretoken.draft.lookup_tree import EMPTY, LookupTree, assemble
from foretoken.engine.drafters import add_drafter
from foretoken.measure.load.prompts import Ask
from foretoken.measure.load.settings import Stage, parse_batch_settings
from foretoken.measure.speed.contenders import Own, own_contenders
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.speed.plan import SpeedPlan, SpeedSetting
from foretoken.measure.speed.turns import measure
from foretoken.measure.workload import Prompt
from foretoken.registry import ADDED, HEADS, MTP
from studies.layouts.layouts import RAGGED, LayoutOptions, Layouts
from tests.helpers.audit import KEPT_BY_DRAFTER

PROMPT = Prompt("a", "code", "def f(x):", prediction="    return x")
OTHER = Prompt("b", "code", "class A:", prediction="    pass")
MEMORY = "remembers_all"


class RemembersAll:
    """Knows the answer to every prompt that it has seen answered, whatever the tenant."""

    name = MEMORY

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self._texts: dict[int, tuple[tuple[int, ...], list[int]]] = {}

    @classmethod
    def make(cls, factory: object, spec: SpecConfig) -> RemembersAll:
        return cls()

    def start(self, request) -> None:
        self._texts[request.request_id] = (tuple(request.prompt_ids), [])

    def look_up(self, entry, ahead=()) -> LookupTree:
        prompt, said = self._texts[entry.request.request_id]
        known = self.answers.get(prompt, [])[len(said) :][: entry.num_draft]
        return LookupTree(tuple(known), tuple(range(-1, len(known) - 1)), (0.9,) * len(known)) if known else EMPTY

    def propose(self, batch):
        return assemble(self.name, [self.look_up(entry) for entry in batch.decoding])

    def commit(self, batch, draft, verdict, feedback) -> None:
        for place, entry in enumerate(batch.decoding):
            self._texts[entry.request.request_id][1].extend(verdict.emitted(place))

    def finish(self, request_id: int) -> None:
        prompt, said = self._texts.pop(request_id)
        self.answers[prompt] = said


KEPT_BY_DRAFTER[RemembersAll] = lambda drafter: drafter._texts


@pytest.fixture
def memory() -> Iterator[str]:
    add_drafter(MEMORY, RemembersAll)
    yield MEMORY
    del ADDED[MEMORY]


@pytest.fixture(scope="module")
def model(text_pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(text_pair.target, dtype="float32", cache_tokens=4096) as llm:
        yield llm


@contextmanager
def instances_of(llm: LLM) -> Iterator[list[object]]:
    """Every drafter that serves a request of `llm`, once for each request, parts included."""
    seen: list[object] = []
    group = llm.engine.drafters
    start = group.start

    def record(request) -> None:
        start(request)
        for key in dict.fromkeys(group.keys(request.request_id)):
            drafter = group.drafters[key]
            seen.extend((drafter, *getattr(drafter, "parts", ())))

    group.start = record
    try:
        yield seen
    finally:
        del group.start


def counts(answer: Answer) -> tuple[object, ...]:
    return answer.token_ids, answer.num_drafted, answer.num_accepted, answer.positions


def test_no_drafter_of_the_registry_remembers_an_answer_of_a_speed_run(
    text_pair: SimpleNamespace, model: LLM, memory: str
) -> None:
    options = SpeedOptions(
        str(text_pair.target), str(text_pair.draft), drafters=("all",), num_drafts=(3,), temperatures=(0.0,)
    )
    contenders, notes = own_contenders(options, model, [PROMPT])
    assert not notes
    assert {c.setting.drafter for c in contenders} == {None, *known_drafters()} - {*HEADS, MTP}
    assert memory in known_drafters()
    plan = SpeedPlan((PROMPT,), max_tokens=10, temperatures=(0.0,), repeats=2, warmup=1, seed=0)
    with instances_of(model) as seen:
        samples, _ = measure(contenders, plan)
    memories = [drafter for drafter in seen if isinstance(drafter, RemembersAll)]
    assert memories
    assert len(memories) == len({id(drafter) for drafter in memories}), "it kept its answers from one to the next"
    for contender in contenders:
        if contender.setting.drafter != "auto":  # chooses by measured times
            own = [counts(s.answer) for s in samples if s.setting == contender.setting]
            assert own[0] == own[1], contender.setting.name


def test_each_setting_of_a_speed_run_has_a_policy_of_its_own(model: LLM) -> None:
    mine = model.engine.chooser.policy
    settings = [Own(SpeedSetting(f"ngram-{name}", drafter="ngram"), model, SpecConfig("ngram")) for name in "ab"]
    used = []
    for setting in (*settings, settings[0]):
        setting.answer(PROMPT, SpeedPlan((PROMPT,), 4, (0.0,), 1, 0, 0).params(0.0, 0, 0))
        used.append(model.engine.chooser.policy)
    assert used[0] is used[2] is not used[1]
    assert mine not in used


def test_a_warm_setting_remembers_other_prompts_and_never_the_same_one(model: LLM, memory: str) -> None:
    setting = Own(SpeedSetting("x"), model, SpecConfig(memory, num_draft=3), warm=True)
    params = SpeedPlan((PROMPT,), 8, (0.0,), 1, 0, 0).params(0.0, 0, 0)
    with instances_of(model) as seen:
        answers = [setting.answer(prompt, params) for prompt in (PROMPT, OTHER, PROMPT, OTHER)]
    assert [len(drafter.answers) for drafter in seen] == [2, 2, 2, 2]
    assert seen[0] is seen[1] is not seen[2]
    assert seen[2] is seen[3]
    assert not any(answer.num_accepted for answer in answers)


def test_no_drafter_of_the_registry_remembers_a_turn_under_load(
    text_pair: SimpleNamespace, model: LLM, memory: str
) -> None:
    fixed = [name for name in known_drafters() if name not in ("predicted", "auto", *HEADS, MTP)]
    names = [*(f"{name}-3" for name in fixed), "auto"]
    settings, _ = parse_batch_settings(names, str(text_pair.draft))
    stage = Stage(model, str(text_pair.draft), {}, seed=0)
    ask = Ask("code", tuple(model.encode(PROMPT.text)), 0.0)
    with instances_of(model) as seen:
        for setting in (*settings, *settings):
            turn = stage.answer(setting, [ask], 6)
            assert turn.num_accepted == 0 or setting.name != f"{memory}-3"
    memories = [drafter for drafter in seen if isinstance(drafter, RemembersAll)]
    assert memories
    assert len(memories) == len({id(drafter) for drafter in memories}), "it kept its answers from one turn to the next"


def test_a_mix_with_a_part_that_cannot_be_reset_is_made_anew(model: LLM, memory: str) -> None:
    spec = SpecConfig("mix", parts=("ngram", memory), num_draft=3)
    model.reset_drafters(spec)
    (mix,) = model.loaded_drafters(spec)
    model.reset_drafters(spec)
    assert model.loaded_drafters(spec) != (mix,)
    plain = SpecConfig("mix", parts=("ngram", "suffix"))
    model.reset_drafters(plain)
    (mix,) = model.loaded_drafters(plain)
    model.reset_drafters()
    assert model.loaded_drafters(plain) == (mix,)
    assert not model.loaded_drafters(spec)  # loaded again by the next request


def test_layouts_are_compared_with_new_drafters(model: LLM) -> None:
    layouts = Layouts(LayoutOptions(str(model.folder), max_tokens=6), model.target, RemembersAll)
    samples = [layouts.run(RAGGED, [model.encode(PROMPT.text)], 1) for _ in range(2)]
    assert [sample.num_drafted for sample in samples] == [0, 0]
