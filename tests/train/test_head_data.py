"""Windows of text for heads, the vocabulary counted from them, and settings with overrides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretoken.errors import ConfigError, InputError
from foretoken.train.head_data import Batches, TokenText, split_documents
from foretoken.train.head_run import HeadSettings
from foretoken.train.run_options import with_overrides, with_settings
from foretoken.train.students import coverage, most_frequent

PAIRS = [((1, 2, 3), (4, 5)), ((6,), tuple(range(10, 40))), ((7, 8), (9,))]


def test_windows_are_read_from_the_beginning_of_a_document_and_padded() -> None:
    text = TokenText.answered(PAIRS)
    seen = set()
    for number in range(60):
        ids, wanted = text.window(number, 8, seed=0)
        assert len(ids) == len(wanted) == 9
        if ids[0] == 1:
            assert ids.tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 0]
            assert wanted.tolist() == [False] * 3 + [True] * 2 + [False] * 4
        elif ids[0] == 7:
            assert ids.tolist() == [7, 8, 9, 0, 0, 0, 0, 0, 0]
        else:  # the long document begins anywhere
            assert (np.diff(ids[1:]) == 1).all()
            assert wanted[1:].all()
        seen.add(int(ids[0]))
    assert {1, 6} <= seen
    assert len(seen) > 5


def test_documents_are_drawn_by_what_they_want() -> None:
    text = TokenText.answered(PAIRS)
    long = sum(int(text.window(number, 40, seed=1)[0][0] == 6) for number in range(300))
    assert abs(long / 300 - 30 / 33) < 0.06


def test_a_batch_is_a_function_of_seed_and_number() -> None:
    text = TokenText.running(np.arange(500, dtype=np.uint16))
    first, _ = text.batch([3, 4], 16, seed=7)
    again, wanted = text.batch([4, 3], 16, seed=7)
    assert first.tolist() == again.flip(0).tolist()
    assert wanted.all()
    assert text.batch([3, 4], 16, seed=8)[0].tolist() != first.tolist()


def test_whole_documents_are_held_out() -> None:
    data = split_documents([((i,), (i, i)) for i in range(1, 41)], "answers", held_out_share=0.1)
    train, held_out = set(data.train.ids.tolist()), set(data.held_out.ids.tolist())
    assert not train & held_out
    assert len(held_out) == 4
    for pairs in ([((1,), (2,)), ((3,), ())], [((1,), (2,))] * 3):
        with pytest.raises(InputError, match="at least two answers that differ"):
            split_documents(pairs, "answers")


def test_no_text_is_learnt_and_held_out() -> None:
    """Greedy answers to a prompt that comes twice are the same document."""
    data = split_documents([((i % 7,), (i % 7, 9)) for i in range(40)], "answers", held_out_share=0.25)
    firsts = [set(text.ids[text.bounds[:-1]].tolist()) for text in (data.train, data.held_out)]
    assert firsts == [{0, 1, 2, 4, 5, 6}, {3}]
    assert len(data.train.bounds) + len(data.held_out.bounds) == 42


def test_the_vocabulary_holds_the_most_frequent_tokens_and_the_special_ones() -> None:
    counts = torch.tensor([0, 5, 9, 1, 7, 0])
    vocabulary = most_frequent(counts, 3, always=[0])
    assert vocabulary.ids.tolist() == [0, 2, 4]
    assert coverage(counts, vocabulary) == pytest.approx(16 / 22)
    assert most_frequent(counts, None).is_whole
    for size in (1, 7):
        with pytest.raises(ConfigError, match="draft_vocab_size"):
            most_frequent(counts, size, always=[0, 5])


def test_settings_are_typed_and_nested() -> None:
    settings = with_settings(HeadSettings(), {"train": {"tokens": 5000, "loss": {"kind": "tv"}}})
    settings = with_overrides(
        settings, ["train.tokens=2e4", "head.taps=1,2,3", "head.fc_norm=true", "head.draft_vocab_size=none"]
    )
    assert settings.train.tokens == 20_000
    assert settings.train.loss.kind == "tv"
    assert settings.head.taps == (1, 2, 3)  # type: ignore[union-attr]
    assert settings.head.fc_norm is True  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("train.loss.knd=tv", r"train\.loss\.knd.*did you mean train\.loss\.kind"),
        ("nothing=1", "known: train, .*head"),
        ("train.tokens=1.5", r"train\.tokens='1\.5': must be a whole number"),
        ("train.loss.kind=mse", "choose one of kl"),
        ("head.fc_norm=2", "must be true or false"),
        ("train=3", "group of settings"),
        ("train.tokens", "NAME=VALUE"),
    ],
)
def test_settings_that_do_not_exist_or_do_not_fit_are_named(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        with_overrides(HeadSettings(), [text])


def test_a_batch_ends_behind_the_last_token_that_is_wanted() -> None:
    text = TokenText.answered([(range(10), range(10, 10 + length)) for length in (100, 300)])
    sizes = set()
    for number in range(40):
        tokens, wanted = text.batch([number], 200, seed=1)
        assert tokens.shape == wanted.shape
        assert bool(wanted[0, -1])
        sizes.add(tokens.shape[1])
    assert sizes == {110, 201}  # the short document without its padding, the long one cut to the window
    both, _ = text.batch(range(40), 200, seed=1)
    assert both.shape == (40, 201)


def test_a_batch_of_short_answers_has_room_for_every_place() -> None:
    text = TokenText.answered([([1, 2], [3, 4]), ([5], [6])])
    tokens, wanted = text.batch([0, 1], 200, seed=0)
    assert tokens.shape == (2, 64)
    assert int(wanted.sum()) >= 2


def test_batches_dealt_out_by_length_hold_the_same_windows_with_less_padding() -> None:
    text = TokenText.answered([((1, 2), range(100, 100 + length)) for length in range(70, 190)])
    plain, grouped = (Batches(text, 8, 200, seed=3, group=group) for group in (1, 6))
    for place in (0, 2):
        numbers = range(6 * place, 6 * place + 6)
        apart, together = ([one.at(number) for number in numbers] for one in (plain, grouped))
        rows = [
            sorted(ids[mask].tolist() for tokens, wanted, _ in found for ids, mask in zip(tokens, wanted, strict=True))
            for found in (apart, together)
        ]
        assert rows[0] == rows[1]
        sizes = [sum(tokens.numel() for tokens, _, _ in found) for found in (apart, together)]
        assert sizes[1] < 0.85 * sizes[0]
        assert sum(weight for _, _, weight in together) == pytest.approx(6)
        for _, wanted, weight in together:  # each token counts alike, and no batch is much larger than another
            assert int(wanted.sum()) == pytest.approx(weight * sum(map(len, rows[0])) / 6)
            assert 0.6 < weight < 1.6
        again = Batches(text, 8, 200, seed=3, group=6).at(numbers[4])
        assert torch.equal(again[0], together[4][0])


def test_no_batch_of_a_group_is_empty() -> None:
    text = TokenText.answered([((1,), (2,)), ((1,), range(3, 190))])
    for number in range(12):
        tokens, wanted, _ = Batches(text, 1, 200, seed=0, group=4).at(number)
        assert len(tokens) >= 1
        assert bool(wanted.any())
