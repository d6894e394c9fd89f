"""Settings under load: names, cells, ratios; on tiny models, and nothing that hangs on a clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretoken import LLM, SpecConfig
from foretoken.backend.drafting import swept_drafters
from foretoken.config import known_drafters
from foretoken.control.policy import BudgetPolicy
from foretoken.errors import ConfigError, InputError
from foretoken.measure.load.options import LoadOptions, slice_names
from foretoken.measure.load.prompts import BATCH_SLICES, Ask, asks
from foretoken.measure.load.rows import BatchSample, batch_prices, grid_summary, summarise_grid
from foretoken.measure.load.run import measure_grid, run_batches
from foretoken.measure.load.settings import Answered, BatchSetting, Stage, Turn, parse_batch_settings, together


class Always(BudgetPolicy):
    """Another policy than the engine's, told by its class."""


class Never(BudgetPolicy):
    """One more."""


POLICIES = {"always": Always, "never": Never}


def options(pair: SimpleNamespace, **values: object) -> LoadOptions:
    small = {
        "target": str(pair.target),
        "draft": str(pair.draft),
        "batches": (1, 3),
        "slices": ("chat", "random"),
        "threads": 1,
        "dtype": "float32",
        "settings": ("plain", "draft_model-2", "ngram-auto", "draft_model-auto"),
        "max_tokens": 8,
        "prompt_tokens": 24,
        "repeats": 2,
        "warmup": 0,
    }
    return LoadOptions(**(small | values))


@pytest.fixture
def stage(text_pair: SimpleNamespace) -> Iterator[Stage]:
    with LLM(text_pair.target, dtype="float32", cache_tokens=2048) as llm:
        yield Stage(llm, str(text_pair.draft), POLICIES, seed=0)


def test_names_of_settings() -> None:
    names = (
        "ngram-2",
        "plain",
        "draft_model:draft_top_k=4-3",
        "never",
        "draft_model-never",
        "suffix-always",
        "ngram-auto",
        "auto",
    )
    found, notes = parse_batch_settings(names, "d", POLICIES)
    assert [s.name for s in found] == [
        "plain",
        "ngram-2",
        "draft_model(draft_top_k=4)-3",
        "draft_model-never",
        "suffix-always",
        "ngram-auto",
        *_auto(),
    ]
    assert [s.adapts for s in found][:6] == [False, False, False, True, True, True]
    assert [s.policy for s in found][:6] == [None, None, None, "never", "always", None]
    assert found[2].spec("d") == SpecConfig("draft_model", draft="d", num_draft=3, draft_top_k=4)
    assert found[3].spec("d").num_draft == "auto"
    assert bool(notes) != bool(_auto())
    assert parse_batch_settings(("always",), None, POLICIES)[0][1].name == "ngram-always"
    with pytest.raises(ConfigError, match="settings"):  # a policy that nobody passed
        parse_batch_settings(("always",), None)


def test_a_sweep_of_fixed_settings_is_that_of_one_request_at_a_time() -> None:
    found, _ = parse_batch_settings(("ngram-2", "sweep", "auto"), "d")
    swept = [choice for choice in swept_drafters() if "prediction" not in choice.needs]
    assert len(found) == 2 + len(swept)
    assert {s.name for s in found} >= {"draft_model(tree=best_first)-8", "recycling-5", "ngram-2", "auto"}
    assert [s.adapts for s in found].count(True) == 1
    assert found[-2].spec("d").num_draft == 8
    alone, _ = parse_batch_settings(("sweep",), None)
    assert not any("draft_model" in s.name for s in alone)


def _auto() -> list[str]:
    return ["auto"] if "auto" in known_drafters() else []


@pytest.mark.parametrize(
    ("name", "field"),
    [("ngram", "settings"), ("ngram-x", "settings"), ("nobody-2", "drafters"), ("predicted-2", "settings")],
)
def test_settings_that_mean_nothing_are_refused(name: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        parse_batch_settings((name,), "d")
    with pytest.raises(ConfigError, match="draft"):
        parse_batch_settings(("draft_model-2",), None)


def test_all_means_every_slice() -> None:
    assert slice_names(("all",), None) == BATCH_SLICES


def test_prompts_are_short_many_and_the_same_each_time() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    found = asks(BATCH_SLICES, 40, encode, 50, seed=0)
    assert found == asks(BATCH_SLICES, 40, encode, 50, seed=0)
    assert found["random"] != asks(("random",), 40, encode, 50, seed=1)["random"]
    for name, own in found.items():
        assert len(own) == 40
        assert name == "edit" or max(len(ask.prompt_ids) for ask in own) <= 50
        assert {ask.temperature for ask in own} == {1.5 if name == "random" else 0.0}
    assert len(set(found["chat"])) > 30
    edits = [len(ask.prompt_ids) for ask in found["edit"]]
    assert edits == sorted(edits)
    with pytest.raises(InputError, match="slices"):
        asks(("poems",), 1, encode, 50, seed=0)


def test_prompts_of_a_file(tmp_path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"number {n}", "slice": "mine"}) + "\n" for n in range(3)))
    assert slice_names(("all",), path) == ("mine",)
    own = asks(("mine", "random"), 5, lambda text: [ord(letter) for letter in text], 50, 0, path)["mine"]
    assert [ask.name for ask in own] == ["own:1", "own:2", "own:3", "own:1", "own:2"]


