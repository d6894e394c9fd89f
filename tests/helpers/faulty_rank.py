"""A rank with a fault: `foretoken.parallel.rank` that dies, hangs, is slow or computes something else, when it is told.

`FORETOKEN_TEST_RANK_FAULT` names a file whose text, `RANK:WHAT:COUNT` (see `Fault`), may change while the ranks run. At
its `COUNT`th exchange with other ranks since then, or from there on, the rank

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
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foretoken.model.decoder import Decoder
from foretoken.parallel import rank
from foretoken.parallel.exchange import RankExchange

VARIABLE = "FORETOKEN_TEST_RANK_FAULT"
COMMAND = (sys.executable, "-P", "-m", "tests.helpers.faulty_rank")


@dataclass(frozen=True)
class Fault:
    """What happens to `rank` at its `count`th exchange; `serial` tells a fault from an equal one before it."""

    rank: int
    what: str
    count: int
    serial: int = 0

    def tell(self, file: Path) -> None:
        """Write it where the ranks look."""
        new = file.with_suffix(".new")
        new.write_text(f"{self.rank}:{self.what}:{self.count}:{self.serial}")
        new.replace(file)


class Faulty:
    """Does to this rank what the file says."""

    def __init__(self, file: Path) -> None:
        self.file, self.text, self.seen = file, "", 0
        self.rank, self.what, self.count = 0, "", 0

    def exchange(self, own: int) -> None:
        """Rank `own` is about to exchange numbers."""
        text = self.file.read_text()
        if text != self.text:
            number, self.what, count, _ = text.split(":")
            self.text, self.seen, self.rank, self.count = text, 0, int(number), int(count)
        if own != self.rank:
            return
        self.seen += 1
        if self.what == "slow" and self.seen >= self.count and random.random() < 0.1:
            time.sleep(random.random() * 0.02)
        if self.seen == self.count:
            if self.what == "raise":
                raise ValueError("a fault of this test")
            if self.what in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if self.what == "kill" else signal.SIGSTOP)

    @property
    def perturbs(self) -> bool:
        """Whether this rank's logits are others now."""
        return self.what == "perturb" and self.seen >= self.count


def main() -> None:
    """Be a rank that has the fault, if it is this one's."""
    faulty = Faulty(Path(os.environ[VARIABLE]))
    parts, logits = RankExchange._parts, Decoder.output_logits

    def faulty_parts(self: RankExchange, x: Tensor) -> list[Tensor]:
        faulty.exchange(self.rank)
        return parts(self, x)

    def swapped(self: Decoder, normed: Tensor) -> Tensor:
        found = logits(self, normed)
        if not faulty.perturbs or faulty.rank != self.shard.rank:
            return found
        best, places = found.topk(2, dim=-1)
        return found.scatter(-1, places, best.flip(-1))

    RankExchange._parts, Decoder.output_logits = faulty_parts, swapped  # type: ignore[method-assign]
    rank.main()


if __name__ == "__main__":
    main()
