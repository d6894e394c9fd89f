"""The text that drafters learn from: windows of committed rows, bounded, a part of them held out."""

from __future__ import annotations

import torch

from foretoken.adapt.buffer import WINDOW_ROWS, ExampleBuffer, Window
from foretoken.draft.base import HiddenRows

LAYERS = (1, 3)


def rows(request_id: int, start: int, stop: int) -> HiddenRows:
    """Row t has token t + 1000 * request, and layer l the state (t, l)."""
    tokens = tuple(1000 * request_id + t for t in range(start, stop))
    states = {
        layer: torch.stack([torch.tensor([float(t), layer]) for t in range(start, stop)]) for layer in (*LAYERS, 2)
    }
    return HiddenRows(request_id, start, tokens, 1000 * request_id + stop, states)


def check(window: Window, num_prompt: int) -> int:
    """Rows, tokens and states belong together; the position of the first row."""
    start = int(window.tokens[0]) % 1000
    assert (window.tokens % 1000).tolist() == list(range(start, start + window.num_rows + 1))
    assert set(window.states) == set(LAYERS)
    for layer in LAYERS:
        assert window.states[layer].tolist() == [[t, layer] for t in range(start, start + window.num_rows)]
        assert not window.states[layer].is_inference()
    assert window.wanted.tolist() == [t >= num_prompt for t in range(start, start + window.num_rows + 1)]
    return start


def all_windows(buffer: ExampleBuffer) -> list[Window]:
    return sorted([*buffer.held_out(), *buffer._windows[False]], key=lambda window: window.number)


@torch.inference_mode()
def test_chunks_become_windows_without_a_gap() -> None:
    buffer = ExampleBuffer(LAYERS, 10_000)
    buffer.begin(1, 100, is_greedy=True)
    ends = [60, 100, 101, 104, 130, 255, 256, 257, 300]
    for start, stop in zip([0, *ends], ends, strict=False):
        buffer.add(rows(1, start, stop))
    buffer.end(1)
    with torch.inference_mode(False):
        windows = all_windows(buffer)
        assert [check(window, 100) for window in windows] == [0, WINDOW_ROWS, 2 * WINDOW_ROWS]
        assert windows[-1].num_rows == 300 - 2 * WINDOW_ROWS
        assert torch.ones(2, requires_grad=True).mul(windows[0].states[1][0]).sum().requires_grad


def test_rows_after_a_preemption_come_once_and_an_adopted_prefix_leaves_a_gap() -> None:
    buffer = ExampleBuffer(LAYERS, 10_000)
    buffer.begin(1, 10, is_greedy=False)
    buffer.add(rows(1, 0, 40))
    buffer.add(rows(1, 0, 20))  # read again after a preemption
    buffer.add(rows(1, 20, 60))
    buffer.end(1)
    (window,) = all_windows(buffer)
    assert check(window, 10) == 0
    assert window.num_rows == 60
    buffer.begin(2, 90, is_greedy=False)
    buffer.add(rows(2, 80, 130))
    buffer.end(2)
    assert check(all_windows(buffer)[-1], 90) == 80


def test_prompts_alone_and_snippets_are_not_kept() -> None:
    buffer = ExampleBuffer(LAYERS, 10_000)
    buffer.begin(1, 500, is_greedy=True)
    buffer.add(rows(1, 0, 400))
    buffer.end(1)
    buffer.begin(2, 2, is_greedy=True)
    buffer.add(rows(2, 0, 12))
    buffer.end(2)
    buffer.add(rows(3, 0, 200))  # a request that began before
    assert not all_windows(buffer)


def fill(buffer: ExampleBuffer, num_requests: int, num_rows: int = 64) -> None:
    for request in range(1, num_requests + 1):
        buffer.begin(request, 4, is_greedy=True)
        buffer.add(rows(request, 0, num_rows))
        buffer.end(request)


def test_every_fourth_request_is_held_out_and_never_learnt() -> None:
    buffer = ExampleBuffer(LAYERS, 100_000)
    fill(buffer, 40)
    held_out = {int(window.tokens[0]) // 1000 for window in buffer.held_out()}
    assert held_out == set(range(4, 41, 4))
    sampled = {int(buffer.sample().tokens[0]) // 1000 for _ in range(400)}
    assert sampled == set(range(1, 41)) - held_out
    assert buffer.num_added == 30 * 64


def test_the_newest_text_is_kept() -> None:
    buffer = ExampleBuffer(LAYERS, 1024)
    fill(buffer, 60)
    assert buffer.num_tokens <= 1024
    kept = {int(window.tokens[0]) // 1000 for window in all_windows(buffer)}
    assert min(kept) > 30
    assert {59, 60} <= kept
    assert [window.number for window in buffer.held_out(since=55)] == [55, 59]
    buffer.clear()
    assert buffer.num_tokens == 0
    assert buffer.sample() is None


def test_windows_in_which_draft_tokens_were_rejected_are_learnt_more_often() -> None:
    buffer = ExampleBuffer(LAYERS, 100_000)
    for request in (1, 2):
        buffer.begin(request, 0, is_greedy=True)
        for position in range(1, 10) if request == 2 else ():
            buffer.reject(request, position)
        buffer.add(rows(request, 0, 64))
        buffer.end(request)
    assert [window.num_rejected for window in all_windows(buffer)] == [0, 9]
    sampled = [int(buffer.sample().tokens[0]) // 1000 for _ in range(500)]
    assert 400 < sampled.count(2) < 500


def test_a_rejection_counts_in_the_window_of_its_token() -> None:
    buffer = ExampleBuffer(LAYERS, 100_000)
    buffer.begin(1, 0, is_greedy=True)
    for position in (WINDOW_ROWS, WINDOW_ROWS + 1, WINDOW_ROWS + 2):
        buffer.reject(1, position)
    buffer.add(rows(1, 0, 2 * WINDOW_ROWS))
    assert [window.num_rejected for window in all_windows(buffer)] == [1, 2]
