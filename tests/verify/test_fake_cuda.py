"""Every rule on a device: nothing is left on the CPU, and waits do not grow with the number of requests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.core import Draft, Mass, Uniforms
from foretoken.draft.merging import merge_drafts
from foretoken.transfer import to_device
from foretoken.verify import RULES, verify_batch
from tests.helpers.fake_cuda import DEVICE, fake_cuda
from tests.verify.batches import ANY, random_batch

# Transfers of `verify`: what decides and the tokens it ends with; `block` also sums residuals in between.
TRANSFERS = {"greedy": 1, "coupled": 1, "rejection": 2, "typical": 2, "block": 3}


def there(draft: Draft, probs: Tensor, uniforms: Uniforms) -> tuple[Draft, Tensor, Uniforms]:
    """A batch on the fake device."""
    accept, following = to_device(uniforms.accept, DEVICE, None), to_device(uniforms.next, DEVICE, None)
    race = tuple(to_device(noise, DEVICE, None) for noise in uniforms.race)
    return draft.on(DEVICE), to_device(probs, DEVICE, None), Uniforms(accept, following, race)


@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_nothing_is_left_on_the_cpu(rule: str, tree: bool) -> None:
    for seed in range(5):
        draft, probs, uniforms = random_batch(seed, tree)
        with fake_cuda(seed, probs.shape[-1]) as transfers:
            batch = there(draft, probs, uniforms)
            verdict = RULES[rule].verify(*batch)
            assert len(verdict.paths) == draft.num_requests
            assert len(transfers.lengths) <= TRANSFERS.get(rule, 99)
            for tensor in (
                RULES[rule].accept_probabilities(*batch[:2]),
                RULES[rule].next_token_weights(*batch[:2], range(0, draft.num_rows, 2)),
            ):
                assert tensor.device.type == "cuda"
            rules = [rule if b % 2 else "greedy" for b in range(draft.num_requests)]
            assert len(verify_batch(*batch, rules).paths) == draft.num_requests


def repeated(draft: Draft, probs: Tensor, uniforms: Uniforms, times: int) -> tuple[Draft, Tensor, Uniforms]:
    """The same requests several times over."""
    count = draft.num_requests
    parts = [([*range(i * count, (i + 1) * count)], draft) for i in range(times)]
    whole = merge_drafts(times * count, parts)
    race = uniforms.race * times
    return whole, probs.repeat(times, 1), Uniforms(uniforms.accept.repeat(times), uniforms.next.repeat(times), race)


@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_waiting_does_not_grow_with_the_batch(rule: str, tree: bool) -> None:
    """One transfer of all that decides, one of the next tokens; rules that test sampled siblings one after another, or
    from the leaves up, one more for each of those steps.
    """
    for seed in range(2):
        counts = []
        for times in (1, 8):
            batch = repeated(*random_batch(seed, tree), times)
            with fake_cuda(seed, batch[1].shape[-1]) as transfers:
                RULES[rule].verify(*there(*batch))
                counts.append(len(transfers.lengths))
        assert counts[0] == counts[1] <= TRANSFERS.get(rule, 2 + batch[0].num_nodes)


def test_a_tree_without_sampled_siblings_is_one_step() -> None:
    """The trees that drafters propose most: at most one sampled child of a row, decided top down."""
    parents, num_rows = (-1, -1, 0, 0, 2), 6
    sampled, mass_rows = (True, False, True, False, False), (0, 1, -1, 2, -1, -1)
    draft = Draft(torch.arange(5), parents, (0, 5), ("toy",), sampled, Mass(torch.full((3, 7), 1 / 7), mass_rows))
    uniforms = Uniforms(torch.rand(5, dtype=torch.float64), torch.rand(1, dtype=torch.float64))
    with fake_cuda(vocab_size=7) as transfers:
        RULES["tree"].verify(*there(draft, torch.full((num_rows, 7), 1 / 7), uniforms))
    assert len(transfers.lengths) == 3
