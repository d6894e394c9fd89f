"""Drafters along a text that is given: what is emitted, what counts as accepted, and what drafters see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM
from foretoken.config import SamplingParams
from foretoken.errors import ConfigError, InputError
from foretoken.measure.load.settings import NO_POLICIES, Stage, parse_batch_settings
from foretoken.measure.workload import Prompt
from studies.held_out.forced import ForcedText
from studies.held_out.measure import Walk, continuation_ids, run_held_out, summarise_walks, walk, walk_all
from studies.held_out.options import FORCED, GREEDY, HeldOutOptions

SETTINGS = ("ngram-3", "recycling-3", "draft_model-3", "draft_model:tree=best_first-4")


@pytest.fixture(scope="module")
def model(text_pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(text_pair.target, dtype="float32", cache_tokens=4096) as llm:
        yield llm


def options(pair: SimpleNamespace, **values: object) -> HeldOutOptions:
    base = {"target": str(pair.target), "draft": str(pair.draft), "settings": SETTINGS, "max_tokens": 24}
    return HeldOutOptions(**(base | values))


def walks_of(llm: LLM, pair: SimpleNamespace, prompt: Prompt, **values: object) -> list[Walk]:
    chosen = options(pair, **values)
    settings, _ = parse_batch_settings(chosen.settings, chosen.draft)
    walks: list[Walk] = []
    walk_all(chosen, Stage(llm, chosen.draft, NO_POLICIES, 0), settings, [prompt], walks)
    return walks


def test_the_answer_is_the_text_with_every_drafter(model: LLM, text_pair: SimpleNamespace) -> None:
    prompt = Prompt("a", "code", "abcab", continuation="cabcabcabcab xyz abcabcabc")
    wanted = continuation_ids(model, prompt, model.encode(prompt.text))[:24]
    walks = walks_of(model, text_pair, prompt, ways=(FORCED,))
    assert walks[0].setting == "plain"
    for own in walks:
        assert own.token_ids == wanted
        assert own.num_steps + own.num_accepted == len(wanted)
    plain, ngram, *_ = walks
    assert plain.num_steps == len(wanted)
    assert ngram.num_accepted > 0  # the text repeats itself
    assert ngram.num_steps < len(wanted)
    assert all(0.0 <= chance <= 1.0 for own in walks for chance in own.chances)


def test_a_text_like_no_other_gives_a_lookup_nothing(model: LLM, text_pair: SimpleNamespace) -> None:
    prompt = Prompt("b", "text", "abc", continuation="".join(chr(33 + place) for place in range(60)))
    (_, ngram, *_) = walks_of(model, text_pair, prompt, ways=(FORCED,))
    assert ngram.num_accepted == 0


def test_a_draft_model_does_not_see_the_text(model: LLM, text_pair: SimpleNamespace) -> None:
    """It predicts as badly as a random model must, not what the target was made to say."""
    prompt = Prompt("d", "text", "abc", continuation="".join(chr(33 + place) for place in range(60)))
    walks = walks_of(model, text_pair, prompt, ways=(FORCED,), settings=("draft_model-3",))
    assert walks[1].num_drafted > 20
    assert walks[1].num_accepted < walks[1].num_drafted / 4


def test_a_forced_text_of_the_targets_own_is_its_greedy_answer(model: LLM, text_pair: SimpleNamespace) -> None:
    """Along what the target says anyway, every drafter drafts and is judged as it is without force."""
    ids = model.encode("def f(x):")
    (output,) = model.generate([ids], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
    chosen = options(text_pair)
    for setting in parse_batch_settings(chosen.settings, chosen.draft)[0]:
        stage = Stage(model, chosen.draft, NO_POLICIES, 0)
        prompt = Prompt("c", "code", "def f(x):")
        forced, greedy = (
            walk(chosen, stage, setting, 0, prompt, way, ids, output.token_ids) for way in (FORCED, GREEDY)
        )
        assert replace(forced, way=GREEDY, chances=()) == greedy


def test_force_leaves_the_other_tokens_and_counts_draft_tokens_behind_the_text_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]] * 4)
    forced = ForcedText((1, 0, 3))
    found = forced.adjust(logits, [(), (1,), (2,), (2, 0)])
    assert found.argmax(-1).tolist() == [1, 0, 0, 3]
    assert torch.equal(found[0, [0, 2, 3]], logits[0, [0, 2, 3]])
    assert [len(own) for own in forced.chances] == [2]  # what stands behind the wrong draft token 2 counts nowhere
    assert forced.chances[0] == pytest.approx(torch.softmax(logits[0].double(), -1)[[1, 2]].tolist())
    forced.num_emitted = 2
    assert forced.adjust(logits[:1], [()]).argmax(-1).tolist() == [3]


def test_rows_sum_over_prompts_and_slices() -> None:
    walks = [
        Walk("ngram-3", FORCED, index, name, tuple(range(10)), steps, 6, 3, ((4, 2), (2, 1)), (0.5,))
        for index, (name, steps) in enumerate((("code", 5), ("code", 10), ("text", 10)))
    ]
    rows = {row.slice: row for row in summarise_walks(walks)}
    assert rows["code"].emitted_per_step == 20 / 15
    assert rows["code"].emitted_per_step_low is None  # two prompts say little beyond themselves
    assert rows["all"].acceptance_rate == 0.5
    assert rows["all"].acceptance_per_position == (0.5, 0.5)
    assert rows["text"].emitted_per_step_low is None


def test_a_whole_study(model: LLM, text_pair: SimpleNamespace, tmp_path: Path) -> None:
    small = options(text_pair, slices=("code",), prompts_per_slice=1, max_tokens=6, settings=("ngram-2",))
    report = run_held_out(small, "python -m studies.held_out", model)
    assert [(row.setting, row.text) for row in report.rows] == [
        ("ngram-2", way) for way in ("forced", "greedy", "sampled")
    ]
    assert report.tables[0].title == "code"
    with pytest.raises(ConfigError, match="settings='ngram-auto'"):
        run_held_out(replace(small, settings=("ngram-auto",)), "c", model)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="no prompt has a known continuation"):
        run_held_out(replace(small, prompts=path, slices=("all",)), "c", model)
