"""Every way of producing a draft, as programs over `Choice`: chains and trees, deterministic, sampled, thinned,
missing, mixed.
"""

from collections.abc import Callable

import numpy as np

from tests.helpers.enumeration import Chain, Child, Choice, Drafter, DraftToken, Spot, Tables, Tokens, point

KINDS = ("model", "point", "coin", "dropped", "stopped", "point_coin", "cut", "mixed")
TREES = ("fixed", "siblings", "three", "plus_one", "thinned", "overlap", "two_and_one", "uneven", "twice")


def _sampled(choice: Choice, q: np.ndarray, keep: np.ndarray) -> DraftToken:
    """A token from q that stays with probability keep(x); keep = a for all x is a coin tossed before the draw."""
    x = choice.pick(q)
    return DraftToken(x if choice.coin(float(keep[x])) else None, q * keep)


def draft_token(choice: Choice, kind: str, q: np.ndarray, rng: np.random.Generator, depth: int) -> DraftToken | None:
    """One position drafted in the named way; None = stopped before anything could be drawn."""
    vocab = len(q)
    if kind == "mixed":
        kind = KINDS[(depth + int(rng.integers(len(KINDS)))) % (len(KINDS) - 1)]
    best = int(np.argmax(q))
    if kind == "point":
        return DraftToken(best)
    if kind == "coin":
        return _sampled(choice, q, np.full(vocab, rng.uniform(0.2, 0.95)))
    if kind == "dropped":
        return _sampled(choice, q, np.where(rng.random(vocab) < 0.3, 0.0, rng.random(vocab)))
    if kind == "stopped":
        return DraftToken(choice.pick(q), q) if q.max() > 0.6 else None
    if kind == "point_coin":
        return _sampled(choice, point(vocab, best), np.full(vocab, 0.6))
    if kind == "cut":
        kept = np.where(np.arange(vocab) % 2 == 0, q, 0.0)
        distribution = kept / kept.sum() if kept.sum() > 0 else point(vocab, 0)
        return DraftToken(choice.pick(distribution), distribution)
    return DraftToken(choice.pick(q), q)


def chain_drafter(kind: str, length: int, draft_tables: Tables, seed: int) -> Drafter:
    """Drafts up to `length` tokens; what it does at a position is a function of the text before it."""

    def propose(choice: Choice, context: Tokens) -> Chain:
        chain: Chain = ()
        text = context
        while len(chain) < length:
            one = draft_token(choice, kind, draft_tables[text], np.random.default_rng([seed, *text]), len(chain))
            if one is None:
                break
            chain += (one,)
            if one.token is None:
                break
            text += (one.token,)
        return chain

    return propose


def tree_drafter(kind: str, depth: int, draft_tables: Tables, seed: int) -> Drafter:
    """Grows a tree of at most `depth` levels; the shape at a row is a function of the text before it."""

    def propose(choice: Choice, context: Tokens) -> Spot:
        return _grow(choice, kind, depth, depth, draft_tables, context, seed)

    return propose


def _grow(choice: Choice, kind: str, depth: int, levels: int, distributions: Tables, text: Tokens, seed: int) -> Spot:
    def below(token: int, same: str = kind, deeper: int = depth - 1) -> Spot:
        return _grow(choice, same, deeper, levels, distributions, (*text, token), seed)

    if depth <= 0:
        return Spot()
    q, rng = distributions[text], np.random.default_rng([seed, 9, *text])
    best = int(np.argmax(q))
    top = depth == levels
    if kind == "fixed":
        return row(choice, q, below, fixed=2)
    if kind == "siblings":
        return row(choice, q, below, drawn=2)
    if kind == "three":
        return row(choice, q, below, drawn=3) if top else Spot(None, (Child(best),))
    if kind == "plus_one":
        return row(choice, q, below, fixed=1, drawn=1)
    if kind == "thinned":
        return row(choice, q, below, fixed=1, drawn=1, keep=np.where(rng.random(len(q)) < 0.2, 0.0, rng.random(len(q))))
    if kind == "overlap":
        return row(choice, q, below, fixed=1, drawn=1, apart=False)
    if kind == "two_and_one":
        return row(choice, q, below, fixed=1, drawn=2) if top else Spot(None, (Child(best),))
    if kind == "twice":  # one draft token given twice, each time with something else below
        again = Child(best, False, _grow(choice, "thinned", depth - 1, levels, distributions, (*text, best), seed))
        return Spot(None, (Child(best), Child((best + 1) % len(q)), again, Child(best, False, below(best, "model"))))
    if kind == "model":
        return row(choice, q, below, drawn=1)
    shape = int(rng.integers(5))  # uneven
    if shape == 0 and not top:
        return Spot()
    keep = rng.random(len(q)) if shape == 1 else None
    return row(choice, q, below, fixed=(1, 1, 0, 0, 2)[shape], drawn=(0, 1, 1, 2, 0)[shape], keep=keep)


def row(
    choice: Choice,
    q: np.ndarray,
    below: Callable[[int], Spot],
    fixed: int = 0,
    drawn: int = 0,
    keep: np.ndarray | None = None,
    apart: bool = True,
    declared: np.ndarray | None = None,
) -> Spot:
    """The likeliest `fixed` tokens of q, and `drawn` ones sampled without replacement from the rest (or, not `apart`,
    from all of q).

    One draw may be thinned: it stays with probability keep(x). The drawn children come first; `declared` replaces the
    true distribution.
    """
    best = [int(x) for x in np.argsort(-q, kind="stable")[:fixed] if q[x] > 0]
    rest = q.copy()
    if apart:
        rest[best] = 0
    children: list[Child] = []
    distribution = None
    if drawn and rest.sum() > 0:
        distribution = rest / rest.sum() * (1.0 if keep is None else keep)
        while len(children) < drawn and rest.sum() > 0:
            x = choice.pick(rest / rest.sum())
            rest[x] = 0
            if keep is not None and not choice.coin(float(keep[x])):
                break
            children.append(Child(x, True, below(x)))
        distribution = distribution if declared is None else declared
    return Spot(distribution, (*children, *(Child(x, False, below(x)) for x in best)))
