"""Do emitted tokens follow the target's distributions? Scores with known moments, and tests with a stated error rate.

A token y comes with the distribution p that it should have been sampled from, after all sampling parameters. Under that
hypothesis, and given all preceding tokens, any score g(y) has the mean and variance that p gives it, and the centred
score is a martingale for any text and any stopping rule. Three scores are used:

    surprisal   -log p(y), which moves when the distribution is too sharp or too flat (temperature, a missing filter)
    rank        the rank of y in p, randomised within p(y): uniform on [0, 1) (randomised PIT, Rosenblatt 1952)
    draft       (q - p) / max(q, p) at y, where the drafter's distribution q is known: moved by a wrong acceptance
                test, a wrong residual or lost noise, since they all mix p with q

`distribution_tests` tests a fixed number of tokens. `SequentialTest` is a sequential test that may be read after every
token: it bets on every score at fixed stakes, its wealth is a martingale that starts at 1, and the probability that it
ever reaches 1/alpha is at most alpha (Ville 1939; Ramdas et al. 2023, arXiv 2210.01948). At temperature 0 the
distribution is a point mass and the check is exact: `weigh_greedy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.engine.shadow.tails import chi2_tail, noncentrality, quantile, upper_tail

NUM_BINS = 20
STAKES = tuple(sign * stake for stake in (0.5, 0.2, 0.08, 0.03, 0.012) for sign in (1, -1))
_BET_SCORES = 4  # surprisal, drafted token, first and second cosine of the rank
_SURPRISAL_CUT = 3.0  # nats around the mean; bets require a bounded score
_BLOCK = 1 << 22  # values of a distribution [n, V] processed at once
_PER_BIN = 20  # minimum expected tokens in a bin of ranks
_MAX_SKEW = 1.0  # of the sum; above it, too few informative tokens for a tail of 1e-6
_POWER = 0.99


@dataclass(frozen=True)
class DraftChildren:
    """A drafter's distribution at one position: token ids and their mass, sum at most 1."""

    ids: tuple[int, ...]
    mass: tuple[float, ...]


@dataclass(frozen=True)
class Moments:
    """Sums over tokens of a centred score, of its variance and of its third central moment.

    `shift` is the rate at which the sum moves with the error that the score looks for, `distance` the rate at which the
    total variation of the tokens' distributions grows with that error, summed over tokens.
    """

    num_tokens: int = 0
    excess: float = 0.0
    variance: float = 0.0
    third: float = 0.0
    shift: float = 0.0
    distance: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def _no_bets() -> NDArray[np.float64]:
    return np.zeros((_BET_SCORES, len(STAKES)))


