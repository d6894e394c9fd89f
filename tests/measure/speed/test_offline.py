"""The bench through an engine of known behaviour, from options to report."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.config import DRAFTERS, SamplingParams, SpecConfig
from foretoken.errors import ConfigError, ForetokenError, InputError, MismatchError
from foretoken.measure.speed.contenders import Own, own_contenders
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.speed.plan import SpeedSetting
from foretoken.measure.speed.run import run_speed
from foretoken.measure.stats import FEW_PROMPTS
from foretoken.measure.workload import Prompt
from foretoken.registry import HEADS, MTP
from tests.measure.fakes import PROMPTS, FakeLLM

PARAMS = SamplingParams(max_tokens=12)


NGRAM_3 = SpecConfig(drafter="ngram", num_draft=3)


def options(**values) -> SpeedOptions:
    base = {
        "target": "t",
        "drafters": ("ngram",),
        "num_drafts": (3,),
        "slices": ("code", "json"),
        "max_tokens": 12,
        "repeats": 2,
    }
    return SpeedOptions(**(base | values))


def test_the_prompts_own_pass_is_kept_apart():
    answer = Own(SpeedSetting("ngram-3"), FakeLLM(), NGRAM_3).answer(PROMPTS[0], PARAMS)
    # Four steps of three tokens; the first one, with the prompt in it, does not count.
    assert (answer.num_emitted, answer.decode_tokens, answer.num_steps, answer.decode_steps) == (12, 9, 4, 3)
    assert (answer.draft_s, answer.verify_s) == (3 * 3.0, 3 * 12.0)
    assert answer.positions == ((4, 4), (4, 4), (4, 0))
    assert (answer.num_drafted, answer.num_accepted) == (12, 8)
    assert answer.ttft_s is not None
    assert answer.decode_s > 0


def test_a_failed_request_is_an_error():
    with pytest.raises(ForetokenError, match="broken"):
        Own(SpeedSetting("ngram-3"), FakeLLM(fails=True), NGRAM_3).answer(PROMPTS[0], PARAMS)


def contenders_of(chosen: SpeedOptions, prompts=PROMPTS) -> list[Own]:
    return own_contenders(chosen, FakeLLM(), prompts)[0]


def test_every_drafter_meets_every_number_of_tokens():
    chosen = options(
        drafters=("draft_model", "ngram"), num_drafts=(2, "auto"), draft="d", rules=("greedy",), temperatures=(0.0,)
    )
    contenders = contenders_of(chosen)
    assert [c.setting.name for c in contenders] == [
        "plain",
        "draft_model-2",
        "draft_model-auto",
        "ngram-2",
        "ngram-auto",
    ]
    specs = [c.way.spec for c in contenders]
    assert specs[1] == SpecConfig(drafter="draft_model", draft="d", num_draft=2, rule="greedy")
    assert specs[4] == SpecConfig(drafter="ngram", num_draft="auto", rule="greedy")
    assert [c.setting.free for c in contenders] == [False, False, False, True, True]


def test_each_set_of_options_is_a_setting_of_its_own():
    drafters = (
        "draft_model",
        "draft_model:draft_top_k=5",
        "ngram:num_draft=9",
        "ngram:rule=tree;num_draft=9",
        "ngram",
        "ngram",
    )
    contenders = contenders_of(options(drafters=drafters, draft="d", num_drafts=(3,)))
    assert [c.setting.name for c in contenders[1:]] == [
        "draft_model-3",
        "draft_model(draft_top_k=5)-3",
        "ngram-9",
        "ngram-9 tree",
        "ngram-3",
    ]
    assert contenders[2].way.spec == SpecConfig("draft_model", draft="d", num_draft=3, draft_top_k=5)
    assert contenders[4].way.spec.rule == "tree"
    assert (contenders[2].setting.drafter, contenders[2].setting.options) == ("draft_model", "draft_top_k=5")


def test_a_draft_is_measured_in_each_format_that_is_named():
    contenders, _ = own_contenders(
        options(drafters=("draft_model", "draft_model:draft_dtype=int4"), draft="d"), FakeLLM(), PROMPTS
    )
    assert [c.setting.name for c in contenders] == ["plain", "draft_model-3", "draft_model(draft_dtype=int4)-3"]
    assert contenders[2].way.spec == SpecConfig("draft_model", "d", num_draft=3, draft_dtype="int4")
    with pytest.raises(ConfigError, match="draft_dtype='int2': choose one of auto"):
        options(drafters=("draft_model:draft_dtype=int2",), draft="d")


def test_predicted_gets_each_prompts_own_prediction():
    prompts = [Prompt(name, "edit", f"text of {name}", prediction=f"expected of {name}") for name in "ab"]
    (_, contender), notes = own_contenders(options(drafters=("predicted",)), llm := FakeLLM(), prompts)
    assert not notes
    for prompt in prompts:
        contender.answer(prompt, PARAMS)
    assert [call[1].prediction for call in llm.calls] == ["expected of a", "expected of b"]
    assert {call[2].drafter for call in llm.calls} == {"predicted"}


def test_predicted_runs_where_every_prompt_has_a_prediction():
    """Elsewhere it is left out with a note; nowhere is an error, unless it is only part of `all`."""
    report = run_speed(options(drafters=("predicted", "recycling"), slices=("edit", "code")), FakeLLM())
    assert {row.slice for row in report.rows if row.setting == "predicted-3"} == {"edit"}
    assert {row.slice for row in report.rows if row.setting == "recycling-3"} == {"edit", "code", "all"}
    assert "predicted was not measured on code: these prompts carry no prediction." in report.caveats
    assert any("emptied before every answer" in caveat for caveat in report.caveats)
    with pytest.raises(ConfigError, match="carry no prediction"):
        run_speed(options(drafters=("predicted",), slices=("code",)), FakeLLM())
    some = [*PROMPTS, Prompt("d", "code", "x", prediction="y")]  # one prompt of a slice is not enough
    with pytest.raises(ConfigError, match="carry no prediction"):
        own_contenders(options(drafters=("predicted",)), FakeLLM(), some)


def test_all_drafters_are_those_of_the_registry():
    """What lacks something is left out with a note."""
    contenders, notes = own_contenders(options(drafters=("all",), num_drafts=(2,)), FakeLLM(), PROMPTS)
    assert (
        {"ngram", "suffix", "recycling"} <= {c.setting.drafter for c in contenders} < {*DRAFTERS, None} - {*HEADS, MTP}
    )
    assert any("draft_model was not measured: it needs a draft" in note for note in notes)
    assert any("predicted was not measured" in note for note in notes)
    prompts = [Prompt("a", "edit", "x", prediction="y")]
    contenders, notes = own_contenders(options(drafters=("all",), num_drafts=(2,), draft="d"), FakeLLM(), prompts)
    assert {c.setting.drafter for c in contenders} == {*DRAFTERS, None} - {*HEADS, MTP}
    assert not notes


def test_a_drafter_that_cannot_be_made_is_left_out_of_all_and_fails_by_name():
    report = run_speed(options(drafters=("all",), draft="d"), FakeLLM(unusable="draft_model"))
    assert any(caveat == "draft_model-3 was left out: another tokenizer" for caveat in report.caveats)
    assert "draft_model-3" not in {row.setting for row in report.rows}
    with pytest.raises(MismatchError):
        run_speed(options(drafters=("draft_model",), draft="d"), FakeLLM(unusable="draft_model"))


def test_prompts_are_cut_to_the_targets_context():
    report = run_speed(options(), llm := FakeLLM(target=SimpleNamespace(max_context_tokens=512)))
    assert {len(call[0]) for call in llm.calls if len(call[0]) >= 500} == {500}
    assert any("Cut in the middle to 500 tokens" in caveat for caveat in report.caveats)


def test_suffix_never_drafts_from_an_answer_to_the_same_prompt():
    (_, contender), _ = own_contenders(options(drafters=("suffix",)), llm := FakeLLM(), PROMPTS)
    for _ in range(3):
        contender.answer(PROMPTS[0], PARAMS)
    assert len({call[1].tenant for call in llm.calls}) == 3


def test_a_whole_run():
    llm = FakeLLM()
    report = run_speed(options(temperatures=(0.0, 0.8)), llm, command="foretoken bench --target t")
    assert len(report.rows) == 2 * 3 * 2  # temperatures, two slices and all of them, settings
    row = next(r for r in report.rows if r.setting == "ngram-3" and r.slice == "code" and r.temperature == 0.0)
    assert row.identical is True
    assert row.emitted_per_step == 3.0
    assert row.speedup is not None
    assert {call[1].temperature for call in llm.calls} == {0.0, 0.8}
    assert all(call[1].ignore_eos for call in llm.calls)
    line = json.loads(report.json_line())
    assert line["command"] == "foretoken bench --target t"
    wanted = "setting slice speedup num_steps num_drafted num_accepted num_emitted acceptance_rate draft_s verify_s ttft_s tokens_per_s"  # noqa: E501
    assert set(wanted.split()) <= set(line["rows"][0])


def test_a_difference_is_reported_and_not_hidden():
    report = run_speed(options(), FakeLLM(wrong_at=5))
    row = next(r for r in report.rows if r.setting == "ngram-3" and r.slice == "code" and r.temperature == 0.0)
    assert row.identical is False
    assert {place["token"] for place in row.differences} == {5}


def test_each_row_says_how_many_outputs_differ_and_how_sure_its_speedup_is():
    report = run_speed(options(prompts_per_slice=5), FakeLLM(wrong_at=5))
    row = next(r for r in report.rows if (r.setting, r.slice, r.temperature) == ("ngram-3", "code", 0.0))
    assert (row.num_differing, row.num_compared) == (10, 10)
    assert row.speedup_low <= row.speedup <= row.speedup_high
    assert [one["prompt"] for one in row.prompt_speedups] == [p["prompt"] for p in row.differences]
    table = report.tables[0]
    cells = dict(zip(table.headings, next(line for line in table.lines if line[0] == "ngram-3"), strict=True))
    assert cells["differ"] == "10 of 10"
    assert "-" in cells["95 %"]
    assert FEW_PROMPTS not in table.notes
    assert next(r for r in report.rows if r.temperature == 0.8).num_compared is None
    assert report.results["strict_differing"] == 0  # default numerics may differ
    assert not report.conclusions


def test_two_prompts_a_slice_have_no_interval_and_the_table_says_so():
    table = run_speed(options(prompts_per_slice=2), FakeLLM()).tables[0]
    cells = dict(zip(table.headings, next(line for line in table.lines if line[0] == "ngram-3"), strict=True))
    assert (cells["95 %"], "-" in cells["end to end"]) == ("", False)
    assert cells["speedup"].endswith("x")
    assert table.notes.count(FEW_PROMPTS) == 1


def test_strict_numerics_have_a_plain_of_their_own_and_may_not_differ():
    both = options(numerics=("default", "strict"))
    right = run_speed(both, FakeLLM())
    assert [r.setting for r in right.rows if (r.slice, r.temperature) == ("code", 0.0)] == [
        "plain",
        "ngram-3",
        "plain strict",
        "ngram-3 strict",
    ]
    assert right.results["strict_differing"] == 0
    assert right.conclusions == ("Strict numerics: no greedy output differs from plain decoding.",)
    assert all("strict" not in name for name in right.results["ratios"]["code"])
    wrong = run_speed(both, FakeLLM(wrong_at=5))
    assert wrong.results["strict_differing"] == 8  # two slices of two prompts, two repeats
    assert wrong.conclusions[0].startswith("STRICT NUMERICS FAILED: 8 greedy outputs")
    lossy = options(numerics=("strict",), rules=("typical",), allow_lossy=True, temperatures=(0.0,))
    assert run_speed(lossy, FakeLLM(wrong_at=5)).results["strict_differing"] == 0


def test_own_prompts_replace_the_slices(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "hello"}\n' * 3, encoding="utf-8")
    llm = FakeLLM()
    report = run_speed(options(prompts=path, slices=("all",), prompts_per_slice=2), llm)
    assert "Prompts measured (prompts_per_slice=2): mine 2 of 3." in report.caveats
    assert {row.slice for row in report.rows} == {"mine"}
    assert {call[0] for call in llm.calls} == {"hello"}
    with pytest.raises(InputError, match="the prompts have mine"):
        run_speed(options(prompts=path), llm)


def test_conversations_go_through_the_chat_template(tmp_path):
    path = tmp_path / "talk.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"prompt": "a text"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    chosen = options(prompts=path, slices=("all",), prompts_per_slice=2)
    llm = FakeLLM()
    run_speed(chosen, llm)
    assert {call[0] for call in llm.calls} == {"[user]hi[assistant]", "a text"}
    llm = FakeLLM()
    run_speed(replace(chosen, chat=True), llm)
    assert {call[0] for call in llm.calls} == {"[user]hi[assistant]", "[user]a text[assistant]"}


def test_a_template_that_a_text_cannot_stand_for_is_refused(tmp_path):
    class Other(FakeLLM):
        def encode_chat(self, messages):
            return [1, 2, 3]

    with pytest.raises(InputError, match="other tokens than as messages"):
        run_speed(options(chat=True), Other())


def test_a_dated_result_is_written(tmp_path):
    report = run_speed(options(out=tmp_path / "results", name="small"), FakeLLM())
    assert sorted(path.suffix for path in (tmp_path / "results").iterdir()) == [".json", ".jsonl", ".md"]
    assert all(report.date[:10] in file for file in report.files)


@pytest.mark.parametrize(
    ("values", "error", "named"),
    [
        ({"drafters": ("oracle",)}, ConfigError, "oracle"),
        ({"drafters": ("ngram:draft_topk=1",)}, ConfigError, "draft_top_k"),
        ({"slices": ()}, InputError, "slices"),
        ({"backends": ("magic",)}, InputError, "choose from local, transformers, llama.cpp, openvino"),
        ({"backends": ()}, InputError, "backends"),
        ({"backends": ("http://u:p@host",)}, InputError, "name or password"),
        ({"drafters": ("draft_model",)}, ConfigError, "draft"),
        ({"num_drafts": ()}, InputError, "num_drafts"),
        ({"temperatures": ()}, InputError, "temperatures"),
        ({"repeats": 0}, InputError, "repeats"),
        ({"max_tokens": 1}, InputError, "max_tokens"),
        ({"threads": 0}, InputError, "threads"),
        ({"peer_num_drafts": (0,)}, InputError, "peer_num_drafts"),
        ({"name": "../x"}, InputError, "name"),
        ({"numerics": ("exact",)}, InputError, "numerics"),
        ({"numerics": ()}, InputError, "numerics"),
        ({"warm": True, "resume": Path("x")}, InputError, "resume"),
    ],
)
def test_bad_options_are_refused_by_name(values, error, named):
    with pytest.raises(error, match=named):
        options(**values)


def test_options_have_defaults_for_all_but_the_target():
    assert fields(SpeedOptions)[0].name == "target"
    assert SpeedOptions("t", draft="d").num_threads >= 1
