"""Several drafters for one request, in a world whose costs and chances are known: the best of them, whoever it is, at
any load.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from foretoken.control.candidates import DraftBudget, DrafterOption, Preview, RequestView
from foretoken.control.config import PolicyConfig
from foretoken.control.policy import BudgetPolicy
from tests.helpers.control import observe, plan

MAX_NUM_DRAFT = PolicyConfig.max_num_draft

LOOKUP, MODEL = 0, 1
COLD = 40  # rounds in which costs and texts become known


@dataclass
class Text:
    """What draft tokens are worth in a text: a lookup finds something in `found` of the rounds and is right with
    `copied`, a model with `modelled`.
    """

    found: float
    copied: float
    modelled: float


@dataclass
class World:
    """A target whose step bends at `free` rows, a model with a price per draft token (half as much again for every
    further request).
    """

    free: float = 12
    price_s: float = 0.1
    entry_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    seconds: float = 0.0
    tokens: int = 0

    def target_s(self, rows: int) -> float:
        return max(1.0, 0.95 + 0.03 * rows, rows / self.free) * (1 + 0.03 * self.rng.uniform(-1, 1))

    def kept(self, chance: float, most: int) -> int:
        return next((i for i in range(most) if self.rng.random() >= chance), most)


Choose = Callable[[list[RequestView]], list[DraftBudget]]


def run(
    world: World, texts: Callable[[int, int], Text], rounds: int, batch: int, choose: Choose | None = None
) -> BudgetPolicy:
    """`choose` instead of the policy where it is given; the policy then learns nothing. The first `COLD` rounds do not
    count.
    """
    policy, started = BudgetPolicy(), set()
    for turn in range(rounds):
        wishes, said = [], []
        for b in range(batch):
            text = texts(turn, b)
            number = 16 if world.rng.random() < text.found else 0
            look = Preview(tuple(range(-1, number - 1)), tuple(0.8 ** (k + 1) for k in range(number)))
            said.append((text, world.kept(text.copied, number)))
            arms = [DrafterOption(LOOKUP, "lookup", number, preview=look)] if number else []
            wishes.append(RequestView(b, (*arms, DrafterOption(MODEL, "model", MAX_NUM_DRAFT)), num_tokens=100))
        if choose is None:
            step(world, policy, wishes, said, plan(policy, wishes), started)
        else:
            step(world, None, wishes, said, choose(wishes), started)
        if turn == COLD:
            world.seconds, world.tokens = 0.0, 0
    return policy


def step(
    world: World,
    policy: BudgetPolicy | None,
    wishes: list[RequestView],
    said: list[tuple[Text, int]],
    grants: list[DraftBudget],
    started: set[int],
) -> None:
    rows = len(wishes) + sum(grant.num_draft for grant in grants)
    modelled = [b for b, grant in enumerate(grants) if grant.option == MODEL and grant.num_draft]
    target_s, draft_s = world.target_s(rows), 0.0
    if modelled:
        longest = max(grants[b].num_draft for b in modelled)
        draft_s = world.price_s * longest * (1 + 0.05 * (len(modelled) - 1)) + world.entry_s * len(
            set(modelled) - started
        )
        num_read = 100 * len(set(modelled) - started)
        started.update(modelled)
    accepted = []
    for b, (wish, grant, (text, copied)) in enumerate(zip(wishes, grants, said, strict=True)):
        kept = 0
        for arm in wish.options:
            if policy is not None and arm.preview is not None:
                right = (
                    [True] * copied + [False] * (copied < arm.max_draft) + [None] * max(0, arm.max_draft - copied - 1)
                )
                # No more is known of the text than came out.
                emits = min(copied, grant.num_draft if grant.option == LOOKUP else 0) + 1
                found = [r if k < emits else None for k, r in enumerate(right)]
                policy.observe_preview(b, "lookup", arm.preview, found)
        if grant.option == LOOKUP:
            kept = min(copied, grant.num_draft)
        if b in modelled:
            kept = world.kept(text.modelled, grant.num_draft)
        accepted.append(kept)
        world.tokens += 1 + kept
    reads = {"model": num_read} if modelled else {}
    if policy is not None:
        observe(policy, wishes, grants, accepted, target_s, {"model": draft_s} if modelled else {}, reads)
    world.seconds += target_s + draft_s


def fixed(arm: int, count: int) -> Choose:
    return lambda wishes: [
        next(
            (DraftBudget(a.number, min(count, a.max_draft)) for a in wish.options if a.number == arm),
            DraftBudget(None, 0),
        )
        for wish in wishes
    ]


def speed(world: World) -> float:
    return world.tokens / world.seconds


CASES = {
    "copies": Text(0.95, 0.97, 0.5),
    "new text": Text(0.3, 0.3, 0.75),
    "both": Text(0.5, 0.9, 0.7),
    "nothing": Text(0.6, 0.02, 0.05),
    "half": Text(0.7, 0.55, 0.0),
}


BATCHES = (1, 4, 16)
PRICES_S = (0.02, 0.1, 0.5)


def check_speed(name: str, price_s: float, batch: int) -> None:
    """The policy against every fixed drafter and number in one world, for proof/test_policy.py."""

    def measured(choose: Choose | None, *seeds: int) -> float:
        worlds = [World(price_s=price_s, entry_s=0.5, rng=random.Random(seed)) for seed in seeds]
        for world in worlds:
            run(world, lambda *_: CASES[name], 400, batch, choose)
        return sum(map(speed, worlds))

    choices = [fixed(arm, count) for arm in (LOOKUP, MODEL) for count in (0, 1, 2, 4, 6, 12)]
    best = max(choices, key=lambda choose: measured(choose, 5))
    chosen = measured(None, 1, 2, 3)
    assert chosen >= 0.95 * measured(best, 1, 2, 3)
    assert chosen >= 0.97 * measured(choices[0], 1, 2, 3)


def test_requests_of_one_batch_take_different_drafters() -> None:
    """Half of them copy, half are new: better than any one drafter for all."""

    def text(_turn: int, b: int) -> Text:
        return CASES["copies"] if b % 2 else CASES["new text"]

    def measured(choose: Choose | None) -> float:
        world = World(free=24, price_s=0.05)
        run(world, text, 400, 4, choose)
        return speed(world)

    assert measured(None) >= 1.1 * max(
        measured(fixed(arm, count)) for arm in (LOOKUP, MODEL) for count in (1, 2, 3, 4, 6, 8, 12)
    )


def test_another_drafter_takes_over_within_fifty_rounds() -> None:
    """The text turns from copies to new words and back."""
    for batch in (1, 8):
        chosen: list[list[int | None]] = []
        world, policy, started = World(price_s=0.05), BudgetPolicy(), set()
        for turn in range(600):
            text = CASES["copies"] if turn < 200 or turn >= 400 else Text(0.4, 0.05, 0.8)
            wishes, said = [], []
            for b in range(batch):
                number = 16 if world.rng.random() < text.found else 0
                look = Preview(tuple(range(-1, number - 1)), tuple(0.8 ** (k + 1) for k in range(number)))
                said.append((text, world.kept(text.copied, number)))
                arms = [DrafterOption(LOOKUP, "lookup", number, preview=look)] if number else []
                wishes.append(RequestView(b, (*arms, DrafterOption(MODEL, "model", MAX_NUM_DRAFT)), num_tokens=100))
            grants = plan(policy, wishes)
            chosen.append([grant.option if grant.num_draft else None for grant in grants])
            step(world, policy, wishes, said, grants, started)
        for first, last, arm in ((100, 200, LOOKUP), (250, 400, MODEL), (450, 600, LOOKUP)):
            taken = [one for turn in chosen[first:last] for one in turn]
            assert taken.count(arm) > 0.6 * len(taken), (batch, first, arm)
