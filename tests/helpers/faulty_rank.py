"""A rank with a fault: `foretoken.parallel.rank` that dies, hangs, is slow or computes something else.

`FORETOKEN_TEST_RANK_FAULT` is `RANK:WHAT:COUNT`: at its `COUNT`th exchange with other ranks, or from there on, the rank

- `kill`: kills itself; `stop`: stops, as a debugger would stop it; `raise`: raises;
- `slow`: sleeps up to 20 ms before some exchanges;
- `perturb`: gets logits in which the two likeliest tokens have changed places, as if each row were a near tie that this
  rank decides otherwise.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from foretoken.parallel import rank
from foretoken.parallel.exchange import RankExchange

VARIABLE = "FORETOKEN_TEST_RANK_FAULT"
COMMAND = (sys.executable, "-P", "-m", "tests.helpers.faulty_rank")


def at(count: int, fault: Callable[[], None], is_lasting: bool) -> None:
    """Call `fault` at this rank's `count`th exchange, and at all later ones if `is_lasting`."""
    seen, parts = [0], RankExchange._parts

    def faulty(self: RankExchange, x: Tensor) -> list[Tensor]:
        seen[0] += 1
        if seen[0] == count or (is_lasting and seen[0] > count):
            fault()
        return parts(self, x)

    RankExchange._parts = faulty  # type: ignore[method-assign]


def perturb(count: int) -> None:
    gather, seen = RankExchange.all_gather, [0]

    def swapped(self: RankExchange, x: Tensor) -> Tensor:
        logits = gather(self, x)
        seen[0] += 1
        if seen[0] < count:
            return logits
        best, places = logits.topk(2, dim=-1)
        return logits.scatter(-1, places, best.flip(-1))

    RankExchange.all_gather = swapped  # type: ignore[method-assign]


def sleep() -> None:
    if random.random() < 0.1:
        time.sleep(random.random() * 0.02)


def broken() -> None:
    raise ValueError("a fault of this test")


FAULTS: dict[str, Any] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": broken,
    "slow": sleep,
}


def main() -> None:
    """Be a rank that has the fault, if it is this one's."""
    number, what, count = os.environ[VARIABLE].split(":")
    setup = rank.RankSetup

    def taken(**fields: Any) -> Any:
        found = setup(**fields)
        if found.rank == int(number):
            perturb(int(count)) if what == "perturb" else at(int(count), FAULTS[what], is_lasting=what == "slow")
        return found

    rank.RankSetup = taken  # type: ignore[misc, assignment]
    rank.main()


if __name__ == "__main__":
    main()
