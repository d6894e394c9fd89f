"""What all rules share: the interface, sampling from weights and by exponential race, the residual distribution.

Probabilities and decisions are separate, so that a rule can be proved by enumeration: `accept_probabilities` and
`next_token_weights` give the probability of every branch, and `verify` only compares them with uniforms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from foretoken.core import Draft, RaceRows, Uniforms, Verdict
from foretoken.kernels.sampling import kernel_for
from foretoken.transfer import to_device

_CACHED_NUMBERS = 262_144  # 1 MB of float32
_MAX_EARLY_NUMBERS = 4_194_304  # 32 MB of float64, a few passes over which take less than a wait


class Rule(ABC):
    """Decides which drafted tokens are accepted; holds no model, cache, clock or generator.

    Generic in dtype: float32 in production, float64 in the proofs. A rule that is not `lossless` changes the target's
    distribution and runs only if the user asks for it by name. A rule without `takes_trees` asserts that every request
    has a chain. A rule with `needs_race` reads `Uniforms.race`; one without `needs_uniforms` reads neither `accept` nor
    `next`.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    needs_race: ClassVar[bool] = False
    needs_uniforms: ClassVar[bool] = True

    @abstractmethod
    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """Conditional probability of accepting each node given that its parent was accepted: [R, V] -> [N].

        The children of one row sum to at most 1; with the remaining probability the round ends at that row.
        """

    @abstractmethod
    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """Unnormalised weights of the next token if the accepted path ends at `rows`: -> [len(rows), V]."""

    @abstractmethod
    def verify(self, draft: Draft, target_probs: Tensor, uniforms: Uniforms) -> Verdict:
        """Choose the accepted path and the next token of every request.

        `target_probs` [R, V] is the target's distribution at each row after temperature and filters. The result for a
        request depends on its own rows and uniforms only.
        """


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling: weights [B, V] (not normalised) and uniforms [B] in [0, 1) -> token ids [B].

    A token of weight zero is never returned. A row of zeros gives an arbitrary valid id.
    """
    kernel = kernel_for(weights)
    if kernel is not None:
        return kernel.draw(weights, u.to(torch.float64))
    cumulative = weights.to(torch.float64).cumsum(-1)  # [B, V]
    # right=True: the first token whose cumulative weight EXCEEDS the point, so u = 0 skips leading zero weights.
    index = torch.searchsorted(cumulative, u.to(torch.float64).unsqueeze(-1) * cumulative[:, -1:], right=True)  # [B, 1]
    found = index.clamp(max=weights.shape[-1] - 1)  # [B, 1]
    if weights.device.type == "cpu" and bool((weights.gather(-1, found) > 0).all()):
        return found.squeeze(-1)  # a sequential prefix sum is monotone: the correction below is not needed
    # A parallel prefix sum need not be monotone in its last bits, and rounding can exceed the end: take the nearest
    # token at or after the index that has weight, else the last one that has.
    ids = torch.arange(weights.shape[-1], device=weights.device)  # [V]
    usable = weights > 0
    last = torch.where(usable, ids, 0).amax(-1, keepdim=True)  # [B, 1]
    return torch.where(usable & (ids >= index), ids, last).amin(-1)


def draws_anywhere(
    draft: Draft, target_probs: Tensor, weights: Callable[[Sequence[int]], Tensor], uniforms: Uniforms
) -> tuple[Tensor, ...]:
    """The token that would end each request's round at each of its rows, one vector [R] of ids from `weights(rows)`.

    On a device this costs less than to wait for the rows where rounds end, as long as the rows are few. On a CPU, where
    nobody waits, and for many rows it is ().
    """
    if not is_awaited(target_probs.device) or target_probs.numel() > _MAX_EARLY_NUMBERS:
        return ()
    owners = [b for b, length in enumerate(draft.lengths) for _ in range(1 + length)]
    return (draw(weights(range(draft.num_rows)), uniforms.next[to_device(owners, uniforms.next.device)]),)


def is_awaited(device: torch.device) -> bool:
    """Whether the host waits for numbers of `device`."""
    return device.type != "cpu"


def first_max(rows: Tensor) -> Tensor:
    """Index of the maximum of each row, the first among equals (a NaN counts as largest): [..., V] -> [...].

    Same as `Tensor.argmax`, whose CPU kernel is not vectorised: numpy's is ten times as fast in 32 bits, a hundred
    times in 16.
    """
    if rows.device.type != "cpu":
        return rows.argmax(-1)
    numbers = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    return torch.from_numpy(numbers.numpy().argmax(-1))


def race_winner(distribution: Tensor, noise: Tensor) -> Tensor:
    """Sample by exponential race: weights [n, V] and Exp(1) noise [n, V] -> argmin noise / weights, ids [n].

    The result is distributed as the normalised weights. A token of weight zero is never returned; ties go to the lowest
    id.
    """
    # The inverse ratio is safe for a weight of zero; clamping avoids 0 / 0 for noise of exactly zero.
    return first_max(distribution / noise.clamp(min=torch.finfo(noise.dtype).tiny))


def race_winners(distributions: Tensor, races: Sequence[Tensor | RaceRows]) -> Tensor:
    """`race_winner` of weights [n, V] with the noise of some requests, whose rows follow one another: -> ids [n]."""
    kernel, keys = kernel_for(distributions), list[tuple[int, int, int]]()
    for race in races:
        if isinstance(race, RaceRows):
            keys += [(*race.noise.key, position) for position in race.positions]
    if kernel is not None and len(keys) == len(distributions):
        return kernel.race(distributions, keys)
    rows = [race.noise.at(race.positions) if isinstance(race, RaceRows) else race for race in races]
    noise = torch.cat(rows) if rows else distributions
    return race_winner(distributions, to_device(noise, distributions.device, None))


def accept_ratio(weight: float, mass: float) -> float:
    """min(1, weight / mass): the probability of accepting a token sampled with `mass` for `weight`; 0 if
    `weight` is 0.
    """
    return weight / mass if weight < mass else float(weight > 0)


def node_terms(draft: Draft, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Target probability p(x) and mass mu(x) of every node's token, both [N]; mu = 1 for a deterministic token."""
    device = target_probs.device
    p = target_probs[to_device(draft.parent_rows, device), draft.tokens]
    if draft.mass is None:
        return p, torch.ones_like(p)
    mu = torch.ones(draft.num_nodes, dtype=draft.mass.distributions.dtype, device=device)
    sampled = [node for node, is_sampled in enumerate(draft.sampled) if is_sampled]
    laws = [draft.mass.distribution_of_row[draft.parent_rows[node]] for node in sampled]
    nodes, distributions = to_device([sampled, laws], device)
    mu[nodes] = draft.mass.distributions[distributions, draft.tokens[nodes]]
    return p, mu


