"""Validation of what a drafter returns, before it enters the step.

The rules assume that a draft is a tree with sub-probability mass: token ids of the vocabulary, parents before their
children, and distributions that are finite, not negative, sum to at most 1 and are not zero at a sampled token. A
violation would end in wrong text or in an error far from its cause. Whether a distribution is the one that was sampled
from cannot be checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from foretoken.core import BatchEntry, Draft
from foretoken.draft.lookup_tree import LookupTree
from foretoken.draft.tree import depths_of
from foretoken.errors import DraftError
from foretoken.transfer import to_device, to_host

_SUM_TOLERANCE = 1e-4  # float32 sums over the largest vocabularies are off by less


def draft_faults(draft: object, entries: Sequence[BatchEntry], vocab_size: int) -> dict[int, str]:
    """Reasons why drafts of requests are invalid, by index in `entries`; empty for a valid draft.

    Raises:
        DraftError: the draft as a whole is invalid.
    """
    if not isinstance(draft, Draft):
        raise DraftError(f"propose returned {type(draft).__name__}, not a Draft")
    _check_layout(draft, len(entries))
    unsound, missed = _mass_faults(draft, vocab_size)  # with the tokens: one transfer from a device
    tokens = draft.host_tokens
    faults: dict[int, str] = {}
    for b, ((start, stop), entry) in enumerate(zip(pairwise(draft.offsets), entries, strict=True)):
        fault = _tree_fault(
            tokens[start:stop], draft.parents[start:stop], entry.num_draft, vocab_size, entry.takes_trees
        )
        if fault is not None:
            faults[b] = fault
    if draft.probes is not None:
        _add_probe_faults(draft, entries, vocab_size, faults)
    if draft.mass is not None:
        _add_mass_faults(draft, unsound, missed, faults)
        _add_chain_faults(draft, entries, faults)
    return faults


def check_tree(tree: object, num_draft: int, vocab_size: int, takes_trees: bool) -> LookupTree:
    """Check and convert the preview of a lookup.

    Raises:
        DraftError: it is invalid.
    """
    if not isinstance(tree, LookupTree):
        raise DraftError(f"look_up returned {type(tree).__name__}, not a LookupTree")
    if not tree.tokens:
        return tree
    if not len(tree.tokens) == len(tree.parents) == len(tree.chances):
        raise DraftError(
            f"{len(tree.tokens)} tokens, {len(tree.parents)} parents and {len(tree.chances)} probabilities of one tree"
        )
    fault = _tree_fault(tree.tokens, tree.parents, num_draft, vocab_size, takes_trees)
    if fault is not None:
        raise DraftError(fault)
    if not all(0 < chance <= 1 + _SUM_TOLERANCE for chance in tree.chances):
        raise DraftError("a probability outside (0, 1]")
    return tree


def _check_layout(draft: Draft, num_requests: int) -> None:
    """Check that there is one segment per request, in order, and that tensors have the expected types."""
    if draft.num_requests != num_requests:
        raise DraftError(f"{draft.num_requests} segments for {num_requests} requests")
    if draft.tokens.dtype != torch.int64 or draft.tokens.dim() != 1:
        raise DraftError(f"tokens of type {draft.tokens.dtype} and shape {list(draft.tokens.shape)}, not int64 [N]")
    if any(start > stop for start, stop in pairwise(draft.offsets)):
        raise DraftError("offsets that decrease")
    misfit = draft.misfit()  # under python -O nothing has looked yet
    if misfit is not None:
        raise DraftError(misfit)


def _tree_fault(
    tokens: Sequence[int],
    parents: Sequence[int],
    most: int,
    vocab_size: int,
    takes_trees: bool,
    are_probes: bool = False,
) -> str | None:
    """Why one request's tokens are no tree of at most `most` known tokens; probes may repeat one below one parent."""
    if not tokens:
        return None
    if len(tokens) > most:
        return f"{len(tokens)} tokens where at most {most} were requested"
    other = next((kind for kind in {*map(type, tokens), *map(type, parents)} if kind is not int), None)
    if other is not None:
        return f"a token or a parent of type {other.__name__}, not int"
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return f"token id {min(tokens) if min(tokens) < 0 else max(tokens)} outside the vocabulary of {vocab_size}"
    if tuple(parents) == tuple(range(-1, len(tokens) - 1)):
        return None  # a chain
    if not takes_trees:
        return "a tree where the rule accepts chains only"
    if not all(-1 <= parent < node for node, parent in enumerate(parents)):
        return "a parent that does not come before its child"
    if not are_probes and len(set(zip(parents, tokens, strict=True))) < len(tokens):
        return "the same token twice after one parent"
    return None