def test_answers_are_plains_under_every_setting(text_pair: SimpleNamespace) -> None:
    """Greedy and, under seeds, sampled: float32 leaves nothing to rounding."""
    report = run_batches(
        options(
            text_pair,
            settings=("draft_model-3", "ngram-2", "always", "draft_model-auto", "ngram-auto"),
        ),
        policies=POLICIES,
        remarks=("of a study",),
    )
    assert report.caveats[-1] == "of a study"
    assert {row.setting for row in report.rows} == {"plain", *report.results["summary"]}
    assert len(report.results["summary"]) == 6
    assert len(report.rows) == 2 * 2 * 6
    for row in report.rows:
        assert row.same == row.num_answers == 2 * max(row.batch, 2)
        assert row.unexplained == 0
    drafting = {row.setting for row in report.rows if row.num_draft > 0}
    assert "draft_model-3" in drafting
    assert "plain" not in drafting


def test_a_policy_learns_in_its_own_turns_only(stage: Stage) -> None:
    own, always, never = (
        parse_batch_settings((name,), stage.draft, POLICIES)[0][1]
        for name in ("draft_model-auto", "draft_model-always", "draft_model-never")
    )
    ask = Ask("a", (5, 6, 7))
    stage.answer(own, [ask], 12)
    policy = stage.llm.engine.chooser.policy
    assert type(policy) is BudgetPolicy
    stage.answer(always, [ask] * 3, 12)
    assert isinstance(stage.llm.engine.chooser.policy, Always)
    stage.enter(never)
    assert isinstance(stage.llm.engine.chooser.policy, Never)
    stage.enter(own)
    assert stage.llm.engine.chooser.policy is policy
    stage.forget()
    stage.enter(own)
    fresh = stage.llm.engine.chooser.policy
    assert isinstance(fresh, BudgetPolicy)
    assert fresh is not policy


def test_a_turn_counts_what_came_after_everybody_had_begun(stage: Stage) -> None:
    turn = stage.answer(BatchSetting("plain"), [Ask("a", (5, 6)), Ask("b", (7,))], 6)
    assert (turn.num_tokens, turn.decode_tokens, turn.num_steps, turn.num_drafted) == (12, 10, 12, 0)
    assert 0 < turn.decode_s < turn.seconds
    twice = together([turn, turn])
    assert (twice.num_tokens, twice.seconds, len(twice.answers)) == (24, 2 * turn.seconds, 4)


def test_every_request_is_a_tenant_of_its_own(stage: Stage) -> None:
    """Or repeats would draft from earlier answers, and read none of their prompts."""
    params = [stage.params(BatchSetting("plain"), Ask("a", (5,), slice="chat"), 0, 4) for _ in range(3)]
    assert len({one.tenant for one in params}) == 3


def test_requests_name_their_slice_where_the_setting_says_so(stage: Stage) -> None:
    ask = Ask("a", (5,), slice="chat")
    named, unnamed = (parse_batch_settings((name,), stage.draft)[0][1] for name in ("auto-slices", "auto"))
    assert [stage.params(setting, ask, 0, 4).slice for setting in (named, unnamed)] == ["chat", ""]
    assert stage.spec(named) == stage.spec(unnamed)


def test_nobody_remembers_the_answers_of_an_earlier_turn(stage: Stage) -> None:
    """The second turn of a setting drafts exactly what the first one did: the same prompts must not come as old
    friends.
    """
    for name in ("recycling-3", "suffix-3", "mix-3"):
        setting = parse_batch_settings((name,), stage.draft)[0][1]
        first, second = (stage.answer(setting, [Ask("a", (5, 6, 7)), Ask("b", (8, 9))], 16) for _ in range(2))
        assert first.num_drafted == second.num_drafted
        assert first.answers == second.answers


def test_settings_take_turns_in_a_rotating_order(stage: Stage, text_pair: SimpleNamespace) -> None:
    chosen = options(text_pair, batches=(1,), slices=("chat",), prompts_per_slice=1, max_tokens=4, repeats=3, warmup=1)
    settings, _ = parse_batch_settings(("ngram-1", "ngram-2"), None)
    told: list[str] = []
    samples: list[BatchSample] = []
    measure_grid(stage, chosen, settings, {"chat": [Ask("a", (5,))]}, samples, told.append)
    assert told[:3] == ["warm-up 1: plain", "warm-up 1: ngram-1", "warm-up 1: ngram-2"]
    order = [words.removeprefix("1 chat: ") for words in told[3:]]
    assert order == ["plain", "ngram-1", "ngram-2", "ngram-1", "ngram-2", "plain", "ngram-2", "plain", "ngram-1"]
    assert [(sample.setting.name, sample.repeat) for sample in samples[:4]] == [
        ("plain", 0),
        ("ngram-1", 0),
        ("ngram-2", 0),
        ("ngram-1", 1),
    ]


