"""Records of answers, from what a drafter showed at each place or from the rounds that ran.

Of a drafter that needs nothing but the text the draft tokens at every place are known exactly, once the answer is
(`told`). Of others only the rounds that ran are known, and what lies between them follows from these (`record_of`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from foretoken.control.candidates import Preview
from foretoken.simulate.sim_request import Record, Round

_MAX_NODES = 24  # draft tokens of a round that are kept; what the policy asks for at most


def told(tokens: Sequence[int], previews: Sequence[Preview], preview_s: float) -> Record:
    """The record of an answer of which is known what was shown at each of its places, all but the first."""
    assert len(previews) == len(tokens) - 1
    rounds = []
    for place, shown in enumerate(previews):
        right = shown.outcomes(tokens[place + 1 :])
        rounds.append(Round(shown.parents, tuple(node for node, stands in enumerate(right) if stands)))
    return Record(tuple(rounds), tuple(tokens), tuple(previews), preview_s)


def record_of(seen: Mapping[int, tuple[int, Round]], seed: int = 0) -> Record | None:
    """The record of an answer whose rounds were seen: by place, the budget and the round. None where nothing was
    drafted with a budget.

    A round that begins within what another one drafted rightly is the rest of that one. Where draft tokens ended
    because the budget did, they are taken to go on: behind a draft token that failed with draft tokens that fail,
    behind one that stood with one that was never judged, drawn with the share of draft tokens that stood, and then with
    the round that really came there.
    """
    whole = {place: pair for place, pair in sorted(seen.items()) if pair[0] > 0}
    if not whole:
        return None
    judged = sum(len(r.path) + (len(r.path) < len(r.parents)) for _, r in whole.values())
    share = sum(len(r.path) for _, r in whole.values()) / judged if judged else 0.0
    rng = random.Random(seed)
    rounds: dict[int, Round] = {}
    for place, (budget, found) in sorted(whole.items(), reverse=True):
        rest = (
            _continued(found, rounds.get(place + len(found.path) + 1, Round()), rng.random() < share)
            if len(found.parents) >= budget
            else found
        )
        for inner in range(len(found.path) + 1):
            rounds[place + inner] = rest.within(_MAX_NODES)
            if rest.path:
                rest = behind(rest)
    return Record(tuple(rounds[place] for place in sorted(rounds)))


def _continued(found: Round, after: Round, stands: bool) -> Round:
    """A round that its budget cut short, as far as a larger budget might have taken it."""
    ends = bool(found.path) and found.path[-1] not in found.parents
    longer = _under(found, stands, after) if ends else found
    while len(longer.parents) < _MAX_NODES:
        longer = Round((*longer.parents, len(longer.parents) - 1), longer.path)
    return longer


def behind(found: Round) -> Round:
    """What is left of a round once the first node that stood is part of the text."""
    below: dict[int, int] = {found.path[0]: -1}
    for node, parent in enumerate(found.parents):
        if parent in below and node not in below:
            below[node] = len(below) - 1
    parents = tuple(below[found.parents[node]] for node in list(below)[1:])
    return Round(parents, tuple(below[node] for node in found.path[1:]))


def _under(found: Round, first: bool, after: Round) -> Round:
    """A round, every node of which stood or which has none, with a draft token more at its end: it stands (`first`)
    with `after` below.
    """
    node = len(found.parents)
    end = found.path[-1] if found.path else -1
    if not first:
        return Round((*found.parents, end), found.path)
    shifted = tuple(node if parent < 0 else node + 1 + parent for parent in after.parents)
    path = (*found.path, node, *(node + 1 + below for below in after.path))
    return Round((*found.parents, end, *shifted), path)
