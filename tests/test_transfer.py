"""What the host reads of a device: in one transfer, once, and along with what can wait."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from foretoken.core import Draft
from foretoken.draft.merging import merge_drafts
from foretoken.engine.emission import likeliest_by_sort, token_logprobs
from foretoken.transfer import Later, to_host
from foretoken.verify import RULES
from foretoken.verify import base as verify_base
from tests.helpers.fake_cuda import DEVICE, fake_cuda
from tests.verify.batches import random_batch


def test_on_a_cpu_nothing_waits() -> None:
    later = Later(torch.tensor([1, 2]), torch.tensor([0.5]))
    assert to_host(torch.tensor([True])) == [[True]]
    assert later.numbers == [[1, 2], [0.5]]


def test_what_can_wait_comes_along_once() -> None:
    with fake_cuda() as transfers:
        later, dropped = Later(torch.empty(3, device=DEVICE)), Later(torch.empty(5, device=DEVICE))
        del dropped
        gc.collect()
        (found,) = to_host(torch.empty(2, device=DEVICE))
        assert (len(found), len(later.numbers[0])) == (2, 3)
        assert transfers.lengths == [[2, 3]]
        to_host(torch.empty(2, 4, device=DEVICE))
        alone = Later(torch.empty(4, device=DEVICE))
        to_host(torch.empty(2, 4, device=DEVICE))  # a matrix travels by itself
        assert len(alone.numbers[0]) == 4
        assert transfers.lengths == [[2, 3], [2], [2], [4]]


def test_another_thread_reads_its_own() -> None:
    found: list[int] = []
    with fake_cuda() as transfers:
        later = Later(torch.empty(3, device=DEVICE))

        def read() -> None:
            with fake_cuda() as own:
                to_host(torch.empty(2, device=DEVICE))
                found.extend(own.lengths[0])

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert found == [2]
        assert transfers.lengths == []
        assert len(later.numbers[0]) == 3


@pytest.mark.parametrize("tree", [False, True])
def test_known_tokens_are_those_of_the_draft(tree: bool) -> None:
    """Selected, merged and moved drafts know their tokens, and need no transfer for them."""
    for seed in range(20):
        draft, _, _ = random_batch(seed, tree)
        count = draft.num_requests
        merged = merge_drafts(2 * count, [([*range(count, 2 * count)], draft), ([*range(count)], draft)])
        for one in (draft.select([*range(count)][::-1]), draft.on("cpu"), merged, merged.select([count])):
            assert one.has_host_tokens
            assert one.host_tokens == one.tokens.tolist()


def test_a_draft_made_on_the_host_is_never_fetched_from_the_device() -> None:
    with fake_cuda() as transfers:
        draft = Draft(torch.tensor([3, 1]), (-1, 0), (0, 2), ("toy",))
        draft.__dict__["host_tokens"] = [3, 1]  # fake tensors have no numbers
        there = draft.on(DEVICE).select([0])
        assert (there.host_tokens, there.paths(0)) == ([3, 1], [(), (3,), (3, 1)])
        assert Draft(torch.empty(0, dtype=torch.int64, device=DEVICE), (), (0, 0), (None,)).host_tokens == []
        assert transfers.lengths == []


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_tokens_drawn_at_every_row_are_those_drawn_where_rounds_end(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [random_batch(seed) for seed in range(40)]
    expected = [RULES[rule].verify(*batch) for batch in batches]
    drawn: list[int] = []
    draw = verify_base.draw
    monkeypatch.setattr(verify_base, "is_awaited", lambda device: True)
    monkeypatch.setattr(verify_base, "draw", lambda weights, u: drawn.append(len(u)) or draw(weights, u))
    assert [RULES[rule].verify(*batch) for batch in batches] == expected
    assert drawn == [batch[0].num_rows for batch in batches]
    drawn.clear()
    monkeypatch.setattr(verify_base, "_MAX_EARLY_NUMBERS", 0)
    assert [RULES[rule].verify(*batch) for batch in batches] == expected
    assert drawn == []


def test_the_likeliest_tokens_by_sorting() -> None:
    """Ties, and rows with fewer possible tokens than are asked for."""
    logits = torch.randint(-3, 3, (30, 12), generator=torch.Generator().manual_seed(0)).float()
    logits[torch.rand(30, 12, generator=torch.Generator().manual_seed(1)) < 0.5] = -torch.inf
    logits[:, 0] = 0
    distribution = torch.log_softmax(logits, -1)
    for top in (1, 4, 12):
        expected = [one.top for one in token_logprobs(distribution, [0] * 30, top)]
        assert likeliest_by_sort(distribution, top) == expected
