"""On a device no tensor is left on the CPU, and no forward waits for it; shown with fake tensors."""

from __future__ import annotations

import pytest
import torch

from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.interface import EarlySegment, Segment
from foretoken.transfer import to_device
from tests.helpers.fake_cuda import DEVICE, MISTAKES, REFUSALS, fake_cuda, fake_model

TREE = (-1, 0, 0, 1, 2, 1, 3)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str) -> None:
    """Everything that would wait for a device, or is not on it, raises here."""
    with fake_cuda(), pytest.raises(REFUSALS):
        MISTAKES[mistake](torch.empty(3, 4, device=DEVICE))


@pytest.mark.parametrize("name", ["llama", "llama-mqa", "mistral-sliding", "qwen2-layer-types", "qwen3-tied-biases"])
def test_a_ragged_batch(name: str) -> None:
    """A chunk, single tokens, a chain and a tree with taps, a shared prefix; nothing is asked of the device."""
    with fake_cuda() as transfers:
        model = fake_model(name)
        assert model.attention is BatchedAttention
        for sequence in range(4):
            model.open(sequence)
            model.forward(to_device(range(9), model.device), [Segment(sequence, 9)])
            model.commit(sequence, 9)
        model.fork(3, 4)
        for path in ((0, 2, 4), (0, 1, 3, 6)):  # both scattered: they are moved together
            segments = [
                Segment(0, 1, TREE, 8, num_taps=8),
                Segment(1, 30, (), 0, num_taps=3),
                Segment(2, 1),
                Segment(3, 1, (-1, 0, 1), 4),
                Segment(4, 1),
            ]
            num_rows = sum(segment.num_rows for segment in segments)
            out = model.forward(to_device(range(num_rows), model.device), segments, taps=(0, 2, 3))
            assert out.logits.shape == (14, 97)
            assert {tap.shape for tap in out.taps.values()} == {(11, 48)}
            assert all(tensor.device.type == "cuda" for tensor in (out.logits, *out.taps.values()))
            for segment, kept in zip(segments, (path, (), (), (0, 1), ()), strict=True):
                model.commit(segment.sequence, segment.num_pending, kept)
        assert transfers.lengths == []


def test_a_draft_that_grows_level_by_level_and_one_by_the_first_layers() -> None:
    """Held nodes need no transfer; rows that ran early are compared with those that come, in one."""
    with fake_cuda() as transfers:
        model = fake_model("llama")
        for sequence in range(3):
            model.open(sequence)
            model.forward(to_device(range(9), model.device), [Segment(sequence, 9)])
            model.commit(sequence, 9)
        for held, stop in ((0, 3), (3, 7)):
            model.forward(to_device(range(stop - held), model.device), [Segment(0, 0, TREE[:stop], 1, held)])
        assert transfers.lengths == []
        for sequence in (1, 2):
            for offset in range(3):
                early = [EarlySegment(sequence, offset, 1)]
                assert model.forward_early(to_device([5], model.device), early, range(2)).device.type == "cuda"
        chain = (-1, 0, 1)
        model.forward(to_device(range(8), model.device), [Segment(1, 1, chain, 4), Segment(2, 1, chain, 4)])
        assert len(transfers.lengths) == 1
