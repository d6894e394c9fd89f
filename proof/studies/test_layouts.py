"""The comparison of layouts: all ways answer alike, what they count is consistent, and a result can be read again. No
time is asserted.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, ConfigError, InputError
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.model.open import open_model
from foretoken.verify import resolve, takes_trees
from studies.layouts import run as module
from studies.layouts.__main__ import main
from studies.layouts.layouts import (
    COUNTERPARTS,
    EQSPEC,
    EXSPEC,
    MODES,
    PADDED_PLAIN,
    PUBLISHED,
    RAGGED,
    RAGGED_PLAIN,
    LayoutOptions,
    Layouts,
    measure_layouts,
    ratios,
)
from studies.layouts.replay import ReplayedDrafter, record_drafts
from studies.layouts.run import uneven
from studies.layouts.tables import layout_tables
from tests.helpers.checkpoints import token_ids

OPTIONS = LayoutOptions("tiny", num_draft=3, batch_sizes=(2, 3), pool=2, max_tokens=12, repeats=2)


def prompts() -> list[list[int]]:
    return [(token_ids(5, seed=number) * 4)[: 7 + number] for number in range(6)]


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_all_ways_answer_alike(llm: LLM, pair: SimpleNamespace, name: str):
    """In float32, token for token; the same drafts are made, and the layout alone tells the ways apart."""
    options = replace(OPTIONS, drafter=name, draft=str(pair.draft) if name == "draft_model" else None)
    drafter = NgramDrafter() if name == "ngram" else DraftModelDrafter(open_model(pair.draft, "float32", "cpu", 4096))
    rows = measure_layouts(Layouts(options, llm.target, lambda: drafter), prompts())
    assert [(row.batch_size, row.mode) for row in rows] == [(size, mode) for size in (2, 3) for mode in MODES]
    for row in rows:
        assert (row.num_identical, row.num_answers) == (2 * row.batch_size,) * 2
        assert row.round_ms > 0
        assert (row.realign_ms > 0) == (row.mode in COUNTERPARTS)
        assert (row.acceptance_rate is None) == row.mode.endswith("plain")
        assert (row.grouped_share is None) == (row.mode != EXSPEC)
    if name == "ngram":  # its first round is like any other, so both sides count the same rounds
        for size in (2, 3):
            by_mode = {row.mode: row for row in rows if row.batch_size == size}
            for padded, ragged in ((EQSPEC, RAGGED), (PUBLISHED, RAGGED), (PADDED_PLAIN, RAGGED_PLAIN)):
                assert by_mode[padded].num_rounds == by_mode[ragged].num_rounds
                assert by_mode[padded].acceptance_rate == by_mode[ragged].acceptance_rate


def test_replayed_drafts_are_those_of_the_drafter_along_the_same_text(llm: LLM):
    """In float32 all layouts answer like plain decoding, so what is replayed is what `ngram` drafts by itself."""
    options = replace(OPTIONS, batch_sizes=(3,), repeats=1)
    counted = [
        [(row.mode, row.num_rounds, row.acceptance_rate, row.num_identical) for row in rows]
        for rows in (
            measure_layouts(Layouts(replace(options, replay=replay), llm.target, NgramDrafter), prompts())
            for replay in (False, True)
        )
    ]
    assert counted[0] == counted[1]


def test_replayed_drafts_do_not_depend_on_the_text(llm: LLM):
    """By prompt and place alone: wrong answers give wrong drafts, the same in every layout."""
    layouts = Layouts(OPTIONS, llm.target, NgramDrafter)
    own = prompts()[:3]
    wrong = [[7] * OPTIONS.max_tokens for _ in own]
    recorded = record_drafts(own, wrong, 3)
    assert all(drafts[-1] == (7, 7, 7) for drafts in recorded.values())
    layouts.make_drafter = lambda: ReplayedDrafter(recorded)
    samples = [layouts.run(mode, own, 3) for mode in (RAGGED, EQSPEC)]
    assert samples[0].answers == samples[1].answers
    assert samples[0].num_drafted == samples[1].num_drafted > 0
    assert samples[0].num_accepted == samples[1].num_accepted


def test_the_engine_drafts_chains():
    """As the padded side does, which knows no trees."""
    assert not takes_trees(resolve(OPTIONS.spec.rule, greedy=True))


def test_the_engine_counts_no_round_in_which_a_prompt_was_read(llm: LLM, pair: SimpleNamespace):
    """One batch, plain: 11 tokens each after the first one. A draft model reads the prompt a round later, and that
    round is left out too.
    """
    plain = Layouts(OPTIONS, llm.target, NgramDrafter).run(RAGGED_PLAIN, prompts()[:3], 3)
    assert (plain.num_rounds, plain.num_emitted) == (11, 33)
    drafter = DraftModelDrafter(open_model(pair.draft, "float32", "cpu", 4096))
    options = replace(OPTIONS, drafter="draft_model", draft=str(pair.draft))
    drafted = Layouts(options, llm.target, lambda: drafter).run(RAGGED, prompts()[:1], 1)
    assert drafted.num_emitted + 2 <= len(drafted.answers[0]) == 12


def test_runs_do_not_help_one_another(llm: LLM):
    """A second run finds nothing of its prompts in the cache of prefixes."""
    layouts, longer = Layouts(OPTIONS, llm.target, NgramDrafter), [prompt * 6 for prompt in prompts()]
    before = llm.target.prefix_stats.num_found_tokens
    for _ in range(2):
        layouts.run(RAGGED, longer, 3)
    assert llm.target.prefix_stats.num_found_tokens == before


def test_prompts_differ_in_length():
    texts: Sequence[Sequence[int]] = [range(100)] * 14
    cut = uneven(texts, 90)
    lengths = [len(text) for text in cut]
    assert sorted(set(lengths)) == [25, 38, 50, 62, 75, 88, 90]
    assert all(text[-1] == 99 for text in cut)
    assert all(one != other for one, other in itertools.pairwise(lengths))
    with pytest.raises(InputError, match="max_tokens="):
        uneven(texts, 0)


def test_the_study_writes_what_it_measured(
    text_pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Folders with a tokenizer, the library's code, a dated file of numbers and a page; a second result of the day is
    numbered.
    """
    monkeypatch.setattr(
        module,
        "slices",
        lambda names, count: [SimpleNamespace(text=f"def f{i}(self, list):\n" * 9) for i in range(count)],
    )
    options = "--target T --draft D --drafter draft_model --num-draft 2 --batch-sizes 2 --pool 2 --max-tokens 6 --repeats 1 --dtype float32 --out O"  # noqa: E501
    places = {"T": str(text_pair.target), "D": str(text_pair.draft), "O": str(tmp_path)}
    words = [places.get(word, word) for word in options.split()]
    for more in (["--json"], []):
        monkeypatch.setattr(sys, "argv", ["layouts.py", *words, *more])
        assert main() == 0
    line, table = capsys.readouterr().out.split("\n", 1)
    told = json.loads(line)
    assert [row["num_identical"] for row in told["rows"]] == [4] * 7
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json", ".md", ".md"]
    raw = json.loads(Path(told["files"][0]).read_text())
    assert raw.pop("page")["title"]
    assert raw == told
    assert len(raw["options"]["prompt_tokens"]["2"]) == 4
    page = Path(told["files"][1]).read_text()
    for wanted in ("--batch-sizes 2", "python", "ragged / eqspec", "| exspec |", raw["date"][:10]):
        assert wanted in page
    assert "ragged / eqspec" in table