def take(rows_of: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of a matrix, [R, V] -> [len(rows), V]; a view if they are consecutive, so it must not be written to."""
    if rows and tuple(rows) == tuple(range(rows[0], rows[0] + len(rows))):
        return rows_of[rows[0] : rows[0] + len(rows)]
    return rows_of[to_device(rows, rows_of.device)]


def left_over(weights: Tensor, scale: Sequence[float], mass: Tensor) -> Tensor:
    """(scale * weights - mass)_+ row by row: [n, V], n numbers, [n, V] -> [n, V] in the dtype of `weights`."""
    factor = to_device(scale, weights.device, weights.dtype).unsqueeze(-1)  # [n, 1]
    return (weights * factor).sub_(mass).clamp_(min=0)


def pieces(rows: Sequence[int], matrix: Tensor) -> Iterator[Sequence[int]]:
    """Split `rows` of a matrix [R, V] into pieces that are processed together: on a CPU as many as fit into its cache,
    elsewhere all.
    """
    size = max(1, _CACHED_NUMBERS // matrix.shape[-1]) if matrix.device.type == "cpu" else len(rows)
    while rows:
        yield rows[:size]
        rows = rows[size:]


def residual_weights(
    draft: Draft, target_probs: Tensor, rows: Sequence[int], reach: Sequence[float] | None = None
) -> Tensor:
    """Weights (P p - mu)_+ of the residual at `rows` where nothing was accepted: -> [len(rows), V].

    mu is the distribution of the row if a child was, or could have been, sampled there; a point mass at its
    deterministic child; zero if nothing could have been proposed. At most one child per row. `reach[i]` is P at
    rows[i], default 1. The result must not be written to: where no row has anything to subtract it is `target_probs`.
    Leviathan et al. 2023 (arXiv 2211.17192) for mu = q, P = 1; valid for any sub-probability mu.
    """
    at_rows = take(target_probs, rows)  # [B, V]
    distributions = [draft.mass.distribution_of_row[row] if draft.mass is not None else -1 for row in rows]
    child_of_row = {row: node for node, row in enumerate(draft.parent_rows)}
    with_distribution = [b for b, distribution in enumerate(distributions) if distribution >= 0]
    fixed = [b for b, row in enumerate(rows) if distributions[b] < 0 and row in child_of_row]
    if not with_distribution and not fixed:
        return at_rows
    weights = at_rows.clone()
    if draft.mass is not None:
        scale = [1.0 if reach is None else reach[b] for b in with_distribution]
        weights[to_device(with_distribution, weights.device)] = left_over(
            take(at_rows, with_distribution),
            scale,
            take(draft.mass.distributions, [distributions[b] for b in with_distribution]),
        )
    places, children = to_device([fixed, [child_of_row[rows[b]] for b in fixed]], weights.device)
    weights[places, draft.tokens[children]] = 0
    return or_target(weights, at_rows)


def or_target(weights: Tensor, at_rows: Tensor) -> Tensor:
    """`weights` [B, V], or the target's distribution in rows where all weights are zero.

    All zero is possible through rounding only; p is then the best approximation.
    """
    usable = weights.amax(-1, keepdim=True) > 0  # [B, 1]
    if not is_awaited(weights.device) and bool(usable.all()):
        return weights
    return torch.where(usable, weights, at_rows)


def require_chains(draft: Draft, name: str) -> None:
    """Assert that every request has a chain: `name` subtracts one mu per row, so it takes neither siblings nor a
    distribution beside a deterministic child.
    """
    for b in range(draft.num_requests):
        assert draft.is_chain(b), f"{name} takes chains: a row has several children"
    if draft.mass is not None:
        sampled = draft.sampled or (False,) * draft.num_nodes
        for node, row in enumerate(draft.parent_rows):
            assert (draft.mass.distribution_of_row[row] >= 0) == sampled[node], (
                "a row has a distribution exactly when its child was sampled from it"
            )


def open_rows(draft: Draft) -> set[int]:
    """Rows where something was, or could have been, proposed: those with a child or a distribution."""
    distributions = draft.mass.distribution_of_row if draft.mass is not None else ()
    return {*draft.parent_rows, *(row for row, distribution in enumerate(distributions) if distribution >= 0)}


def path_to(draft: Draft, request: int, node: int) -> tuple[int, ...]:
    """Nodes of `request` from the root to `node`, indexed within the request; () for -1, its anchor."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = draft.parents[draft.offsets[request] + node]
    return tuple(reversed(path))


def deepest_walk(draft: Draft, matches: Sequence[bool]) -> tuple[list[int], list[float]]:
    """The deepest path of matching nodes of each request: matches [N] -> (last rows [B], steps [N]).

    `steps[i]` is 1.0 if the path, at node i's parent, continues with node i: the match with the longest continuation,
    the first among equals.
    """
    height = [0] * draft.num_rows  # [R] number of matches that can follow a row
    chosen = [-1] * draft.num_rows  # [R] the node the path continues with
    stops, parent_rows = [], draft.parent_rows
    for b, (start, stop) in enumerate(zip(draft.offsets, draft.offsets[1:], strict=False)):
        ahead = b + 1  # offset between a node's index and its row
        for node in range(stop - 1, start - 1, -1):
            if matches[node] and height[node + ahead] >= height[parent_rows[node]] - 1:
                height[parent_rows[node]], chosen[parent_rows[node]] = height[node + ahead] + 1, node
        row = start + b
        while chosen[row] >= 0:
            row = chosen[row] + ahead
        stops.append(row)
    return stops, [float(chosen[row] == node) for node, row in enumerate(parent_rows)]


def verdict_at(
    draft: Draft,
    tokens: Sequence[int],
    rows: Sequence[int],
    next_tokens: Sequence[int],
    probabilities: Sequence[float] | None,
    proposed: Collection[int] | None = None,
) -> Verdict:
    """The verdict for paths that end at `rows` [B], from host copies of the draft's tokens [N] and of `probabilities`
    [N] (None: not known)

    The kind of the next token is "residual" at the rows in `proposed` (by default the draft's open rows), else "bonus".
    """
    proposed = open_rows(draft) if proposed is None else proposed
    paths = [path_to(draft, b, row - draft.anchor_row(b) - 1) for b, row in enumerate(rows)]
    return Verdict(
        paths=tuple(paths),
        accepted=tuple(tuple(tokens[draft.offsets[b] + node] for node in path) for b, path in enumerate(paths)),
        next_tokens=tuple(next_tokens),
        next_kinds=tuple("residual" if row in proposed else "bonus" for row in rows),
        probabilities=tuple(
            (None,) * length if probabilities is None else tuple(probabilities[start : start + length])
            for start, length in zip(draft.offsets, draft.lengths, strict=False)
        ),
    )
