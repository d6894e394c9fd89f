"""The order of a run, and the arithmetic of its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.errors import ConfigError, ForetokenError, MismatchError, NumericsError, StorageError
from foretoken.measure.speed.plan import ALL_SLICES, SpeedPlan, SpeedSample, SpeedSetting
from foretoken.measure.speed.rows import repeated_ngrams, summarise
from foretoken.measure.speed.turns import measure
from tests.measure.fakes import PROMPTS, Scripted, answer

PLAIN, SPEC = SpeedSetting("plain"), SpeedSetting("ngram-3", drafter="ngram", num_draft=3)
PEER = SpeedSetting("other", "other", samples=False)
PLAN = SpeedPlan(PROMPTS, max_tokens=8, temperatures=(0.0, 0.8), repeats=2, warmup=1, seed=5)


def sample(setting: SpeedSetting, own, prompt: int = 0, repeat: int = 0, temperature: float = 0.0) -> SpeedSample:
    return SpeedSample(setting, prompt, PROMPTS[prompt].slice, temperature, repeat, own)


def row_of(samples, setting: str = "plain", name: str = "code", temperature: float = 0.0):
    (row,) = [
        r for r in summarise(samples, PROMPTS) if (r.setting, r.slice, r.temperature) == (setting, name, temperature)
    ]
    return row


def test_settings_take_turns_at_each_prompt_in_a_rotating_order():
    log: list[tuple[str, str, float]] = []
    contenders = [Scripted(SpeedSetting(name), [answer()], log) for name in ("plain", "x", "y")]
    samples, notes = measure(contenders, PLAN)
    assert not notes
    assert len(samples) == 3 * 3 * 2 * 2
    warmup, timed = log[: 3 * 2], log[3 * 2 :]
    assert {entry[0] for entry in warmup} == {"plain", "x", "y"}
    groups = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert all(len({(prompt, temperature) for _, prompt, temperature in group}) == 1 for group in groups)
    assert {group[0][0] for group in groups} == {"plain", "x", "y"}


def test_seeds_are_the_same_for_every_setting_and_differ_between_answers():
    seeds = {PLAN.params(0.8, index, repeat).seed for index in range(3) for repeat in range(2)}
    assert len(seeds) == 6
    assert PLAN.params(0.8, 1, 1) == PLAN.params(0.8, 1, 1)


def test_engines_that_repeat_no_sampled_answer_run_greedily_and_those_that_fail_are_left_out():
    good, bad = (
        Scripted(PEER, [answer()]),
        Scripted(SpeedSetting("bad", "bad", samples=False), [answer(), answer(), ForetokenError("no memory")]),
    )
    samples, notes = measure([Scripted(PLAIN, [answer()]), good, bad], PLAN)
    assert {entry[2] for entry in good.log} == {0.0}
    assert {s.setting.name for s in samples} == {"plain", "other"}
    assert notes == ["bad was left out: no memory"]


def test_our_own_failure_ends_the_run():
    with pytest.raises(ForetokenError, match="broken"):
        measure([Scripted(PLAIN, [ForetokenError("broken")])], PLAN)


def test_the_number_of_runs_is_counted_ahead():
    contenders = [Scripted(PLAIN, [answer()]), Scripted(PEER, [answer()])]
    seen: list[str] = []
    measure(contenders, PLAN, seen.append)
    assert len(seen) == PLAN.num_runs(c.setting for c in contenders)


def test_speed_is_the_median_over_repeats_of_all_tokens_by_all_seconds():
    samples = [
        sample(PLAIN, answer(10, seconds), prompt, repeat)
        for repeat, seconds in enumerate((1.0, 2.0, 5.0))
        for prompt in (0, 1)
    ]
    row = row_of(samples)
    assert (row.tokens_per_s, row.tokens_per_s_min, row.tokens_per_s_max) == (5.0, 2.0, 10.0)
    assert (row.num_prompts, row.repeats, row.num_emitted) == (2, 3, 60)
    assert row.speedup == 1.0


def test_a_long_answer_weighs_more_than_a_short_one():
    assert row_of([sample(PLAIN, answer(90, 1.0)), sample(PLAIN, answer(10, 9.0), 1)]).tokens_per_s == 10.0


def test_speedup_compares_medians_and_its_extremes_the_repeats_one_by_one():
    plain = [sample(PLAIN, answer(10, s), 0, r) for r, s in enumerate((1.0, 2.0, 4.0))]
    spec = [sample(SPEC, answer(10, s), 0, r) for r, s in enumerate((0.5, 0.5, 4.0))]
    row = row_of(plain + spec, "ngram-3")
    assert (row.speedup, row.speedup_min, row.speedup_max) == (4.0, 1.0, 4.0)
    assert row_of(spec, "ngram-3").speedup is None


def test_time_per_step_is_split_and_adds_up():
    own = answer(12, 2.0, num_steps=5, decode_steps=4, draft_s=0.4, verify_s=1.2, ttft_s=3.0)
    row = row_of([sample(PLAIN, own)])
    assert row.step_ms == pytest.approx(500.0)
    assert (row.draft_ms_per_step, row.verify_ms_per_step) == (pytest.approx(100.0), pytest.approx(300.0))
    assert row.rest_ms_per_step == pytest.approx(100.0)
    assert (row.ttft_s, row.emitted_per_step) == (3.0, 12 / 5)


def test_what_an_engine_does_not_tell_stays_unknown():
    row = row_of([sample(PLAIN, answer())])
    assert (
        row.step_ms
        is row.draft_ms_per_step
        is row.rest_ms_per_step
        is row.ttft_s
        is row.num_steps
        is row.acceptance_rate
        is None
    )
    mixed = row_of([sample(PLAIN, answer(num_steps=3)), sample(PLAIN, answer(), 1)])
    assert mixed.num_steps is None


def test_acceptance_by_position_sums_over_answers_of_different_length():
    one = answer(num_drafted=6, num_accepted=3, positions=((4, 2), (2, 1)))
    two = answer(num_drafted=4, num_accepted=4, positions=((4, 4),))
    row = row_of([sample(PLAIN, one), sample(PLAIN, two, 1)])
    assert row.acceptance_per_position == (6 / 8, 1 / 2)
    assert row.acceptance_rate == 7 / 10


def test_repeated_ngrams():
    assert repeated_ngrams([[1, 2, 3, 4, 5, 6, 7]]) == 0.0
    assert repeated_ngrams([[1, 1, 1, 1, 1, 1]]) == pytest.approx(2 / 3)
    assert repeated_ngrams([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.0
    assert repeated_ngrams([[1, 2]]) is None


def test_greedy_outputs_are_compared_with_plain_decoding():
    plain = [sample(PLAIN, answer(ids=[1, 2, 3, 4]), p) for p in (0, 1)]
    same = sample(SPEC, answer(ids=[1, 2, 3, 4]), 0)
    other = sample(SPEC, answer(ids=[1, 2, 9, 4]), 1)
    assert row_of([*plain, same], "ngram-3").identical is True
    row = row_of([*plain, same, other], "ngram-3")
    assert row.identical is False
    assert row.differences == ({"prompt": "b", "token": 2},)
    assert row_of([*plain, sample(SPEC, answer(ids=[1, 2, 3]), 0)], "ngram-3").differences == (
        {"prompt": "a", "token": 3},
    )


def test_plain_decoding_that_does_not_repeat_itself_is_shown():
    samples = [sample(PLAIN, answer(ids=[1, 2, 3, 4])), sample(PLAIN, answer(ids=[1, 2, 3, 5]), repeat=1)]
    assert row_of(samples).identical is False


def test_text_alone_is_compared_as_far_as_both_go():
    plain = sample(PLAIN, replace(answer(ids=[1]), text="def f"))
    assert row_of([plain, sample(PEER, replace(answer(ids=[]), text="def f(x)"))], "other").identical is True
    assert row_of([plain, sample(PEER, replace(answer(ids=[]), text="def g(x)"))], "other").differences == (
        {"prompt": "a", "character": 4},
    )


def test_an_engine_that_gives_neither_tokens_nor_text_is_not_called_identical():
    assert row_of([sample(PLAIN, answer(ids=[1])), sample(PEER, answer(ids=[]))], "other").identical is None


def test_sampled_outputs_are_not_compared():
    samples = [sample(s, answer(ids=[i]), temperature=0.8) for i, s in enumerate((PLAIN, SPEC))]
    assert row_of(samples, "ngram-3", temperature=0.8).identical is None


def test_several_slices_get_a_row_over_all_of_them():
    samples = [sample(PLAIN, answer(10, 1.0), 0), sample(PLAIN, answer(10, 3.0), 2)]
    assert {(r.slice, r.tokens_per_s) for r in summarise(samples, PROMPTS)} == {
        ("code", 10.0),
        ("edit", 10 / 3),
        (ALL_SLICES, 5.0),
    }
    assert {r.slice for r in summarise(samples[:1], PROMPTS[:1])} == {"code"}


def test_a_setting_may_be_measured_on_some_slices_only():
    """Then it warms up there, has no row over all slices, and is compared with plain on the same prompts."""
    part = SpeedSetting("predicted-3", drafter="predicted", num_draft=3, slices=("edit",))
    plan = replace(PLAN, temperatures=(0.0,), warmup=2)
    own = Scripted(part, [answer(10, 0.5)])
    seen: list[str] = []
    samples, notes = measure([Scripted(PLAIN, [answer(10, 1.0)]), own], plan, seen.append)
    assert not notes
    assert {entry[1] for entry in own.log} == {"c"}
    assert len(own.log) == 2 + 2 == seen.count("predicted-3")
    assert len(seen) == plan.num_runs([PLAIN, part])
    assert [(row.slice, row.speedup) for row in summarise(samples, PROMPTS) if row.setting == "predicted-3"] == [
        ("edit", 2.0)
    ]


def test_an_optional_setting_is_left_out_when_what_it_needs_does_not_fit():
    """Never because of a failure of ours: a part of `all` hides no bug."""
    optional = SpeedSetting("draft_model-3", drafter="draft_model", optional=True)
    for error in (MismatchError("another tokenizer"), ConfigError("draft", None, "needs one"), StorageError("no file")):
        samples, notes = measure([Scripted(PLAIN, [answer()]), Scripted(optional, [error])], PLAN)
        assert {s.setting.name for s in samples} == {"plain"}
        assert notes == [f"draft_model-3 was left out: {error}"]
        with pytest.raises(type(error)):
            measure([Scripted(replace(optional, optional=False), [error])], PLAN)
    with pytest.raises(NumericsError):
        measure([Scripted(optional, [NumericsError("nan")])], PLAN)


def test_a_drafter_is_compared_with_the_fastest_drafting_setting_of_other_engines():
    """Whatever it drafts with; the other engine's plain decoding, faster here, is none of them."""
    slow, fast = (SpeedSetting(name, "other", drafter=name, counterpart="draft_model") for name in ("slow", "fast"))
    seconds = {PLAIN: 2.0, SPEC: 1.0, PEER: 0.1, slow: 4.0, fast: 1.5}
    samples = [
        sample(setting, answer(seconds=own * (1 + i)), i)
        for setting, own in seconds.items()
        for i in range(len(PROMPTS))
    ]
    row = row_of(samples, SPEC.name)
    assert (row.rival, row.over_rival) == ("fast", pytest.approx(1.5))
    assert row_of(samples).rival is None
    assert row_of(samples, "fast").rival is None