def test_a_refused_option_is_told_by_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["layouts.py", "--drafter", "draft_model"])
    assert main() == 2
    assert "draft=None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"drafter": "suffix"}, "drafter"),
        ({"drafter": "draft_model"}, "draft"),
        ({"draft": "d"}, "draft"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (4, 0)}, "batch_sizes"),
        ({"num_draft": 0}, "num_draft"),
        ({"pool": 0}, "pool"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"repeats": 0}, "repeats"),
    ],
)
def test_options_that_make_no_sense_are_refused(changed: dict[str, object], field: str):
    with pytest.raises((ConfigError, InputError), match=f"^{field}="):
        replace(OPTIONS, **changed)


def test_ratios_are_of_decoding_speeds(llm: LLM):
    """The engine's over its counterpart's, by batch size."""
    options = replace(OPTIONS, batch_sizes=(2,), repeats=1)
    rows = measure_layouts(Layouts(options, llm.target, NgramDrafter), prompts())
    speed = {row.mode: row.tokens_per_s for row in rows}
    found = ratios(rows)
    round_ms = {row.mode: row.round_ms for row in rows}
    assert found[2] == {
        f"{ragged} / {padded}": speed[ragged] / speed[padded] for padded, ragged in COUNTERPARTS.items()
    } | {
        f"{ragged} / {padded} per round": round_ms[padded] / round_ms[ragged] for padded, ragged in COUNTERPARTS.items()
    }
    (table,) = layout_tables(rows, found, {2: [7, 8, 9, 10]})
    assert table.title == "batch 2: 4 prompts of 7 to 10 tokens"
    assert {len(line) for line in table.lines} == {len(table.headings)}
    assert table.notes[0].startswith("Ratios: ragged / eqspec ")