@dataclass(frozen=True)
class Evidence:
    """Evidence of some tokens about their distributions; the evidence of two streams is the sum.

    `ranks` [NUM_BINS] counts tokens by rank, `bets` [scores, stakes] is the logarithm of the wealth of each stake.
    `num_impossible` counts tokens of probability 0; `num_edges` those so near a filter's border that rounding decides
    whether it keeps them. Both contribute nothing else.
    """

    num_tokens: int = 0
    num_impossible: int = 0
    num_edges: int = 0
    surprisal: Moments = field(default_factory=Moments)
    draft: Moments = field(default_factory=Moments)
    ranks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BINS, dtype=np.int64))
    bets: NDArray[np.float64] = field(default_factory=_no_bets)

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def weigh(
    distributions: Tensor,
    tokens: Tensor,
    noise: NDArray[np.float64],
    drafts: Sequence[DraftChildren | None] = (),
    edges: Tensor | None = None,
    slack: float = 0.0,
) -> Evidence:
    """The evidence of `tokens` [n] with their `distributions` [n, V]. A row is a probability distribution, or 0
    throughout where it is unknown.

    `noise` [n] are uniforms in [0, 1) independent of the sampling of the tokens. `drafts[i]` is the drafter's
    distribution for token i, None if nothing was drafted; () if unknown. `edges` [n] bool marks tokens near a filter's
    border, whose probability in `distributions` is 0. `slack` is the allowed bias of the mean of a bounded score,
    because the distributions were computed with other rounding.
    """
    count, vocab = distributions.shape
    assert tokens.shape == noise.shape == (count,)
    assert not drafts or len(drafts) == count
    step = max(1, _BLOCK // vocab)
    total = Evidence()
    for start in range(0, count, step):
        part = slice(start, start + step)
        total += _weigh_block(
            distributions[part].double(),
            tokens[part],
            noise[part],
            drafts[part],
            None if edges is None else edges[part],
            slack,
        )
    return total


def _weigh_block(
    distributions: Tensor,
    tokens: Tensor,
    noise: NDArray[np.float64],
    drafts: Sequence[DraftChildren | None],
    edges: Tensor | None,
    slack: float,
) -> Evidence:
    tokens = tokens.to(distributions.device)
    chance = distributions.gather(-1, tokens[:, None])  # [n, 1]
    mute = chance[:, 0] == 0  # [n] impossible tokens contribute no other evidence
    edge = torch.zeros_like(mute) if edges is None else mute & edges.to(mute.device)
    surprise = torch.where(distributions > 0, -distributions.log(), 0.0)  # [n, V]
    entropy = (distributions * surprise).sum(-1, keepdim=True)  # [n, 1]
    off = surprise - entropy
    surprisal = _moments(surprise, distributions, tokens, mute)
    ranks = np.where(mute.cpu().numpy(), noise, _ranks(distributions, tokens, chance, noise))
    bounded = (off / _SURPRISAL_CUT).clamp(-1, 1)
    scores = np.zeros((_BET_SCORES, len(noise)))
    scores[0] = _excess(bounded, distributions, tokens, mute).cpu().numpy() / 2
    scores[2:] = np.cos(np.pi * ranks), np.cos(2 * np.pi * ranks)
    draft = Moments()
    rows = [row for row, one in enumerate(drafts) if one is not None]
    if rows:
        at = torch.tensor(rows, device=distributions.device)
        known = [one for one in drafts if one is not None]
        drafted = _dense(known, distributions.shape[-1], distributions.device)  # [m, V]
        distribution = distributions[at]
        tiny = torch.finfo(torch.float64).tiny
        lean = (drafted - distribution) / torch.maximum(drafted, distribution).clamp(min=tiny)  # [m, V] in [-1, 1]
        scores[1, rows] = _excess(lean, distribution, tokens[at], mute[at]).cpu().numpy() / 2
        # The direction towards a mixture with q.
        mixed = drafted / drafted.sum(-1, keepdim=True).clamp(min=tiny) - distribution
        draft = _moments(
            lean,
            distribution,
            tokens[at],
            mute[at],
            shift=float((mixed * lean).sum()),
            distance=float(mixed.abs().sum()) / 2,
        )
    return Evidence(
        num_tokens=len(noise),
        num_impossible=int((mute & ~edge).sum()),
        num_edges=int(edge.sum()),
        # p to the power 1 + e, normalised: the mean of the surprisal moves by -e times its variance.
        surprisal=replace(surprisal, shift=surprisal.variance, distance=float((distributions * off.abs()).sum()) / 2),
        draft=draft,
        ranks=np.bincount((ranks * NUM_BINS).astype(np.int64).clip(0, NUM_BINS - 1), minlength=NUM_BINS),
        bets=_bets(scores, slack),
    )


def _excess(score: Tensor, distributions: Tensor, tokens: Tensor, mute: Tensor) -> Tensor:
    """Centred score of the tokens from scores `[n, V]`: `[n]`, 0 where the token is not evidence."""
    value = score.gather(-1, tokens[:, None])[:, 0] - (distributions * score).sum(-1)
    return torch.where(mute, 0.0, value)


def _moments(
    score: Tensor, distributions: Tensor, tokens: Tensor, mute: Tensor, shift: float = 0.0, distance: float = 0.0
) -> Moments:
    off = score - (distributions * score).sum(-1, keepdim=True)  # [n, V]
    return Moments(
        len(tokens),
        float(_excess(score, distributions, tokens, mute).sum()),
        float((distributions * off**2).sum()),
        float((distributions * off**3).sum()),
        shift,
        distance,
    )


def _ranks(distributions: Tensor, tokens: Tensor, chance: Tensor, noise: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mass of all more probable tokens (lower ids first on ties), plus a random part of the token's own: `[n]`."""
    ids = torch.arange(distributions.shape[-1], device=distributions.device)
    ahead = (distributions > chance) | ((distributions == chance) & (ids < tokens[:, None]))
    above = (distributions * ahead).sum(-1).cpu().numpy()
    found: NDArray[np.float64] = above + noise * chance[:, 0].cpu().numpy()
    return found


def _dense(drafts: Sequence[DraftChildren], vocab: int, device: torch.device) -> Tensor:
    rows = [row for row, draft in enumerate(drafts) for _ in draft.ids]
    ids = [token for draft in drafts for token in draft.ids]
    mass = [value for draft in drafts for value in draft.mass]
    out = torch.zeros(len(drafts), vocab, dtype=torch.float64, device=device)
    out.index_put_(
        tuple(torch.tensor([rows, ids], dtype=torch.int64, device=device)),
        torch.tensor(mass, dtype=torch.float64, device=device),
    )
    return out


def _bets(scores: NDArray[np.float64], slack: float) -> NDArray[np.float64]:
    """log of prod(1 + stake * score) over tokens, scores less `slack`: `[scores, n]` -> `[scores, stakes]`."""
    stakes = np.array(STAKES)[:, None]  # [stakes, 1]
    grown: NDArray[np.float64] = np.stack(
        [np.log1p(stakes * score[None, :] - np.abs(stakes) * slack).sum(-1) for score in scores]
    )
    return grown


class SequentialTest:
    """Sequential test of a stream of evidence: the probability of an alarm while all tokens follow their distributions
    is at most `alpha`, however long it runs.

    Evidence must come in an order that does not depend on the tokens: whole answers in order of arrival are valid,
    whole answers in order of completion are not (short ones would come first).
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.alarm = False
        self._log_wealth = _no_bets()
        self._impossible = False

    def add(self, evidence: Evidence) -> None:
        """Add the next piece of evidence."""
        self._log_wealth = self._log_wealth + evidence.bets
        self._impossible |= evidence.num_impossible > 0
        self.alarm |= self.log_e_value >= -math.log(self.alpha)

    @property
    def log_e_value(self) -> float:
        """Logarithm of the wealth, split evenly over all bets at the start; infinite after an impossible token."""
        if self._impossible:
            return math.inf
        best = float(self._log_wealth.max())
        return best + math.log(float(np.exp(self._log_wealth - best).mean()))

    @property
    def e_value(self) -> float:
        """The wealth; it started at 1."""
        return math.exp(self.log_e_value) if self.log_e_value < 700 else math.inf


@dataclass(frozen=True)
class DistributionTest:
    """One test of many tokens at once: it fails if `p_value` is below `level`.

    `smallest` is the total variation, averaged over tokens, that it misses with probability 0.01 at most; `sees` states
    the same in the test's terms. A test without enough tokens is not `conclusive` and never fails.
    """

    name: str
    num_tokens: int
    statistic: str
    p_value: float
    level: float
    smallest: float
    sees: str
    conclusive: bool

    @property
    def passed(self) -> bool:
        """Whether the tokens are consistent with their distributions."""
        return not self.conclusive or self.p_value >= self.level


def distribution_tests(evidence: Evidence, alpha: float) -> tuple[DistributionTest, ...]:
    """All tests of a fixed number of tokens; if every distribution was followed, the probability that any of them fails
    is at most `alpha`.

    One more test, that no token was impossible, has no false alarms: `evidence.num_impossible == 0`.
    """
    level = alpha / (3 if evidence.draft.num_tokens else 2)
    tests = [_mean_test("surprisal", evidence.surprisal, level), _rank_test(evidence.ranks, level)]
    if evidence.draft.num_tokens:
        tests.append(_mean_test("draft", evidence.draft, level))
    return tuple(tests)


def _mean_test(name: str, moments: Moments, level: float) -> DistributionTest:
    """Test a score's sum against its expectation, with the tails of the gamma distribution of the same moments."""
    if moments.variance <= 0:
        return _inconclusive(name, moments.num_tokens, "z = 0.0", level, "every distribution is a point mass")
    deviation = math.sqrt(moments.variance)
    z, skew = moments.excess / deviation, moments.third / deviation**3
    p_value = min(1.0, 2 * min(upper_tail(z, skew), upper_tail(-z, -skew)))
    border = max(quantile(level / 2, skew), quantile(level / 2, -skew))
    needed = _bent(border + quantile(1 - _POWER, 0.0), skew if name == "surprisal" else 0.0)
    size = needed * deviation / abs(moments.shift) if moments.shift else math.inf
    smallest = size * moments.distance / moments.num_tokens
    what = (
        f"a temperature off by {size:.1%}"
        if name == "surprisal"
        else f"{size:.1%} of the tokens sampled from the draft's distribution"
    )
    sees = f"{what} (total variation {smallest:.3g})" if size < 1 else "little: more tokens are needed"
    return DistributionTest(
        name, moments.num_tokens, f"z = {z:.2f}", p_value, level, smallest, sees, conclusive=abs(skew) <= _MAX_SKEW
    )


def _bent(needed: float, skew: float) -> float:
    """The error, in units in which a small one moves the sum by as many deviations, that moves it by `needed`; infinite
    where none does.

    A sharper distribution has less variance, so each further step moves the surprisal less: with p to the power
    1 + e by e * variance - e^2 / 2 * third moment + ...
    """
    if skew < 1e-6:  # a flatter one moves it by more
        return needed
    rest = 1 - 2 * needed * skew
    return (1 - math.sqrt(rest)) / skew if rest >= 0 else math.inf


def _rank_test(ranks: NDArray[np.int64], level: float) -> DistributionTest:
    """Test the uniformity of the ranks by Pearson's chi-square, over as many bins as the tokens can fill."""
    count = int(ranks.sum())
    bins = next((n for n in (NUM_BINS, NUM_BINS // 2, NUM_BINS // 4) if count >= n * _PER_BIN), 0)
    if not bins:
        return _inconclusive("rank", count, "", level, f"fewer than {NUM_BINS // 4 * _PER_BIN} tokens")
    grouped = ranks.reshape(bins, -1).sum(-1)
    expected = count / bins
    square = float(((grouped - expected) ** 2).sum() / expected)
    # By Cauchy-Schwarz, a total variation of d between bin probabilities gives a noncentrality of at least 4 n d^2.
    smallest = math.sqrt(noncentrality(bins - 1, level, _POWER) / (4 * count))
    sees = f"ranks off by {smallest:.3g} in total variation"
    statistic, p_value = f"chi2({bins - 1}) = {square:.1f}", chi2_tail(square, bins - 1)
    return DistributionTest("rank", count, statistic, p_value, level, smallest, sees, conclusive=True)


def _inconclusive(name: str, num_tokens: int, statistic: str, level: float, why: str) -> DistributionTest:
    """A test that sees nothing."""
    return DistributionTest(name, num_tokens, statistic, 1.0, level, math.inf, f"nothing: {why}", conclusive=False)


@dataclass(frozen=True)
class GreedyEvidence:
    """Tokens chosen at temperature 0, compared with the argmax of their rows; the evidence of two streams is the sum.

    `num_other` counts tokens that are not the argmax, `num_beyond` those among them whose logit is further below the
    best one than rounding explains; `max_gap` is the largest difference, in logits.
    """

    num_tokens: int = 0
    num_other: int = 0
    num_beyond: int = 0
    max_gap: float = 0.0

    def __add__(self, other: GreedyEvidence) -> GreedyEvidence:
        return GreedyEvidence(
            self.num_tokens + other.num_tokens,
            self.num_other + other.num_other,
            self.num_beyond + other.num_beyond,
            max(self.max_gap, other.max_gap),
        )


def weigh_greedy(logits: Tensor, tokens: Tensor, tolerance: Tensor) -> GreedyEvidence:
    """Compare `tokens` [n] with the best of `logits` [n, V]; `tolerance` [n] is what rounding explains."""
    best = logits.max(-1)
    gaps = (best.values - logits.gather(-1, tokens[:, None])[:, 0]).double()  # [n]
    other = best.indices != tokens
    return GreedyEvidence(
        len(tokens), int(other.sum()), int((gaps > tolerance.double()).sum()), float(gaps.max()) if len(tokens) else 0.0
    )