def _add_probe_faults(draft: Draft, entries: Sequence[BatchEntry], vocab_size: int, faults: dict[int, str]) -> None:
    """Check that probes are trees within the granted number and depth."""
    assert draft.probes is not None
    tokens: list[int] = to_host(draft.probes.tokens)[0]
    for b, ((start, stop), entry) in enumerate(zip(pairwise(draft.probes.offsets), entries, strict=True)):
        parents = draft.probes.parents[start:stop]
        fault = _tree_fault(tokens[start:stop], parents, entry.num_probe, vocab_size, takes_trees=True, are_probes=True)
        if fault is None and max(depths_of(parents), default=0) > entry.probe_depth:
            fault = f"deeper than {entry.probe_depth}"
        if fault is not None:
            faults.setdefault(b, f"probes: {fault}")


def _mass_faults(draft: Draft, vocab_size: int) -> tuple[set[int], set[int]]:
    """Distributions that are no sub-probability mass, and sampled nodes whose token has none; the draft's tokens come
    to the host with them.
    """
    mass = draft.mass
    if mass is None:
        return set(), set()
    distributions = mass.distributions
    if (
        distributions.dtype not in (torch.float32, torch.float64)
        or distributions.dim() != 2
        or distributions.shape[1] != vocab_size
    ):
        raise DraftError(
            f"distributions of type {distributions.dtype} and shape {list(distributions.shape)}, "
            f"not float32 [M, {vocab_size}]"
        )
    distribution_of_row = mass.distribution_of_row
    if (
        len(distribution_of_row) != draft.num_rows
        or min(distribution_of_row, default=-1) < -1
        or max(distribution_of_row, default=-1) >= distributions.shape[0]
    ):
        raise DraftError(
            f"distribution_of_row does not lead from {draft.num_rows} rows to {distributions.shape[0]} distributions"
        )
    sampled = [node for node, drawn in enumerate(draft.sampled) if drawn]
    drawn_from = [distribution_of_row[draft.parent_rows[node]] if draft.parents[node] >= -1 else -1 for node in sampled]
    if -1 in drawn_from:
        raise DraftError("a sampled token without its distribution")
    if not distributions.shape[0]:
        return set(), set()
    rows, nodes = to_device([drawn_from, sampled], distributions.device)
    tokens = to_device(draft.tokens, distributions.device)
    at_token = distributions[rows, tokens[nodes] % vocab_size]
    least, sums, masses, known = to_host(distributions.amin(-1), distributions.sum(-1), at_token, tokens)
    if not draft.has_host_tokens:
        draft.with_host_tokens(known)
    figures = enumerate(zip(least, sums, strict=True))
    unsound = {number for number, (low, whole) in figures if not (low >= 0 and whole <= 1 + _SUM_TOLERANCE)}
    return unsound, {node for node, chance in zip(sampled, masses, strict=True) if not chance > 0}


def _add_chain_faults(draft: Draft, entries: Sequence[BatchEntry], faults: dict[int, str]) -> None:
    """Check that a row of a chain has a distribution exactly where its token was sampled, as rules for chains expect:
    a tree may say of a token that was not sampled what else might have been.
    """
    assert draft.mass is not None
    laws = draft.mass.distribution_of_row
    for b, ((start, stop), entry) in enumerate(zip(pairwise(draft.offsets), entries, strict=True)):
        if b in faults or entry.takes_trees:
            continue
        if any(laws[draft.parent_rows[n]] >= 0 for n in range(start, stop) if not (draft.sampled and draft.sampled[n])):
            faults[b] = "a distribution beside a token that was not sampled, where the rule accepts chains only"


def _add_mass_faults(draft: Draft, unsound: set[int], missed: set[int], faults: dict[int, str]) -> None:
    assert draft.mass is not None
    if not unsound and not missed:
        return
    for b, (start, stop) in enumerate(pairwise(draft.offsets)):
        if unsound.intersection(draft.mass.distribution_of_row[start + b : stop + b + 1]):
            faults.setdefault(b, "a distribution that is not finite, has negative mass, or sums to more than 1")
        elif missed.intersection(range(start, stop)):
            faults.setdefault(b, "a sampled token with mass 0 in its distribution")