def turn(seconds: float, tokens: int = 10, near_ties: int = 0, first: int = 0, greedy: bool = True) -> Turn:
    answer = Answered((first, *range(1, tokens)), greedy, near_ties)
    return Turn((answer,), seconds, seconds / 2, tokens - 1, tokens, tokens, tokens // 2, (2 * tokens / seconds,))


PLAIN, TWO, OWN = BatchSetting("plain"), BatchSetting("ngram-2", None, 2), BatchSetting("ngram-auto", None, "auto")


def test_ratios_are_medians_of_neighbouring_turns() -> None:
    took = {PLAIN: (10.0, 20.0, 10.0), TWO: (5.0, 10.0, 4.0), OWN: (4.0, 8.0, 4.0)}
    samples = [
        BatchSample(setting, 2, "code", repeat, turn(s))
        for setting, all_s in took.items()
        for repeat, s in enumerate(all_s)
    ]
    plain, two, own = summarise_grid(samples)
    assert (plain.speedup, two.speedup, own.speedup) == (1.0, 2.0, 2.5)
    assert (plain.best_fixed, two.to_best_fixed, own.to_best_fixed) == ("ngram-2", 1.0, 1.25)
    assert own.decode_to_best_fixed == own.request_to_best_fixed == 1.25
    assert own.request_tokens_per_s == 5.0
    assert (two.tokens_per_s, two.tokens_per_s_min, two.tokens_per_s_max) == (2.0, 1.0, 2.5)
    assert (two.acceptance_rate, two.num_draft, two.emitted_per_step) == (0.5, 1.0, 1.0)
    prices = batch_prices([plain, two], price_per_hour=3.6)
    assert [(one.place, one.price_per_million_tokens) for one in prices] == [("2:code", 1000.0), ("2:code", 500.0)]
    assert [one.change for one in prices] == [None, -0.5]


def test_requests_do_not_wait_for_the_slowest() -> None:
    """Two settings take as long for the whole; in one of them half of the requests ended early."""
    slow, quick = replace(turn(10.0), request_speeds=(1.0, 1.0)), replace(turn(10.0), request_speeds=(1.0, 3.0))
    plain, own = summarise_grid([BatchSample(PLAIN, 2, "code", 0, slow), BatchSample(OWN, 2, "code", 0, quick)])
    assert (own.to_best_fixed, own.request_to_best_fixed) == (1.0, 2.0)
    assert together([slow, quick]).request_speeds == (1.0, 1.0, 1.0, 3.0)
    assert plain.request_speedup == 1.0


def test_the_summary_names_the_worst_cell() -> None:
    samples = []
    for name, plain_s, two_s, own_s in (("code", 8.0, 2.0, 4.0), ("random", 8.0, 16.0, 8.0)):
        samples += [
            BatchSample(setting, 4, name, 0, turn(s)) for setting, s in ((PLAIN, plain_s), (TWO, two_s), (OWN, own_s))
        ]
    found = grid_summary(summarise_grid(samples))
    own = found["ngram-auto"]
    assert (own["worst_speedup"], own["worst_speedup_at"]) == (1.0, "4:random")
    assert (own["worst_to_best_fixed"], own["worst_to_best_fixed_at"], own["cells_below_bar"]) == (0.5, "4:code", 1)
    assert own["speedup"] == pytest.approx(2**0.5)
    assert (own["single_fixed"], own["to_single_fixed"]) == ("ngram-2", pytest.approx(1.0))
    assert found["ngram-2"]["worst_speedup"] == 0.5


def test_answers_that_differ_are_explained_by_rounding_or_not() -> None:
    def row(own: Turn, plain: Turn):
        return summarise_grid([BatchSample(PLAIN, 1, "code", 0, plain), BatchSample(TWO, 1, "code", 0, own)])[1]

    assert (row(turn(1.0), turn(1.0)).same, row(turn(1.0), turn(1.0)).unexplained) == (1, 0)
    assert (row(turn(1.0, first=9), turn(1.0)).same, row(turn(1.0, first=9), turn(1.0)).unexplained) == (0, 1)
    assert row(turn(1.0, first=9, near_ties=1), turn(1.0)).unexplained == 0
    assert row(turn(1.0, first=9, near_ties=1), turn(1.0)).differing_greedy == 1
    assert row(turn(1.0, first=9, greedy=False), turn(1.0, greedy=False)).differing_greedy == 0
    assert row(turn(1.0, first=9, greedy=False), turn(1.0, greedy=False)).unexplained == 0
