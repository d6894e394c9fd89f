"""Drafts: rows and nodes line up, and taking a batch apart is the reverse of putting it together."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.core import Draft, Mass, Probes, Verdict, empty_draft
from foretoken.draft.merging import merge_drafts

VOCAB = 5
Part = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...], list[tuple[float, ...] | None]]


def random_draft(lengths: list[int], seed: int, with_laws: bool, name: str) -> Draft:
    """Trees with random parents; some nodes sampled, some rows with a distribution although nothing was drawn there."""
    dice = random.Random(seed)
    parents = [dice.randrange(-1, node) if node else -1 for length in lengths for node in range(length)]
    offsets = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    names = tuple(name if length else None for length in lengths)
    tokens = torch.tensor([dice.randrange(VOCAB) for _ in parents], dtype=torch.int64)
    if not with_laws:
        return Draft(tokens, tuple(parents), tuple(offsets), names)
    num_rows = len(parents) + len(lengths)
    distribution_of_row = [dice.choice([-1, row]) for row in range(num_rows)]
    sampled = tuple(dice.random() < 0.5 for _ in parents)
    distributions = torch.rand(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return Draft(
        tokens, tuple(parents), tuple(offsets), names, sampled, Mass(distributions, tuple(distribution_of_row))
    )


def parts_of(draft: Draft, b: int) -> Part:
    """One request's share, independent of where it lies: tokens, parents, which are sampled, the distribution of
    every row.
    """
    nodes = slice(draft.offsets[b], draft.offsets[b + 1])
    distributions = draft.mass.distributions if draft.mass is not None else torch.empty(0)
    rows = draft.rows_of([b])
    held = [
        None
        if draft.mass is None or draft.mass.distribution_of_row[row] < 0
        else tuple(distribution(distributions, draft.mass.distribution_of_row[row]))
        for row in rows
    ]
    sampled = draft.sampled[nodes] if draft.sampled else (False,) * draft.lengths[b]
    return tuple(draft.tokens[nodes].tolist()), draft.parents[nodes], sampled, held


def distribution(distributions: Tensor, index: int) -> list[float]:
    return distributions[index].tolist()


def test_rows_and_nodes_line_up() -> None:
    """Anchor first, then the nodes, request after request."""
    draft = Draft(torch.tensor([1, 2, 3, 4, 0]), (-1, 0, 0, -1, -1), (0, 3, 3, 5), ("d", None, "d"))
    assert (draft.num_requests, draft.num_nodes, draft.num_rows, draft.lengths) == (3, 5, 8, (3, 0, 2))
    assert [draft.anchor_row(b) for b in range(3)] == [0, 4, 5]
    assert draft.rows_of([0, 1, 2]) == list(range(8))
    assert draft.rows_of([2, 0]) == [5, 6, 7, 0, 1, 2, 3]
    assert draft.parent_rows == (0, 1, 1, 5, 5)
    assert [draft.depths(b) for b in range(3)] == [[1, 2, 2], [], [1, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_merged_drafts_come_apart_again(seed: int) -> None:
    """Requests of several drafters interleaved; each keeps its own tokens, tree and distributions. Some have no
    drafter.
    """
    dice = random.Random(seed)
    num_requests = 8
    owners = [dice.randrange(4) for _ in range(num_requests)]  # 3 = nobody
    parts = []
    for part in range(3):
        requests = [b for b in range(num_requests) if owners[b] == part]
        lengths = [dice.randrange(4) for _ in requests]
        parts.append((requests, random_draft(lengths, 10 * seed + part, with_laws=part != 1, name=f"d{part}")))
    whole = merge_drafts(num_requests, parts)
    for part, (requests, draft) in enumerate(parts):
        for local, b in enumerate(requests):
            assert parts_of(whole, b) == parts_of(draft, local)
            assert whole.drafters[b] == (f"d{part}" if draft.lengths[local] else None)
    for b in range(num_requests):
        if owners[b] == 3:
            assert (whole.lengths[b], whole.drafters[b]) == (0, None)
    order = dice.sample(range(num_requests), 5)
    chosen = whole.select(order)
    assert [parts_of(chosen, i) for i in range(5)] == [parts_of(whole, b) for b in order]


def test_one_drafter_for_all_is_handed_on_as_it_is() -> None:
    draft = random_draft([2, 0, 1], 3, True, "d")
    merged = merge_drafts(3, [([0, 1, 2], draft)])
    assert [parts_of(merged, b) for b in range(3)] == [parts_of(draft, b) for b in range(3)]


def test_an_empty_draft() -> None:
    draft = empty_draft(3)
    assert (draft.num_requests, draft.num_rows, draft.lengths, draft.parent_rows) == (3, 3, (0, 0, 0), ())
    assert merge_drafts(3, [([1], empty_draft(1))]).lengths == (0, 0, 0)
    assert empty_draft(0).num_rows == 0


def test_emitted_is_the_path_and_one_more() -> None:
    verdict = Verdict(((0, 2), ()), ((7, 8), ()), (9, 4), ("bonus", "residual"))
    assert (verdict.emitted(0), verdict.emitted(1)) == ((7, 8, 9), (4,))


@pytest.mark.parametrize(
    "wrong",
    [
        {"offsets": (0, 2)},
        {"offsets": (1, 3)},
        {"drafters": ("d", "d")},
        {"sampled": (True,), "mass": None},
        {"sampled": (True, False, False)},  # a sampled node needs a distribution
    ],
    ids=str,
)
def test_a_draft_that_does_not_add_up_is_refused(wrong: dict[str, object]) -> None:
    good = {"tokens": torch.tensor([1, 2, 3]), "parents": (-1, 0, 1), "offsets": (0, 3), "drafters": ("d",)}
    with pytest.raises(AssertionError):
        Draft(**(good | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_probes_go_with_their_requests(seed: int) -> None:
    """Through merging and taking apart; parts without probes among them, and requests without a part."""
    dice = random.Random(seed)
    num_requests = dice.randrange(1, 9)
    owners = [dice.randrange(4) for _ in range(num_requests)]  # 0: nobody drafts, 1: without probes
    own: dict[int, tuple[list[int], tuple[int, ...]]] = {}
    parts = []
    for owner in sorted(set(owners) - {0}):
        members = [b for b in range(num_requests) if owners[b] == owner]
        dice.shuffle(members)
        draft = random_draft([dice.randrange(4) for _ in members], seed, False, "d")
        if owner > 1:
            for b in members:
                count = dice.randrange(4)
                own[b] = (
                    [dice.randrange(VOCAB) for _ in range(count)],
                    tuple(dice.randrange(-1, node) if node else -1 for node in range(count)),
                )
            tokens = torch.tensor([token for b in members for token in own[b][0]], dtype=torch.int64)
            offsets = tuple(sum(len(own[b][0]) for b in members[:i]) for i in range(len(members) + 1))
            draft = replace(
                draft, probes=Probes(tokens, tuple(parent for b in members for parent in own[b][1]), offsets)
            )
        parts.append((members, draft))
    merged = merge_drafts(num_requests, parts).on("cpu")
    assert merged.probe_lengths == tuple(len(own.get(b, ([], ()))[0]) for b in range(num_requests))
    assert (merged.probes is None) == (not own)
    chosen = [b for b in range(num_requests) if dice.random() < 0.7]
    dice.shuffle(chosen)
    for draft, requests in ((merged, range(num_requests)), (merged.select(chosen), chosen)):
        for place, b in enumerate(requests):
            if draft.probes is not None:
                one = draft.probes.select([place])
                assert (one.tokens.tolist(), one.parents) == own.get(b, ([], ()))
        assert draft.num_rows == sum(draft.lengths) + len(requests)  # probes are no rows of R
