"""Both engines on GGUF files: which tokens are scored, what their programs print, and what becomes of it."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.errors import ForetokenError, InputError
from foretoken.model.names import model_folder
from foretoken.model.open import open_model
from foretoken.text.tokenizer import load_tokenizer
from studies.gguf_rivals.__main__ import BITS, ROWS, summary
from studies.gguf_rivals.prompts import prompt_lines
from studies.gguf_rivals.quality import (
    compare_tokens,
    our_nats,
    parse_perplexity,
    scored_bytes,
    windows_of,
)
from studies.gguf_rivals.row_cost import MOST_VERIFIED, compared, our_times, parse_rows

TEXT = "def add(first, second):\n    return first + second\n\n\n" * 8


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_folder("reference:draft"))


@pytest.fixture(scope="module")
def model():
    return open_model(model_folder("reference:draft"), "float32", "cpu", cache_tokens=256)


def test_the_second_half_of_a_window_is_scored_behind_the_first(tokenizer, model):
    windows = windows_of(tokenizer, TEXT, 16, 3)
    assert [len(window) for window in windows] == [16] * 3
    assert [token for window in windows for token in window] == tokenizer.encode(TEXT)[:48]
    scored = [window[9:] for window in windows]
    assert scored_bytes(tokenizer, windows) == sum(len(tokenizer.decode(ids).encode()) for ids in scored)

    from foretoken.model.interface import Segment

    by_hand = 0.0
    for window in windows:  # one token at a time
        model.open(7)
        for place, token in enumerate(window):
            logits = model.forward(torch.tensor([token]), [Segment(7, 1)]).logits[0].double()
            model.commit(7, 1)
            if 8 <= place < 15:
                by_hand -= float(torch.log_softmax(logits, 0)[window[place + 1]])
        model.close(7)
    assert our_nats(model, windows) == pytest.approx(by_hand, rel=1e-5)  # float32, in another order of sums


def test_a_text_of_less_than_two_windows_is_refused(tokenizer):
    with pytest.raises(InputError, match="at least 2 windows of 500 tokens"):
        windows_of(tokenizer, "short", 500, 4)


def test_other_tokens_than_ours_are_an_error_with_their_place():
    compare_tokens([[1, 2, 3]], [[0, 2, 3]])  # the first of a window may be a BOS
    with pytest.raises(ForetokenError, match=r"window 1, token 2: .* gives 3 here and 4 in llama\.cpp"):
        compare_tokens([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 2, 4]])


def test_recorded_perplexity():
    # llama.cpp 0.5.0-dev; the two streams write into one another's lines
    log = "I perplexity: 0.14 seconds per pass - ETA 0.00.826.947 I Final estimate: PPL = 8.1766 +/- 0.64434\n"
    assert parse_perplexity("0.00 minutes\n[1]9.0089,[2]6.8471,\n", log) == (8.1766, 0.64434)
    with pytest.raises(ForetokenError, match="gave no result"):
        parse_perplexity("[1]9.0089,", "ETA ")


def test_recorded_times_by_rows():
    output = '[{"n_prompt": 1, "samples_ns": [2000000, 3000000]}, {"n_prompt": 4, "samples_ns": [5000000, 5500000]}]'
    assert parse_rows(output, (1, 4)) == {1: [2.0, 3.0], 4: [5.0, 5.5]}
    for broken, counts in (("", (1,)), ("[]", (1,)), (output, (8,))):
        with pytest.raises(ForetokenError, match="llama-bench gave no result"):
            parse_rows(broken, counts)


def test_every_number_of_rows_is_timed_as_often(model):
    times = our_times(model, (1, 3, MOST_VERIFIED + 1), depth=5, repeats=2)
    assert {count: len(values) for count, values in times.items()} == {1: 2, 3: 2, MOST_VERIFIED + 1: 2}
    assert min(min(values) for values in times.values()) > 0


def test_ratios_by_rows_with_their_intervals():
    ours, theirs = [{1: [2.0, 2.0], 4: [3.0, 3.0]}] * 3, [{1: [3.0, 3.0], 4: [12.0, 12.0]}] * 3
    one, four = compared(ours, theirs)
    assert (one["theirs_over_ours"], four["theirs_over_ours"]) == (1.5, 4.0)
    assert four["theirs_over_ours_interval"] == [4.0, 4.0]
    assert (four["ours_over_one_row"], four["theirs_over_one_row"]) == (1.5, 4.0)
    varied = [{1: [2.0, 4.0]}, {1: [3.0, 5.0]}]
    (row,) = compared(varied, [{1: [4.0, 4.0]}, {1: [4.0, 4.0]}])
    assert row["ours_ms_interval"][0] < row["ours_ms"] == 3.5 < row["ours_ms_interval"][1]
    assert compared(ours[:1], theirs[:1])[0]["ours_ms_interval"] is None


def test_only_turns_of_both_engines_count():
    def line(part, engine, turn, **values):
        return {"file": "a.gguf", "part": part, "engine": engine, "turn": turn, **values}

    lines = [
        line(BITS, "foretoken", 0, bits_per_byte=1.01),
        line(BITS, "llama.cpp", 0, bits_per_byte=1.0),
        line(ROWS, "foretoken", 0, times_ms={"1": [2.0]}),
        line(ROWS, "llama.cpp", 0, times_ms={"1": [4.0]}),
        line(ROWS, "foretoken", 1, times_ms={"1": [9.0]}),  # stopped before the other's turn
    ]
    found = summary(lines)["a.gguf"]
    assert math.isclose(found[BITS]["ours_more_by"], 0.01)
    assert found[ROWS][0]["theirs_over_ours"] == 2.0
    assert summary(lines[:1])["a.gguf"] == {}


def test_prompts_of_every_slice_with_names_of_their_own(tokenizer):
    lines = prompt_lines(tokenizer, ("edit", "chat"), 2, max_tokens=12)
    assert [line["slice"] for line in lines] == ["edit", "edit", "chat", "chat"]
    assert len({line["name"] for line in lines}) == 4
    assert all(len(tokenizer.encode(line["prompt"])) <= 13 for line in lines[2:])
